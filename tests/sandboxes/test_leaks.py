"""What is left behind: nothing, also when the owner is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farflung.sandboxes import SandboxFactory
from farflung.sandboxes.limits import Cgroups, Group, _started

OWNER = """
import asyncio, sys
from farflung.config import SandboxConfig
from farflung.sandboxes import open_factory

async def main():
    box = await open_factory(SandboxConfig(kind=sys.argv[1])).open({})
    await box.exec(f"setsid sleep {sys.argv[2]} & echo", seconds=5, max_bytes=100)
    print("ready", box._plan.scratch, flush=True)
    await box.exec(f"trap '' TERM; sleep {sys.argv[2]}; echo", seconds=99, max_bytes=100)

asyncio.run(main())
"""


def running(argument: str) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += f"sleep\0{argument}\0".encode() == path.read_bytes()
        except OSError:
            continue
    return count


def eventually(condition: object) -> bool:
    for _ in range(100):
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_everything_dies_with_its_owner(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    argument = f"7{os.getpid()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, argument], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        word, scratch = owner.stdout.readline().split()
        assert word == "ready"
        assert eventually(lambda: running(argument) == 2)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert eventually(lambda: running(argument) == 0)
    assert scratch == "None" or eventually(lambda: not Path(scratch).exists())
    assert eventually(lambda: swept(owner.pid)), "the next start removes its groups"


def swept(owner: int) -> bool:
    groups = Cgroups.find()
    return groups is None or not list(groups._memory.glob(f"farflung-{owner}-*"))


async def test_a_closed_sandbox_leaves_no_group_folder_process_or_descriptor(factory: SandboxFactory) -> None:
    async def once() -> None:
        box = await factory.open({"a": "b"})
        await box.exec("setsid sleep 100 & echo", seconds=5, max_bytes=100)
        await box.close()

    await once()
    before = (len(os.listdir("/proc/self/fd")), children(), folders(factory))
    for _ in range(10):
        await once()
    await asyncio.gather(*(once() for _ in range(10)))
    assert (len(os.listdir("/proc/self/fd")), children(), folders(factory)) == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def folders(factory: SandboxFactory) -> list[Path]:
    groups: Cgroups | None = factory._cgroups  # type: ignore[attr-defined]
    found: list[Path] = []
    if groups is not None:
        found += groups._memory.glob(f"farflung-{os.getpid()}-*")
        found += groups._pids.glob(f"farflung-{os.getpid()}-*")
    return found


def make_hierarchy(root: Path, controllers: str) -> Path:
    """A folder that looks like a version 2 hierarchy."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in (("cgroup.subtree_control", controllers), ("cgroup.procs", "")):
        (root / name).write_text(text)
    return root


def test_version_two_groups_lie_where_both_controllers_are_handed_down(tmp_path: Path) -> None:
    make_hierarchy(tmp_path / "mount", "cpu memory pids")
    middle = make_hierarchy(tmp_path / "mount/user", "memory pids")
    make_hierarchy(tmp_path / "mount/user/app", "memory")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path / 'mount'} cgroup2 rw 0 0\n")
    (tmp_path / "own").write_text("0::/user/app\n")
    groups = Cgroups.find(str(tmp_path / "mounts"), str(tmp_path / "own"))
    assert groups is not None
    assert (groups._memory, groups._pids) == (middle, middle)
    (tmp_path / "own").write_text("0::/../outside\n")
    assert Cgroups.find(str(tmp_path / "mounts"), str(tmp_path / "own")) is None


def test_groups_of_dead_owners_are_swept(tmp_path: Path) -> None:
    place = make_hierarchy(tmp_path, "memory pids")
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = place / f"farflung-{os.getpid()}-{_started(os.getpid())}-0"
    for folder in (place / f"farflung-{dead.pid}-12345-0", place / f"farflung-{os.getpid()}-1-0", alive):
        folder.mkdir()
    Cgroups(place, place).sweep()
    assert list(place.glob("farflung-*")) == [alive]


def test_used_up_limits_are_read_from_both_versions(tmp_path: Path) -> None:
    group = Group((tmp_path,))
    assert group.used_up() is None
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")
    (tmp_path / "pids.events").write_text("max 0\n")
    assert group.used_up() is None
    (tmp_path / "pids.events").write_text("max 3\n")
    assert group.used_up() == "processes"
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert group.used_up() == "memory"
