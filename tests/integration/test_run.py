"""Whole runs of the packaged policy through real processes, and what becomes of them when these are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from runs import Run, running, until

pytestmark = pytest.mark.timeout(400)


def assert_whole(run: Run, updates: int) -> None:
    """Every update once and in order, every episode once, every version there and the last one the exported policy."""
    from safetensors.torch import load_file

    from farflung.run.workspace import Workspace
    from farflung.weights.manifest import derive_key
    from farflung.weights.subscriber import Subscriber
    from farflung.weights.urls import open_store

    assert [n for (n,) in run.query("SELECT id FROM updates ORDER BY id")] == list(range(1, updates + 1))
    assert [n for (n,) in run.query("SELECT version FROM versions ORDER BY version")] == list(range(updates + 1))
    taken = run.query("SELECT id, update_id FROM groups WHERE state = 'taken' AND update_id <= ?", updates)
    assert len(taken) == 2 * updates
    finished = run.query("SELECT group_id, idx FROM episodes")
    assert len(finished) == len(set(finished)) == len(list((run.folder / "episodes").glob("*.ffr")))
    space = Workspace.open(run.folder)
    served = Subscriber(open_store(space.store), space.run_id, key=derive_key(space.token)).fetch(updates).tensors
    exported = load_file(space.policy / "model.safetensors")
    assert served.keys() >= exported.keys()
    assert all((served[name] == exported[name]).all() for name in exported)


def test_a_run_and_every_child_killed_once(tmp_path: Path) -> None:
    with running(tmp_path, 6) as run:
        until(lambda: run.count("updates") >= 1, "the first update")
        for role in ("nvfp4-0", "router", "rollout", "training"):
            run.kill(role)
            before = run.count("updates")
            until(
                lambda before=before: run.count("updates") > before or run.count("updates") >= 6, f"life after {role}"
            )
        code, text = run.finish()
        assert code == 0, text + run.logs()
        assert_whole(run, 6)
        died = {detail.split()[0] for (detail,) in run.query("SELECT detail FROM events WHERE kind = 'process_died'")}
        assert died == {"nvfp4-0", "router", "rollout", "trainer"}
        sampled = {name for metrics in run.metrics() for name in metrics["pools"]}
        assert sampled == {"nvfp4", "bf16"}


def test_the_trainer_killed_between_checkpoint_and_report_repeats_nothing(tmp_path: Path) -> None:
    with running(tmp_path, 3) as run:
        until((run.folder / "checkpoints" / "update-000001").is_dir, "the first checkpoint")
        run.kill("training")
        until((run.folder / "checkpoints" / "update-000002").is_dir, "the second checkpoint")
        run.kill("training")
        code, text = run.finish()
        assert code == 0, text + run.logs()
        assert_whole(run, 3)


def test_the_coordinator_killed_takes_all_with_it_and_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, 4) as run:
        until(lambda: run.count("updates") >= 1, "the first update")
        children = run.children()
        assert {"router", "rollout", "training", "nvfp4-0", "bf16-0"} <= children.keys()
        assert run.process is not None
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        until(lambda: not any(psutil.pid_exists(pid) for pid in children.values()), "the children's end", 20)
        before = dict(run.query("SELECT group_id || '/' || idx, sha256 FROM episodes"))
        batches = dict(run.query("SELECT id, update_id FROM groups WHERE update_id IS NOT NULL"))
        run.start(resume=True)
        code, text = run.finish()
        assert code == 0, text + run.logs()
        assert_whole(run, 4)
        after = dict(run.query("SELECT group_id || '/' || idx, sha256 FROM episodes"))
        assert before.items() <= after.items()
        assert batches.items() <= dict(run.query("SELECT id, update_id FROM groups")).items()


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    with running(tmp_path, 50) as run:
        until(lambda: run.count("updates") >= 1, "the first update")
        children = run.children()
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        code, text = run.finish(60)
        assert code == 130
        assert f"farflung train --resume {run.folder}" in text
        assert not any(psutil.pid_exists(pid) for pid in children.values())


def test_in_turns_nothing_is_stale(tmp_path: Path) -> None:
    with running(tmp_path, 3, "--run.sync", "true") as run:
        code, text = run.finish()
        assert code == 0, text + run.logs()
        assert [m["all"]["staleness_max"] for m in run.metrics()] == [0, 0, 0]
        assert_whole(run, 3)


def test_two_coordinators_cannot_share_a_run(tmp_path: Path) -> None:
    with running(tmp_path, 50) as run:
        until(lambda: run.count("updates") >= 1, "the first update")
        second = Run(tmp_path / "second", 50)
        second.folder = run.folder
        second.start(resume=True)
        code, text = second.finish(60)
        assert code == 2
        assert "going on in another process" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_stops_the_run_and_more_room_lets_it_go_on(tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        with running(disk, 40) as run:
            code, text = run.finish()
            assert code == 1, text
            assert "disk is full" in text or "No space left" in text
            assert "--resume" in text
            done, episodes = run.count("updates"), run.count("episodes")
            subprocess.run(["mount", "-o", "remount,size=512m", str(disk)], check=True)
            run.start(resume=True)
            until(lambda: run.count("updates") > done, "an update after the disk has room")
            assert run.count("episodes") >= episodes
            run.process.send_signal(signal.SIGINT)
            assert run.finish(60)[0] == 130
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
