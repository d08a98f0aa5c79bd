"""History: the newest version, any other by few strides, and the ways between two."""

from __future__ import annotations

import json

import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, Missing, Publisher
from farflung.weights.history import History, Link
from farflung.weights.manifest import Gone, Ref, Seal, encode_pointer, jump_key, manifest_key, pointer_key
from tests.weights.parts import (
    KEY,
    RUN,
    MemoryStore,
    flip,
    forge_manifest,
    newest,
    overwrite,
    publish,
    raw,
    walk,
    weights,
)


def history(store: MemoryStore, key: bytes | None = None) -> History:
    return History(store, RUN, Seal(key))


def spans(links: list[Link] | None) -> list[tuple[int, int]]:
    assert links is not None
    return [(link.start, link.stop) for link in links]


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """Thirty-three versions and no jumps. Nobody writes to it."""
    store = MemoryStore()
    publish(store, [weights()] * 34, anchor_every=5)
    return store


@pytest.fixture
def jumps() -> MemoryStore:
    store = MemoryStore()
    publish(store, walk(11), anchor_every=5)
    Compactor(store, RUN).step()
    return store


def test_nothing_is_published_yet() -> None:
    empty = history(MemoryStore())
    assert empty.newest() is None
    with pytest.raises(Missing, match=r"run run-1: version 0 does not exist; nothing is published yet"):
        empty.find(0)


def test_every_version_is_found_over_few_manifests(store: MemoryStore) -> None:
    for number in range(34):
        store.reads.clear()
        fresh = history(store)
        assert fresh.find(number).number == number
        assert len(store.reads) <= 2 * (33).bit_length()
        store.reads.clear()
        assert fresh.find(number).number == number
        assert store.reads == [], "it is remembered"
    for number in (34, -1):
        with pytest.raises(Missing, match=f"version {number} does not exist; the newest is 33"):
            history(store).find(number)


def test_the_anchor_below_a_version_is_found(store: MemoryStore) -> None:
    for number in range(34):
        known = history(store)
        found = known.anchored(known.find(number), "bf16")
        assert found is not None
        assert found.number == number // 5 * 5


def test_without_jumps_every_delta_is_a_link(store: MemoryStore) -> None:
    known = history(store)
    assert spans(known.links(3, known.find(9), "bf16")) == [(n, n + 1) for n in range(3, 9)]
    assert known.links(9, known.find(9), "bf16") == []
    with pytest.raises(Missing, match=r"it was not published as 'fp8'\n.*published formats: bf16"):
        known.links(3, known.find(9), "fp8")


def test_jumps_are_taken_and_none_overshoots(jumps: MemoryStore) -> None:
    known = history(jumps)
    assert spans(known.links(0, known.find(11), "bf16")) == [(0, 8), (8, 10), (10, 11)]
    assert spans(known.links(3, known.find(11), "bf16")) == [(3, 4), (4, 8), (8, 10), (10, 11)]
    jumps.delete(jump_key(RUN, "bf16", 8, 8))
    assert spans(history(jumps).links(0, known.find(8), "bf16")) == [(0, 4), (4, 8)]


