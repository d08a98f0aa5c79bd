"""The contract of a store, passed by every adapter, and what a folder does about crashes and full disks."""

from __future__ import annotations

import fcntl
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Conflict, FolderStore, Missing, Store, StoreError, open_store
from farflung.weights.store import MAX_POINTER
from tests.weights.parts import MemoryStore


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "not" / "there" / "yet") if request.param == "folder" else MemoryStore()


def test_an_object_comes_back_as_it_was_put(store: Store) -> None:
    assert not store.exists("run/objects/a")
    store.put("run/objects/a", b"\0bytes\xff")
    store.put("run/objects/empty", b"")
    assert store.exists("run/objects/a")
    assert store.get("run/objects/a", 7) == b"\0bytes\xff"
    assert store.get("run/objects/empty", 0) == b""


def test_an_object_can_be_put_again_but_never_changed(store: Store) -> None:
    store.put("run/a", b"one")
    store.put("run/a", b"one")
    for other in (b"two", b"longer", b""):
        with pytest.raises(Conflict, match="other bytes"):
            store.put("run/a", other)
    assert store.get("run/a", 3) == b"one"


def test_what_is_not_there_is_missing(store: Store) -> None:
    store.put("run/a", b"one")
    for key in ("run/b", "other/a", "run/a/b", "run"):
        with pytest.raises(Missing):
            store.get(key, 10)
        assert not store.exists(key)
    assert store.read_pointer("run/latest") is None


def test_an_object_larger_than_it_should_be_is_corrupt(store: Store) -> None:
    store.put("run/a", b"12345")
    with pytest.raises(Corrupt, match="larger than"):
        store.get("run/a", 4)


def test_keys_are_listed_by_folder(store: Store) -> None:
    for key in ("run/b", "run/a/x", "run/ab", "run-2/c"):
        store.put(key, b"1")
    store.swap_pointer("run/latest", None, b"2")
    assert store.list("run") == ["run/a/x", "run/ab", "run/b", "run/latest"]
    assert store.list("run/a") == ["run/a/x"]
    assert store.list("nothing") == []


def test_a_deleted_object_is_gone_and_deleting_again_is_fine(store: Store) -> None:
    store.put("run/a", b"1")
    store.delete("run/a")
    store.delete("run/a")
    assert not store.exists("run/a")
    store.put("run/a", b"2")
    assert store.get("run/a", 1) == b"2"


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../a", "a/../b", "a//b", "a/.b", ".lock", "a b", "a/", "-a", "a\n", "ü"]
)
def test_a_key_cannot_leave_the_store(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.get(key, 1),
        lambda: store.delete(key),
        lambda: store.swap_pointer(key, None, b""),
    ):
        with pytest.raises(BadInput, match="not a store key"):
            call()


def test_a_pointer_moves_only_from_what_was_expected(store: Store) -> None:
    store.swap_pointer("run/latest", None, b"1")
    assert store.read_pointer("run/latest") == b"1"
    for expected in (None, b"0", b"11"):
        with pytest.raises(Conflict, match="moved"):
            store.swap_pointer("run/latest", expected, b"2")
    store.swap_pointer("run/latest", b"1", b"2")
    assert store.read_pointer("run/latest") == b"2"
    with pytest.raises(BadInput):
        store.swap_pointer("run/latest", b"2", b"3" * (MAX_POINTER + 1))


def test_of_many_swaps_at_once_one_wins(store: Store) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("the store in memory is for one thread")

    def swap(i: int) -> bool:
        try:
            store.swap_pointer("run/latest", None, str(i).encode())
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(swap, range(16)))
    assert won.count(True) == 1
    assert store.read_pointer("run/latest") == str(won.index(True)).encode()


def test_of_many_puts_at_once_one_wins(store: Store) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("the store in memory is for one thread")
    start = Barrier(8)

    def put(i: int) -> list[bool]:
        won = []
        for key in range(10):
            start.wait(30)
            try:
                store.put(f"run/{key}", str(i).encode())
            except Conflict:
                won.append(False)
            else:
                won.append(True)
        return won

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(put, range(8)))
    for key in range(10):
        assert [row[key] for row in rows].count(True) == 1
        assert rows[int(store.get(f"run/{key}", 1))][key]


COUNT_UP = """
import sys
from farflung.weights.store import Conflict, FolderStore
store, done = FolderStore(sys.argv[1]), 0
while done < 20:
    now = store.read_pointer("run/n")
    try:
        store.swap_pointer("run/n", now, str(int(now or b"0") + 1).encode())
        done += 1
    except Conflict:
        pass
"""


def test_no_swap_is_lost_between_processes(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", COUNT_UP, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert FolderStore(tmp_path).read_pointer("run/n") == b"40"


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


def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a b")).put("run/a", b"1")
    assert open_store(f"file://{tmp_path}/a%20b").get("run/a", 1) == b"1"
    for url in ("", "s3://bucket/x", "file://host/x"):
        with pytest.raises(BadInput, match="no store"):
            open_store(url)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="not a folder"):
        open_store(str(tmp_path / "file"))
