"""The contract of a store, passed by every adapter."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.fleet.mirror import Mirror
from farflung.weights import Conflict, FolderStore, Missing, Store, open_store
from farflung.weights.objects import ObjectStore
from farflung.weights.store import MAX_POINTER
from tests.weights.parts import MemoryStore
from tests.weights.servers import BUCKET, ENVIRONMENT, loop, use

TOKEN = "a-token-for-tests"


class ReadThrough:
    """Writes into a store, reads and leaves notes through a mirror of it, as a trainer and its samplers do together."""

    def __init__(self, behind: Store, mirror: Store) -> None:
        self.put, self.delete, self.swap_pointer = behind.put, behind.delete, behind.swap_pointer
        self.list, self.ages = behind.list, behind.ages
        self.get, self.exists, self.read_pointer = mirror.get, mirror.exists, mirror.read_pointer
        self.write_note = mirror.write_note


@contextmanager
def mirrored(behind: Store, cache: Path) -> Iterator[Store]:
    with loop() as beside:
        mirror = Mirror(behind, cache, token=TOKEN, limit_bytes=1 << 20)
        url = beside.run(mirror.start("127.0.0.1", 0))
        try:
            yield ReadThrough(behind, open_store(url, token=TOKEN))
        finally:
            beside.run(mirror.close())


@contextmanager
def made(kind: str, request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    if kind == "folder":
        yield FolderStore(path / "not" / "there" / "yet")
    elif kind == "dictionary":
        yield MemoryStore()
    elif kind == "memory":
        yield open_store(f"memory://{path.name}")
    elif kind in ENVIRONMENT:
        with pytest.MonkeyPatch.context() as environment:
            use(environment, kind, request.getfixturevalue(f"{kind}_endpoint"))
            yield open_store(f"{kind}://{BUCKET}/{secrets.token_hex(8)}/prefix")
    else:
        with mirrored(FolderStore(path / "store"), path / "cache") as store:
            yield store


@pytest.fixture(params=["folder", "memory", *ENVIRONMENT, "mirror"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store with a clock, for several threads: all but the dictionary of the tests."""
    with made(request.param, request, tmp_path) as store:
        yield store


@pytest.fixture(params=["folder", "dictionary", "memory", *ENVIRONMENT, "mirror"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with made(request.param, request, tmp_path) as store:
        yield store


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
    assert store.get("run/a", 1 << 50) == b"12345"


def test_keys_are_listed_by_folder(store: Store) -> None:
    for key in ("run/b", "run/a/x", "run/ab", "run-2/c"):
        store.put(key, b"1")
    store.swap_pointer("run/latest", None, b"2")
    assert store.list("run") == ["run/a/x", "run/ab", "run/b", "run/latest"]
    assert store.list("run/a") == ["run/a/x"]
    assert store.list("nothing") == []


def test_what_others_left_under_a_name_that_is_no_key_is_passed_over(cloud: str, tmp_path: Path) -> None:
    folder, bucket = FolderStore(tmp_path), open_store(f"{cloud}://{BUCKET}/{secrets.token_hex(8)}")
    assert isinstance(bucket, ObjectStore)
    for store in (folder, bucket):
        store.put("run/objects/a", b"1")
    for name in ("run/.nfs0001", "run/objects/.nfs0002", "run/.snapshot/a", "run/a b", "run/objects/-c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
        bucket._writes.put(name, b"")
    for store in (folder, bucket):
        assert store.list("run") == ["run/objects/a"]
        assert list(store.ages("run")) == ["run/objects/a"]


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


def test_a_note_is_overwritten_and_read_as_a_pointer_is(store: Store) -> None:
    assert store.read_pointer("run/leases/a") is None
    for note in (b"one", b"", b"x" * MAX_POINTER):
        store.write_note("run/leases/a", note)
        assert store.read_pointer("run/leases/a") == note
    with pytest.raises(BadInput, match="at most"):
        store.write_note("run/leases/a", b"x" * (MAX_POINTER + 1))
    with pytest.raises(BadInput, match="not a store key"):
        store.write_note("run/../a", b"")
    assert store.list("run") == ["run/leases/a"]
    store.delete("run/leases/a")
    assert store.read_pointer("run/leases/a") is None


def test_ages_name_every_key_below_the_folder_and_nothing_else(store: Store) -> None:
    assert store.ages("run") == {}
    store.put("run/objects/a", b"1")
    store.swap_pointer("run/latest", None, b"1")
    store.write_note("run/leases/b", b"1")
    store.put("run-2/a", b"1")
    assert sorted(store.ages("run")) == ["run/latest", "run/leases/b", "run/objects/a"]
    assert sorted(store.ages("run/leases")) == ["run/leases/b"]
    assert store.list("run") == ["run/latest", "run/leases/b", "run/objects/a"]
    assert all(0 <= age < 600 for age in store.ages("run").values())


def test_an_age_grows_until_the_next_write(shared: Store) -> None:
    shared.put("run/old", b"1")
    shared.write_note("run/leases/a", b"1")
    time.sleep(2.1)  # S3 tells times in whole seconds
    shared.write_note("run/leases/a", b"2")
    ages = shared.ages("run")
    assert ages["run/old"] >= 1
    assert ages["run/leases/a"] < ages["run/old"]


def test_an_object_that_is_put_again_is_young(shared: Store) -> None:
    for key in ("run/again", "run/old"):
        shared.put(key, b"1")
    time.sleep(2.1)
    shared.put("run/again", b"1")
    with pytest.raises(Conflict):
        shared.put("run/old", b"2")
    ages = shared.ages("run")
    assert ages["run/old"] >= 1
    assert ages["run/again"] < ages["run/old"]
    assert shared.get("run/again", 1) == b"1"


def test_of_many_swaps_at_once_one_wins(shared: Store) -> None:

    def swap(i: int) -> bool:
        try:
            shared.swap_pointer("run/latest", None, str(i).encode())
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(swap, range(16)))
    assert won.count(True) == 1
    assert shared.read_pointer("run/latest") == str(won.index(True)).encode()


def test_of_many_puts_at_once_one_wins(shared: Store) -> None:
    start = Barrier(8)

    def put(i: int) -> list[bool]:
        won = []
        for key in range(10):
            start.wait(30)
            try:
                shared.put(f"run/{key}", str(i).encode())
            except Conflict:
                won.append(False)
            else:
                won.append(True)
        return won

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(put, range(8)))
    for key in range(10):
        assert [row[key] for row in rows].count(True) == 1
        assert rows[int(shared.get(f"run/{key}", 1))][key]


COUNT_UP = """
import sys
from farflung.weights import Conflict, open_store
store, done = open_store(sys.argv[1]), 0
while done < 20:
    now = store.read_pointer("run/n")
    try:
        store.swap_pointer("run/n", now, str(int(now or b"0") + 1).encode())
        done += 1
    except Conflict:
        pass
"""


def count_up_twice(url: str) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", COUNT_UP, url]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert open_store(url).read_pointer("run/n") == b"40"


def test_no_swap_is_lost_between_processes(tmp_path: Path) -> None:
    count_up_twice(str(tmp_path))


def test_no_swap_in_a_cloud_is_lost_between_processes(cloud: str) -> None:
    count_up_twice(f"{cloud}://{BUCKET}/{secrets.token_hex(8)}")