def test_a_jump_that_lies_or_is_spoiled_is_said_and_passed_over(
    jumps: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    key = jump_key(RUN, "bf16", 8, 8)
    whole = raw(jumps, key)
    for wrong, said in (
        (json.dumps(json.loads(whole) | {"root": "0" * 64}).encode(), "it leads to other weights"),
        (json.dumps(json.loads(whole) | {"before": "0" * 64}).encode(), "it starts at other weights than those of version 0"),
        (flip(whole, 0), "not a jump"),
        (b"", "not a jump"),
    ):  # fmt: skip
        overwrite(jumps, key, wrong)
        caplog.clear()
        known = history(jumps)
        assert spans(known.links(0, known.find(8), "bf16")) == [(0, 4), (4, 8)]
        assert f"jump {key}: {said}" in caplog.text
    for spoiled in [one for one in jumps.objects if "/jumps/" in one]:
        overwrite(jumps, spoiled, b"spoiled")
    assert spans(known.links(0, known.find(8), "bf16")) == [(n, n + 1) for n in range(8)]


def test_a_manifest_that_a_jump_starts_from_and_that_is_spoiled_is_named(jumps: MemoryStore) -> None:
    """Version 4 cannot be read, so it is stepped over where a jump does and named where none does."""
    known = history(jumps)
    key = manifest_key(RUN, known.find(4).ref)
    overwrite(jumps, key, flip(raw(jumps, key), 0))
    known = history(jumps)
    assert spans(known.links(0, known.find(8), "bf16")) == [(0, 8)]
    with pytest.raises(Corrupt, match=f"manifest {key}"):
        known.links(3, known.find(8), "bf16")


def test_what_was_pruned_is_missing_and_there_is_no_way_over_it() -> None:
    store = MemoryStore()
    publish(store, [weights()] * 9, anchor_every=3)
    refs = {number: history(store).find(number).ref for number in range(9)}
    for number in range(3):
        store.delete(manifest_key(RUN, refs[number]))
    known = history(store)
    with pytest.raises(Missing, match="version 2 was pruned"):
        known.find(2)
    assert known.links(2, known.find(8), "bf16") is None
    assert known.anchored(known.find(4), "bf16") == known.find(3)
    store.delete(manifest_key(RUN, refs[3]))
    fresh = history(store)
    assert fresh.anchored(fresh.find(4), "bf16") is None


def test_what_is_gone_is_looked_for_once_more_with_nothing_remembered(store: MemoryStore) -> None:
    known = history(store)
    known.find(7)
    tries: list[int] = []

    def work() -> str:
        tries.append(len(store.reads))
        store.reads.clear()
        known.find(7)
        if len(tries) < 2:
            raise Gone("it is gone")
        return "done"

    assert known.afresh(work) == "done"
    assert store.reads, "it was read again"

    def lost() -> None:
        raise Gone("it is gone")

    with pytest.raises(Gone):
        known.afresh(lost)


def test_a_pointer_never_goes_back() -> None:
    store = MemoryStore()
    publisher = publish(store, walk(1))
    old = raw(store, pointer_key(RUN))
    known = history(store)
    publisher.publish(2, weights(2))
    assert known.newest() == newest(store)
    overwrite(store, pointer_key(RUN), old)
    with pytest.raises(Corrupt, match="pointer run-1/latest: it went back from version 2 to version 1"):
        known.newest()
    del store.pointers[pointer_key(RUN)]
    with pytest.raises(Corrupt, match="it went back from version 2 to nothing"):
        known.newest()


def test_a_version_is_never_replaced_by_another_of_its_number() -> None:
    store = MemoryStore()
    publish(store, walk(1))
    known = history(store)
    found = known.newest()
    assert found is not None
    forge_manifest(store, 1, found.manifest.encode() + b"\nsigned")
    with pytest.raises(Corrupt, match="it went back from version 1 to another version 1"):
        known.newest()
    assert history(store).newest() is not None


def test_a_pointer_to_nothing_is_an_error_and_never_an_older_version() -> None:
    store = MemoryStore()
    publish(store, walk(1))
    whole = raw(store, pointer_key(RUN))
    for at in range(len(whole)):
        for mask in (1, 2, 0x20, 0x80):
            overwrite(store, pointer_key(RUN), flip(whole, at, mask))
            with pytest.raises(Corrupt, match=f"pointer {RUN}/latest"):
                history(store).newest()
    overwrite(store, pointer_key(RUN), encode_pointer(Ref(9, "0" * 64)))
    with pytest.raises(Corrupt, match="it names version 9, whose manifest is not there"):
        history(store).newest()


def test_a_spoiled_manifest_is_named_and_one_of_another_key_refused() -> None:
    store = MemoryStore()
    publish(store, walk(1), key=KEY)
    key = manifest_key(RUN, newest(store, KEY).ref)
    whole = raw(store, key)
    for at in range(0, len(whole), 31):
        overwrite(store, key, flip(whole, at))
        with pytest.raises(Corrupt, match=f"manifest {key}: the manifest's bytes do not have the hash in its name"):
            history(store, KEY).newest()
    overwrite(store, key, whole)
    with pytest.raises(Corrupt, match=f"manifest {key}: it was signed with another key, or changed since"):
        history(store, b"another").newest()
    assert history(store).newest() is not None, "without a key signatures are not looked at"
    publish(other := MemoryStore(), walk(0))
    with pytest.raises(Corrupt, match="it is not signed"):
        history(other, KEY).newest()


@pytest.mark.parametrize("run", ["", "a/b", "..", "a b", "-a"])
def test_a_run_is_named_by_one_segment_of_a_key(run: str) -> None:
    with pytest.raises(BadInput, match="is not the name of a run"):
        History(MemoryStore(), run, Seal(None))
    with pytest.raises(BadInput, match="is not the name of a run"):
        Publisher(MemoryStore(), run)
