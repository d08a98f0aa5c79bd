"""Spoiled stores and bad calls: whatever comes instead of what was published or asked, nobody is handed it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, FolderStore, Missing, Publisher, StoreError, Subscriber, delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import Bits
from farflung.weights.manifest import manifest_key, object_key, pointer_key
from farflung.weights.planes import compress
from farflung.weights.ranked import rank
from tests.weights.parts import (
    KEY,
    RUN,
    MemoryStore,
    Policy,
    add_object,
    copy,
    equal,
    flip,
    forge,
    listed,
    newest,
    overwrite,
    publish,
    raw,
    schema_of,
    step,
    version,
    walk,
)
from tests.weights.two import Two


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def history(store: FolderStore) -> list[Policy]:
    """A store with two versions, both with an anchor, and what they are."""
    found = walk(1, size=1e-3)
    publish(store, found, anchor_every=1)
    return found


@pytest.fixture
def two(store: FolderStore, history: list[Policy]) -> Two:
    """The anchor beside version 1 is left out, so that both need its delta."""
    found = Two(store, history)
    forge(store, anchor=[])
    return found


def bits(policy: Policy) -> list[Bits]:
    """A policy's pieces, in the order of its bf16 stream's schema."""
    subscriber = Subscriber(other := MemoryStore(), RUN)
    publish(other, [policy])
    subscriber.fetch(0)
    assert subscriber.image is not None
    return [subscriber.image.piece(number) for number in range(len(subscriber.image.schema.pieces))]


def deltas(store: FolderStore) -> list[Any]:
    return [listed(part) for part in newest(store).stream("bf16").delta]


def test_a_spoiled_object_is_found_and_named(store: FolderStore, two: Two) -> None:
    part = newest(store).stream("bf16").delta[0]
    key = object_key(RUN, part)
    whole = raw(store, key)
    for at in range(0, len(whole), 97):
        overwrite(store, key, flip(whole, at))
        two.refuse(1, f"object {key}: its bytes do not have the hash")
    for size in (0, 1, len(whole) - 1):
        overwrite(store, key, whole[:size])
        two.refuse(1, f"object {key}: it has {size} of its {len(whole)} bytes")
    overwrite(store, key, whole + b"\0")
    two.refuse(1, f"{key}.*larger than")
    store.delete(key)
    two.refuse(1, f"object {key}: a version needs it and it is not there")
    overwrite(store, key, whole)
    two.agree(1, two.history[1])


def test_a_spoiled_manifest_or_pointer_leaves_what_is_held(store: FolderStore, two: Two) -> None:
    for key in (manifest_key(RUN, newest(store).ref), pointer_key(RUN)):
        whole = raw(store, key)
        for spoiled in (flip(whole, 7), whole[:-1], whole + b"x", b"", b"{}", b"null", b"[" * 4000):
            overwrite(store, key, spoiled)
            two.refuse(1, key)
            with pytest.raises(Corrupt, match=key):
                Subscriber(store, RUN).newest()
            with pytest.raises(Corrupt, match=key):
                Publisher(store, RUN).resume()
        overwrite(store, key, whole)
    two.agree(1, two.history[1])


def test_changes_told_of_old_weights_are_for_small_deltas_alone(store: FolderStore, two: Two) -> None:
    schema, held = schema_of(store), bits(two.history[0])
    (first, size, *_), *others = deltas(store)
    changes = delta.decode(store.get(f"{RUN}/objects/{first}", size), schema, where="delta")
    content = changes[0].content
    assert isinstance(content, Changes)
    changes[0] = replace(changes[0], content=rank(held[changes[0].piece], content))
    forge(store, delta=[add_object(store, delta.encode(changes, schema).raw), *others])
    two.refuse(1, "it is told of the old weights")


def test_what_another_key_signed_is_refused(store: FolderStore) -> None:
    history = walk(1)
    publisher = publish(store, history[:1], key=KEY)
    two = Two(store, history, KEY)
    publisher.publish(1, history[1])
    right = raw(store, pointer_key(RUN))
    for key, match in ((b"another", "it was signed with another key"), (None, "it is not signed")):
        forge(store, key=key)
        two.refuse(1, match)
        overwrite(store, pointer_key(RUN), right)
    two.agree(1, two.history[1])


def test_changes_for_another_base_are_refused(store: FolderStore, two: Two) -> None:
    """Objects rightly named by a manifest that is, which lead from other weights to other weights."""
    before, after = bits(walk(1, seed=3)[0]), bits(walk(1, seed=3)[1])
    pieces = schema_of(store).pieces
    found = (delta.compare(n, piece, before[n], after[n]) for n, piece in enumerate(pieces))
    changes = [change for change in found if change is not None]
    forge(store, delta=[add_object(store, delta.encode(changes, schema_of(store)).raw)])
    two.refuse(1, "bf16, root .*: the changes do not lead to the published weights")
    forge(store, delta=[])
    two.refuse(1, "the changes do not lead to the published weights")


def test_a_delta_is_never_applied_twice(store: FolderStore, history: list[Policy]) -> None:
    """Version 2 is forged to be version 1's delta again, under its own root and under that of version 1."""
    two, first = Two(store, history), newest(store).stream("bf16")
    publisher = Publisher(store, RUN)
    publisher.resume()
    publisher.publish(2, step(copy(history[1]), 2, 1e-3))
    forge(store, delta=[listed(part) for part in first.delta])
    two.refuse(2, "the changes do not lead to the published weights")
    forge(store, root=first.root)
    for subscriber in two.subscribers():
        with pytest.raises(Corrupt, match=r"bf16 of version 2, tensor .*: it does not have the published hash"):
            subscriber.fetch(2)
        assert (subscriber.version, subscriber.image) == (None, None)


