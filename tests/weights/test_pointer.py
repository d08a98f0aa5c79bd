"""A pointer that was moved, deleted or copied too early: named with what it should be, and nothing goes meanwhile."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from farflung.core.errors import Corrupt
from farflung.weights import Compactor, Conflict, FolderStore, Publisher
from farflung.weights.history import History, Version
from farflung.weights.manifest import Ref, Seal, encode_pointer, jump_key, manifest_key, name_part, pointer_key
from farflung.weights.retention import prune
from farflung.weights.verify import Fault, Verdict, verify
from tests.weights.published import FORMATS, KEY, RUN, in_folder, policy, step


def history_of(store: FolderStore) -> History:
    return History(store, RUN, Seal(KEY))


def point(store: FolderStore, ref: Ref) -> None:
    (store.root / pointer_key(RUN)).write_bytes(encode_pointer(ref))


def everything(store: FolderStore) -> dict[str, bytes]:
    return {key: store.get(key, 1 << 30) for key in store.list(RUN)}


def pointer_fault(verdict: Verdict) -> Fault:
    (fault,) = (fault for fault in verdict.faults if fault.where == f"pointer {pointer_key(RUN)}")
    return fault


def mended(store: FolderStore, fault: Fault) -> Verdict:
    """After what the mend says was done to the letter."""
    content = fault.mend.removeprefix("write ").partition(" to it")[0]
    (store.root / pointer_key(RUN)).write_bytes(content.encode())
    return verify(history_of(store))


def refuses_to_prune(store: FolderStore) -> None:
    before = everything(store)
    with pytest.raises(Corrupt, match="nothing is removed"):
        prune(history_of(store), 1, live_seconds=0.0, orphan_seconds=0.0)
    assert everything(store) == before


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Versions 0 to 6, signed, with jumps."""
    return in_folder(tmp_path / "store")


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("number", [None, 0, 3, 5])
def test_a_pointer_that_was_moved_back_is_named_with_what_it_was(
    tmp_path: Path, number: int | None, jumps: bool
) -> None:
    store = in_folder(tmp_path / "store", jumps=jumps)
    latest = store.root / pointer_key(RUN)
    right, newest = latest.read_bytes(), history_of(store).find(6)
    if number is None:
        latest.unlink()
    else:
        point(store, history_of(store).find(number).ref)
    verdict = verify(history_of(store))
    if number == 5 and not jumps:  # as a publisher leaves it that died before it moved the pointer
        assert verdict.faults == ()
        orphans = [key for key in verdict.orphans or () if "manifests" in key]
        assert orphans == [manifest_key(RUN, newest.ref)]
        return
    (fault,) = verdict.faults
    assert fault.where == f"pointer {pointer_key(RUN)}"
    assert f"version 6 is there as well, manifest {manifest_key(RUN, newest.ref)}" in fault.what
    assert verdict.orphans is None
    refuses_to_prune(store)
    assert mended(store, fault).faults == ()
    assert latest.read_bytes() == right


def rivals(store: FolderStore) -> tuple[Version, Version]:
    """Two publishers at odds over the version that follows: the winner's, published, and the loser's, which is not."""
    history = history_of(store)
    newest = history.newest()
    assert newest is not None
    number = newest.number + 1
    publishers = [Publisher(store, RUN, formats=FORMATS, key=KEY) for _ in range(2)]
    for publisher in publishers:
        assert publisher.resume() == newest.number
    before = set(store.list(RUN))
    for seed, publisher in enumerate(publishers):
        weights = policy()
        step(weights, 100 * number + seed)
        with suppress(Conflict):
            publisher.publish(number, weights)
    won = history.find(number)
    (lost,) = (key for key in set(store.list(RUN)) - before if "manifests" in key and won.ref.sha256 not in key)
    return won, history.read(Ref(number, lost.rpartition("-")[2]))


