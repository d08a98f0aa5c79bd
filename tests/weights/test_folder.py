"""What a folder does about crashes, stopped writers, full disks and clocks."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farflung.weights import Conflict, FolderStore, StoreError


def test_a_folder_leaves_no_temporary_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    store.swap_pointer("run/latest", None, b"1")
    with pytest.raises(Conflict):
        store.swap_pointer("run/latest", None, b"1")
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_files_of_crashed_writers_are_swept_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    crashed, live = tmp_path / ".tmp" / "1-dead", tmp_path / ".tmp" / "2-live"
    crashed.write_bytes(b"half")
    with open(live, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.put("run/b", b"2")
        assert live.exists()
        assert not crashed.exists()
    store.put("run/c", b"3")
    assert not live.exists()


def test_a_writer_that_is_stopped_with_the_lock_does_not_stop_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is frozen in the middle of a write."""
    monkeypatch.setattr("farflung.weights.folder.LOCK_SECONDS", 0.3)
    program = (
        "import os, signal, sys; from farflung.weights import FolderStore\n"
        "with FolderStore(sys.argv[1])._locked(): os.kill(os.getpid(), signal.SIGSTOP)"
    )
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        for write in (lambda: store.put("run/b", b"2"), lambda: store.write_note("run/leases/a", b"1")):
            with pytest.raises(StoreError, match=r"\.lock: another writer has the lock for 0\.3 s\n.*end the process"):
                write()
        assert store.get("run/a", 1) == b"1"
    finally:
        other.kill()
        other.wait(30)
    store.put("run/b", b"2")


def test_a_writer_killed_in_mid_write_leaves_nothing_visible(tmp_path: Path) -> None:
    program = (
        "import os, sys; from farflung.weights import FolderStore\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        "FolderStore(sys.argv[1]).put('run/a', b'x' * 1000)"
    )
    (tmp_path / ".tmp").mkdir()
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -9
    store = FolderStore(tmp_path)
    assert len(list((tmp_path / ".tmp").iterdir())) == 1
    assert store.list("run") == []
    store.put("run/a", b"x" * 1000)
    assert store.get("run/a", 1000) == b"x" * 1000
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stops a write half way, as a full disk does."""
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreError, match=r"run/b: no space for 5000 bytes.*\n.*publish again"):
            store.put("run/b", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.list("run") == ["run/a"]
    assert list((tmp_path / ".tmp").iterdir()) == []
    store.put("run/b", b"x" * 5000)
    assert store.get("run/b", 5000) == b"x" * 5000


def test_ages_are_known_on_a_full_disk_too(tmp_path: Path) -> None:
    """What is to be freed must be known there; the newest file stands for now."""
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    store.put("run/b", b"1")
    now = time.time()
    os.utime(tmp_path / "run/a", (now - 150, now - 150))
    os.utime(tmp_path / "run/b", (now - 50, now - 50))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        ages = store.ages("run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ages == {"run/a": pytest.approx(100, abs=1), "run/b": 0.0}
    assert list((tmp_path / ".tmp").iterdir()) == []


@pytest.mark.parametrize("wrong_by", [-86400.0, 86400.0])
def test_ages_do_not_hang_on_this_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    """The file system tells one time, this process another; the file system is the store."""
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    store.write_note("run/b", b"1")
    now = time.time()
    os.utime(tmp_path / "run/a", (now - 50, now - 50))
    for clock in ("time", "time_ns"):
        right = getattr(time, clock)
        unit = 1 if clock == "time" else 10**9
        monkeypatch.setattr(time, clock, lambda right=right, unit=unit: right() + int(wrong_by * unit))
    ages = store.ages("run")
    assert 49 <= ages["run/a"] < 80
    assert 0 <= ages["run/b"] < 30


def test_a_key_from_the_future_has_no_negative_age(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("run/a", b"1")
    os.utime(tmp_path / "run/a", (time.time() + 1000, time.time() + 1000))
    assert store.ages("run") == {"run/a": 0.0}
    assert list((tmp_path / ".tmp").iterdir()) == []