def test_a_piece_that_two_objects_hold_is_refused(store: FolderStore, two: Two) -> None:
    after = bits(two.history[1])
    again = Change(0, bytes(16), Whole(after[0]))
    forge(store, delta=[*deltas(store), add_object(store, delta.encode([again], schema_of(store)).raw)])
    two.refuse(1, "bf16 of version 1: two objects hold the same piece")


def wrong_steps(store: FolderStore) -> tuple[list[Any], str]:
    """Version 1's delta with the steps of one tensor spoiled and its hashes right, and the tensor's name."""
    first, *others = deltas(store)
    changes = delta.decode(store.get(f"{RUN}/objects/{first[0]}", first[1]), schema_of(store), where="delta")
    content = changes[0].content
    assert isinstance(content, Changes)
    steps = np.where(content.steps == 1, np.uint16(2), np.uint16(1))
    changes[0] = Change(changes[0].piece, changes[0].after, Changes(content.positions, steps))
    spoiled = add_object(store, delta.encode(changes, schema_of(store)).raw)
    return [spoiled, *others], schema_of(store).pieces[changes[0].piece].tensor


def test_wrong_steps_under_right_hashes_are_found_once_they_are_applied(store: FolderStore, two: Two) -> None:
    """They cannot be seen before. Nothing is handed out, and what is held is mended from the store."""
    parts, tensor = wrong_steps(store)
    forge(store, delta=parts)
    for subscriber in two.subscribers():
        with pytest.raises(Corrupt, match=f"bf16 of version 1, tensor {tensor}: it does not have the published hash"):
            subscriber.fetch(1)
        assert (subscriber.version, subscriber.image) == (None, None)
        assert equal(subscriber.fetch(0).tensors, two.history[0])


def test_a_way_back_that_leads_elsewhere_is_found_and_left(store: FolderStore, history: list[Policy]) -> None:
    forge(store, delta=wrong_steps(store)[0])
    subscriber = Subscriber(store, RUN)
    assert equal(subscriber.fetch(1).tensors, history[1]), "from its anchor"
    with pytest.raises(Corrupt, match=r"bf16, root .*: the changes do not lead back to the published weights"):
        subscriber.fetch(0)
    assert (subscriber.version, subscriber.image) == (None, None)
    for number in (0, 1):
        assert equal(subscriber.fetch(number).tensors, history[number])


def anchor(store: FolderStore, changes: list[Change]) -> None:
    forge(store, delta=[], before=None, anchor=[add_object(store, delta.encode(changes, schema_of(store)).raw)])


def test_an_anchor_must_hold_every_piece_whole_and_right(store: FolderStore, history: list[Policy]) -> None:
    two, whole, known = Two(store, history), bits(history[1]), version(store, 1).stream("bf16")
    hashes = {c.piece: c.after for part in known.anchor for c in delta.decode(
        raw(store, object_key(RUN, part)), schema_of(store), where="anchor"
    )}  # fmt: skip
    right = [Change(n, hashes[n], Whole(whole[n])) for n in range(len(whole))]
    names = [piece.tensor for piece in schema_of(store).pieces]
    anchor(store, right[1:])
    two.refuse(1, f"bf16 of version 1, tensor {names[0]}: no object holds it")
    anchor(store, [Change(0, bytes(16), right[0].content), *right[1:]])
    two.refuse(1, "bf16 of version 1: its tensors are not those published")
    anchor(store, [Change(0, hashes[0], Whole(whole[0] + np.uint16(1))), *right[1:]])
    two.refuse(1, f"bf16 of version 1, tensor {names[0]}: it does not have the published hash")
    few = Changes(np.array([1]), np.array([1], "<u2"))
    anchor(store, [Change(0, hashes[0], few), *right[1:]])
    two.refuse(1, f"bf16 of version 1, tensor {names[0]}: it holds a change, not the tensor")
    anchor(store, right)
    two.agree(1, two.history[1])


