"""Publishers that meet, die, go on, or find a store that is not as it was."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Conflict, FolderStore, Publisher, StoreError, Subscriber
from farflung.weights.history import Version
from farflung.weights.manifest import encode_pointer, manifest_key, pointer_key
from farflung.weights.store import Store
from tests.weights.parts import (
    QUERY,
    RUN,
    Crash,
    MemoryStore,
    equal,
    fetch,
    newest,
    overwrite,
    publish,
    same,
    streams,
    version,
    walk,
    weights,
)

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path) if request.param == "folder" else MemoryStore()


def test_of_two_publishers_one_wins(store: Store) -> None:
    history = walk(2)
    first, second = publish(store, history[:1]), Publisher(store, RUN)
    second.resume()
    first.publish(1, history[1])
    with pytest.raises(Conflict, match="version 1 was not published: another publisher moved the run to version 1"):
        second.publish(1, weights(9))
    assert second.version == 0
    first.publish(2, history[2])
    with pytest.raises(Conflict, match=r"moved the run to version 2\n.*stop one of the two"):
        second.publish(1, weights(9))
    for number, policy in enumerate(history):
        assert equal(fetch(store, number), policy)


def test_two_publishers_with_the_same_bytes_agree(store: Store) -> None:
    history = walk(1)
    first, second = publish(store, history[:1]), Publisher(store, RUN)
    second.resume()
    assert not first.publish(1, history[1]).repeated
    assert second.publish(1, history[1]).repeated
    assert second.version == 1


@pytest.mark.parametrize("survives", [False, True], ids=["killed", "survived"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_publisher_that_stops_at_any_write_repeats(late: bool, survives: bool) -> None:
    """The same publisher goes on after an error of the store, or another resumes; both end where none had stopped."""
    history, options = walk(2, size=0.02), {"formats": ("bf16", "nvfp4"), "anchor_every": 1, "threads": 1}
    whole = MemoryStore()
    publisher = publish(whole, history[:1], **options)
    base = len(whole.writes)
    publisher.publish(1, history[1])
    count = len(whole.writes) - base
    publisher.publish(2, history[2])
    for crash_in in range(count):
        store = MemoryStore()
        publisher = publish(store, history[:1], **options)
        store.crash_after, store.crash_in = late, crash_in
        with pytest.raises(Crash):
            publisher.publish(1, history[1])
        store.crash_in = None
        at = Subscriber(store, RUN).newest()
        assert at in (0, 1)
        assert equal(fetch(store, at), history[at])
        if not survives:
            publisher = Publisher(store, RUN, **options)
            assert publisher.resume() == at
        publisher.publish(1, history[1])
        publisher.publish(2, history[2])
        assert store.objects == whole.objects
        assert store.pointers == whole.pointers


def test_what_a_killed_publisher_left_does_not_bind_the_next() -> None:
    """Objects and manifest of version 1 lie there, the pointer does not name them, and version 1 becomes another."""
    store, history = MemoryStore(), walk(1)
    publisher = publish(store, history[:1], threads=1)
    store.crash_in = 4
    with pytest.raises(Crash):
        publisher.publish(1, history[1])
    assert any("/manifests/00000001-" in key for key in store.objects)
    assert publisher.version == Subscriber(store, RUN).newest() == 0
    store.crash_in = None
    publisher.publish(1, weights(5))
    assert equal(fetch(store, 1), weights(5))


def test_a_full_disk_publishes_nothing_and_the_next_try_does(tmp_path: Path) -> None:
    store, history = FolderStore(tmp_path), walk(1)
    publisher = publish(store, history[:1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(StoreError, match="no space for"):
            publisher.publish(1, history[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert publisher.version == Subscriber(store, RUN).newest() == 0
    publisher.publish(1, history[1])
    assert equal(fetch(store, 1), history[1])


def test_a_format_that_is_new_at_a_resume_begins_whole_and_one_left_out_ends(store: Store) -> None:
    history = walk(3)
    publish(store, history[:2], formats=("bf16", "fp8"))
    publisher = Publisher(store, RUN, formats=("bf16", "nvfp4"))
    assert publisher.resume() == 1
    publisher.publish(2, history[2])
    publisher.publish(3, history[3])
    found: Version = version(store, 2)
    assert set(found.manifest.streams) == {"bf16", "nvfp4"}
    assert not found.stream("bf16").anchor
    assert found.stream("nvfp4").anchor
    for number in (2, 3):
        assert same(fetch(store, number, "nvfp4"), streams(history[2:], "nvfp4")[number - 2])
        assert equal(fetch(store, number), history[number])
    publisher = Publisher(store, RUN, formats=("bf16", "fp8"))
    publisher.resume()
    with pytest.raises(Conflict, match=r"with other weights \(fp8, its tensors\)"):
        publisher.publish(3, history[3])


def test_other_excluded_matrices_at_a_resume_make_a_version_whole(store: Store) -> None:
    history = walk(2)
    publish(store, history[:2], formats=("bf16", "fp8"), exclude=("*.q_proj.*",))
    publisher = Publisher(store, RUN, formats=("bf16", "fp8"))
    publisher.resume()
    publisher.publish(2, history[2])
    assert newest(store).manifest.whole
    assert fetch(store, 2, "fp8")[QUERY].dtype == torch.float8_e4m3fn
    assert equal(fetch(store, 2), history[2])


def test_a_spoiled_store_is_no_base_to_resume_from() -> None:
    store = MemoryStore()
    publish(store, walk(1))
    del store.objects[manifest_key(RUN, newest(store).ref)]
    publisher = Publisher(store, RUN)
    with pytest.raises(BadInput, match="it names version 1, whose manifest is not there"):
        publisher.resume()
    with pytest.raises(BadInput, match="it names version 1, whose manifest is not there"):
        publisher.publish(0, weights())
    assert publisher.version is None
    assert Publisher(store, "run-2").resume() is None


def test_a_publisher_does_not_go_back_with_the_pointer(store: Store) -> None:
    """Whoever sets the pointer back cannot make the one who moved it on publish a version a second time."""
    history = walk(4)
    publisher = publish(store, history[:3])
    second = publisher._history.find(1).ref
    publisher.publish(3, history[3])
    overwrite(store, pointer_key(RUN), encode_pointer(second))
    with pytest.raises(Corrupt, match="went back from version 3 to version 1"):
        publisher.publish(4, history[4])
    with pytest.raises(Corrupt, match="went back from version 3 to version 1"):
        publisher.resume()


def test_a_pointer_in_other_words_is_refused(store: Store) -> None:
    publish(store, walk(1))
    raw = store.read_pointer(pointer_key(RUN))
    assert raw is not None
    overwrite(store, pointer_key(RUN), raw.replace(b":", b": "))
    with pytest.raises(Corrupt, match="spelt otherwise"):
        Publisher(store, RUN).resume()