def test_of_two_manifests_of_a_version_the_one_that_was_published_is_named(store: FolderStore) -> None:
    won, _ = rivals(store)
    assert verify(history_of(store)).faults == ()
    point(store, history_of(store).find(4).ref)
    # Nothing tells which of the two was published, but version 6 was.
    assert '"version":6,' in pointer_fault(verify(history_of(store))).mend
    point(store, won.ref)
    later, _ = rivals(store)
    Compactor(store, RUN, key=KEY).step()
    for number in (4, 6, 7):
        point(store, history_of(store).find(number).ref)
        fault = pointer_fault(verify(history_of(store)))
        refuses_to_prune(store)
        # Jumps lead to one of the two.
        assert later.ref.sha256 in fault.mend
        assert mended(store, fault).faults == ()


@pytest.mark.parametrize("proof", ["jumps", "the next version"])
def test_a_pointer_at_a_version_that_lost_is_named(store: FolderStore, proof: str) -> None:
    rivals(store)
    won, lost = rivals(store)
    assert won.number == 8
    if proof == "jumps":
        Compactor(store, RUN, key=KEY).step()
    else:
        rivals(store)
    right = won.ref if proof == "jumps" else history_of(store).find(8).ref
    assert verify(history_of(store)).faults == ()
    point(store, lost.ref)
    (fault,) = verify(history_of(store)).faults
    assert "another version 8 is there as well" in fault.what
    assert right.sha256 in fault.mend
    refuses_to_prune(store)
    assert mended(store, fault).faults == ()


def test_one_spoiled_jump_does_not_hide_the_others(store: FolderStore) -> None:
    for format in FORMATS:
        (store.root / jump_key(RUN, format, 6, 2)).write_bytes(b"x")
    in_folder(store.root, 9, resume=True)
    for format in FORMATS:
        (store.root / jump_key(RUN, format, 8, 2)).write_bytes(b"x")
    point(store, history_of(store).find(7).ref)
    assert '"version":8,' in pointer_fault(verify(history_of(store))).mend
    refuses_to_prune(store)


def test_a_pointer_that_was_moved_back_is_named_beside_other_damage(store: FolderStore) -> None:
    lost = history_of(store).find(1).ref
    point(store, history_of(store).find(4).ref)
    (store.root / manifest_key(RUN, lost)).unlink()
    verdict = verify(history_of(store))
    assert '"version":6,' in pointer_fault(verdict).mend
    assert any(manifest_key(RUN, lost) in fault.where for fault in verdict.faults)


@pytest.mark.parametrize("content", [b"garbage", encode_pointer(Ref(2, "0" * 64)), b""])
def test_a_pointer_that_names_nothing_is_mended_by_what_is_there(store: FolderStore, content: bytes) -> None:
    (store.root / pointer_key(RUN)).write_bytes(content)
    fault = pointer_fault(verify(history_of(store)))
    assert '"version":6,' in fault.mend
    assert mended(store, fault).faults == ()


def test_what_others_put_above_the_pointer_proves_nothing(store: FolderStore) -> None:
    """A manifest under another key, one of garbage, and a publisher's that died."""
    newest = history_of(store).newest()
    assert newest is not None
    dead = replace(newest.manifest, version=7, ancestors=(newest.ref,), anchored=newest.ref)
    far = replace(newest.manifest, version=9, ancestors=(Ref(8, "0" * 64),), anchored=newest.ref)
    orphans = {jump_key(RUN, "bf16", 8, 2): b"garbage"}
    for version, raw in (
        (7, Seal(KEY).sign(dead.encode())),
        (9, Seal(b"another").sign(far.encode())),
        (9, b"garbage"),
    ):
        orphans[manifest_key(RUN, Ref(version, name_part(raw).sha256))] = raw
    for key, raw in orphans.items():
        store.put(key, raw)
    verdict = verify(history_of(store))
    assert verdict.faults == ()
    assert set(verdict.orphans or ()) == set(orphans)
    assert prune(history_of(store), 3, live_seconds=-1.0).floor == 4