def test_bombs_and_pickles_in_objects_are_refused(store: FolderStore, two: Two) -> None:
    """Whoever has the key made them, under the hashes that were published: what is held is mended from the store."""
    (first, size, *_), *others = deltas(store)
    data, arrays = frame.decode(store.get(f"{RUN}/objects/{first}", size))
    hostile = frame.encode(data, arrays | {"control": compress(np.zeros(1 << 26, np.uint8))})
    part = add_object(store, hostile)
    forge(store, delta=[part, *others])
    for subscriber in two.subscribers():
        match = rf"object {RUN}/objects/{part[0]}, plane control: {1 << 26} bytes where \d+ belong"
        with pytest.raises(Corrupt, match=match):
            subscriber.fetch(1)
        assert (subscriber.version, subscriber.image) == (None, None)
        assert equal(subscriber.fetch(0).tensors, two.history[0])
    forge(store, delta=[add_object(store, pickle.dumps({"a": 1}))])
    two.refuse(1, "not a frame")


def test_a_spoiled_or_hostile_schema_is_refused(store: FolderStore, history: list[Policy]) -> None:
    two = Two(store, history)
    forge(store, before=None, delta=[], schema=add_object(store, b'{"format": 2}')[:2])
    two.refuse(1, f"schema {RUN}/objects/.*: not a schema")
    piece = 64 << 20
    pieces = psutil.virtual_memory().total // piece + 1
    large = {"t": ["U8", [pieces * piece]]}
    claim = {"format": 2, "tensors": large, "pieces": [[0, n * piece, piece] for n in range(pieces)], "tied": {}}
    forge(store, schema=add_object(store, json.dumps(claim).encode())[:2])
    two.refuse(1, "more than this machine's memory", StoreError)


@pytest.fixture(scope="module")
def run() -> tuple[MemoryStore, list[Policy]]:
    """Five signed versions with jumps, in two formats. Whoever spoils it mends it."""
    store, history = MemoryStore(), walk(4, size=1e-3)
    publish(store, history, key=KEY, formats=("bf16", "fp8"), anchor_every=3)
    Compactor(store, RUN, key=KEY).step()
    return store, history


@settings(deadline=None)
@given(st.data())
def test_any_spoiled_byte_gives_an_error_or_the_right_weights(
    run: tuple[MemoryStore, list[Policy]], data: st.DataObject
) -> None:
    """Of any key: flipped, cut, or gone."""
    store, history = run
    held, wanted = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    follower, joiner = Subscriber(store, RUN, key=KEY), Subscriber(store, RUN, key=KEY)
    follower.fetch(held)
    kept = dict(store.objects), dict(store.pointers)
    key = data.draw(st.sampled_from(store.list(RUN)))
    where = store.pointers if key in store.pointers else store.objects
    whole = where[key]
    how = data.draw(st.sampled_from(["flip", "cut", "gone"]))
    if how == "flip":
        where[key] = flip(whole, data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255)))
    elif how == "cut":
        where[key] = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        del where[key]
    for subscriber, before in ((follower, held), (joiner, None)):
        try:
            assert equal(subscriber.fetch(wanted).tensors, history[wanted])
        except Corrupt:
            assert subscriber.version == before
        except Missing:
            assert (how, subscriber.version) == ("gone", before)
    store.objects, store.pointers = kept
    for subscriber in (follower, joiner):
        assert equal(subscriber.fetch(wanted).tensors, history[wanted])


@pytest.mark.parametrize("version", [1.5, "3", None, True])
def test_a_version_is_a_number(version: Any) -> None:
    with pytest.raises(BadInput, match="is not an int"):
        Subscriber(MemoryStore(), RUN).fetch(version)


def test_without_threads_nothing_is_begun() -> None:
    for make in (Publisher, Subscriber):
        with pytest.raises(BadInput, match="threads is 0"):
            make(MemoryStore(), RUN, threads=0)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(BadInput, match=r"tensor w: its layout is torch.sparse_coo"):
        Publisher(MemoryStore(), RUN).publish(0, {"w": sparse})
