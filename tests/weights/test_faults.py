"""Spoiled stores: whatever lies there instead of what was published, no subscriber ever holds it."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from farflung.core import frame
from farflung.core.errors import Corrupt
from farflung.weights import FolderStore, Publisher, Subscriber, delta
from farflung.weights.bits import Snapshot
from farflung.weights.manifest import Manifest, Ref, manifest_key, object_key, pointer_key
from farflung.weights.store import Store
from farflung.weights.subscriber import Held
from tests.weights.parts import (
    RUN,
    MemoryStore,
    add_object,
    copy,
    equal,
    flip,
    forge,
    head,
    overwrite,
    published,
    raw,
    step,
    weights,
)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path) if request.param == "folder" else MemoryStore()


def refuse(store: Store, version: int, match: str) -> None:
    """A subscriber that holds version 0 and one that holds nothing both refuse, and keep what they hold."""
    follower, joiner = Subscriber(store, RUN), Subscriber(store, RUN)
    with pytest.raises(Corrupt, match=match):
        joiner.fetch(version)
    assert joiner.held is None
    if version > 1:
        return
    follower._held = version_zero(store)
    with pytest.raises(Corrupt, match=match):
        follower.fetch(version)
    assert follower.held is not None
    assert follower.held.ref.version == 0
    assert equal(follower.held.snapshot.tensors(), weights())


def version_zero(store: Store) -> Held:
    """What a subscriber holds that fetched version 0 before the store was spoiled."""
    (key,) = [key for key in store.list(RUN) if "/manifests/00000000-" in key]
    return Held(Ref(0, key.rsplit("-", 1)[1]), Manifest.decode(raw(store, key), key), Snapshot.of(weights()))


def test_a_flipped_byte_of_an_object_is_found_and_named(store: Store) -> None:
    published(store, 1)
    key = object_key(RUN, head(store)[1].delta[0])
    whole = raw(store, key)
    for at in range(0, len(whole), 97):
        overwrite(store, key, flip(whole, at))
        refuse(store, 1, f"object {key}: its bytes do not have the hash")
    overwrite(store, key, whole)
    assert Subscriber(store, RUN).fetch(1)


def test_a_truncated_or_longer_object_is_found_and_named(store: Store) -> None:
    published(store, 1)
    key = object_key(RUN, head(store)[1].delta[0])
    whole = raw(store, key)
    for size in (0, 1, len(whole) - 1):
        overwrite(store, key, whole[:size])
        refuse(store, 1, f"object {key}: it has {size} of its {len(whole)} bytes")
    overwrite(store, key, whole + b"\0")
    refuse(store, 1, f"{key}.*larger than")
    store.delete(key)
    refuse(store, 1, f"object {key}: version 1 needs it and it is not there")


def test_a_flipped_byte_of_a_manifest_is_found_and_named(store: Store) -> None:
    published(store, 1)
    key = manifest_key(RUN, head(store)[0])
    whole = raw(store, key)
    for at in range(0, len(whole), 31):
        overwrite(store, key, flip(whole, at))
        with pytest.raises(Corrupt, match=f"manifest {key}: the manifest's bytes"):
            Subscriber(store, RUN).newest()
    overwrite(store, key, whole[:-1])
    with pytest.raises(Corrupt, match=f"manifest {key}"):
        Publisher.resume(store, RUN)


def test_a_flipped_byte_of_the_pointer_is_never_an_older_version_or_none(store: Store) -> None:
    published(store, 3)
    whole = raw(store, pointer_key(RUN))
    for at in range(len(whole)):
        for mask in (1, 2, 0x20, 0x80):
            overwrite(store, pointer_key(RUN), flip(whole, at, mask))
            with pytest.raises(Corrupt, match=f"pointer {RUN}/latest"):
                Subscriber(store, RUN).newest()
            with pytest.raises(Corrupt, match=f"pointer {RUN}/latest"):
                Publisher.resume(store, RUN)
    for garbage in (b"", b"{}", b"[1]", b"null", b"1", b"[" * 4000, whole + b"x", whole.replace(b"3", b"3.0", 1)):
        overwrite(store, pointer_key(RUN), garbage)
        with pytest.raises(Corrupt, match=f"pointer {RUN}/latest"):
            Subscriber(store, RUN).newest()


@pytest.mark.parametrize("changes", [{"version": 2, "parents": [[1, "0" * 64]]}, {"run": "run-2"}], ids=str)
def test_a_manifest_of_another_version_or_run_is_refused(store: Store, changes: dict[str, Any]) -> None:
    published(store, 1)
    forge(store, **changes)
    with pytest.raises(Corrupt, match=r"it describes version [12] of run"):
        Subscriber(store, RUN).newest()


def test_wrongly_hashed_weights_are_refused_and_the_tensor_named(store: Store) -> None:
    """Objects that are rightly named by a manifest that is rightly named, but hold other weights."""
    history = published(store, 1)
    other = copy(history[1])
    other["layer.weight"][3, 5] += 1
    old, new = Snapshot.of(history[0]), Snapshot.of(other)
    data, _ = delta.encode(dict(new.bits), dict(old.bits))
    part = add_object(store, data)
    forge(store, delta=[part])
    refuse(store, 1, f"object {RUN}/objects/{part[0]}, tensor layer.weight: it does not have the published hash")


def test_a_tensor_that_no_object_holds_is_refused(store: Store) -> None:
    published(store, 1)
    forge(store, delta=[])
    refuse(store, 1, "version 1, tensor embed.weight: no object holds it")


def test_a_tensor_that_two_objects_hold_is_refused(store: Store) -> None:
    history = published(store, 1)
    old, new = Snapshot.of(history[0]), Snapshot.of(history[1])
    data, _ = delta.encode({"layer.weight": new.bits["layer.weight"]}, dict(old.bits))
    forge(store, delta=[*([p.sha256, p.bytes] for p in head(store)[1].delta), add_object(store, data)])
    refuse(store, 1, "layer.weight: another object of the version holds it too")


def test_a_delta_for_another_base_is_refused(store: Store) -> None:
    published(store, 1)
    _, manifest = head(store)
    tensors = json.loads(manifest.encode())["tensors"]
    tensors["layer.weight"][1] = "0" * 32
    forge(store, tensors=tensors)
    refuse(store, 1, r"delta to version 1 \(run-1/objects/.*\), tensor layer.weight: the delta is for another base")


def test_a_delta_is_never_applied_twice(store: Store) -> None:
    """Version 2 is forged to be version 1's delta again."""
    history = published(store, 1)
    first = head(store)[1]
    publisher = Publisher.resume(store, RUN)
    policy = history[1]
    step(policy, 2)
    publisher.publish(2, policy)
    forge(store, delta=[[p.sha256, p.bytes] for p in first.delta], tensors=json.loads(first.encode())["tensors"])
    refuse(store, 2, r"delta to version 2 .* tensor embed.weight: the delta is for another base")


def test_weights_that_changed_in_memory_are_never_built_upon(store: Store) -> None:
    history = published(store, 1)
    subscriber = Subscriber(store, RUN)
    found = subscriber.fetch(0)
    found["layer.weight"][0, 0] = 9
    with pytest.raises(Corrupt, match=r"tensor layer.weight: the delta is for another base"):
        subscriber.fetch(1)
    assert equal(Subscriber(store, RUN).fetch(1), history[1])


def test_a_bomb_in_an_object_is_refused(store: Store) -> None:
    published(store, 1)
    bomb = np.frombuffer(zstandard.compress(bytes(1 << 26)), np.uint8)
    header = {"kind": delta.KIND, "tensors": [["layer.weight", [32, 64], "whole", 2048]]}
    part = add_object(store, frame.encode(header, {"whole0": bomb, "whole1": bomb}))
    forge(store, delta=[part])
    refuse(store, 1, f"object {RUN}/objects/{part[0]}, plane whole0: {1 << 26} bytes where 2048 belong")


def test_deltas_of_pickles_are_refused(store: Store) -> None:
    published(store, 1)
    forge(store, delta=[add_object(store, pickle.dumps({"a": 1}))])
    refuse(store, 1, "not a frame")


H = "0" * 64
WRONG: list[dict[str, Any]] = [
    {"format": 2},
    {"format": "1"},
    {"extra": 1},
    {"run": 1},
    {"version": -1},
    {"version": True},
    {"version": 1.0},
    {"version": 1 << 60},
    {"parents": []},
    {"parents": [[1, H]]},
    {"parents": [[0, H], [0, H]]},
    {"parents": [[0, "x"]]},
    {"parents": [[0]]},
    {"parents": None},
    {"tensors": []},
    {"tensors": {"a": [[2], None, "0" * 32, 0]}},
    {"tensors": {"a": [[2], "0" * 32, "0" * 31, 0]}},
    {"tensors": {"a": [[2], "0" * 32, 7, 0]}},
    {"tensors": {"a": [[-2], "0" * 32, "0" * 32, 0]}},
    {"tensors": {"a": [[1 << 40, 1 << 40], "0" * 32, "0" * 32, 0]}},
    {"tensors": {"a": [[1] * 40, "0" * 32, "0" * 32, 0]}},
    {"tensors": {"a": [[2], "0" * 32, "0" * 32, 3]}},
    {"tied": {"a": "nothing"}},
    {"tied": {"norm.weight": "layer.weight"}},
    {"tied": {"a": ["layer.weight"]}},
    {"delta": [["../../etc/passwd", 1]]},
    {"delta": [[H, -1]]},
    {"delta": [[H, 1, 2]]},
    {"delta": {}, "anchor": 7},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_manifests_are_strict(wrong: dict[str, Any]) -> None:
    store = MemoryStore()
    published(store, 1)
    data = json.loads(head(store)[1].encode())
    assert Manifest.decode(json.dumps(data).encode(), "here").encode() == head(store)[1].encode()
    with pytest.raises(Corrupt, match="here: not a manifest"):
        Manifest.decode(json.dumps(data | wrong).encode(), "here")


def test_a_manifest_with_a_missing_or_repeated_field_is_refused() -> None:
    store = MemoryStore()
    published(store, 0)
    whole = head(store)[1].encode()
    data = json.loads(whole)
    for field in data:
        with pytest.raises(Corrupt, match="not a manifest"):
            Manifest.decode(json.dumps({k: v for k, v in data.items() if k != field}).encode(), "here")
    with pytest.raises(Corrupt, match="comes twice"):
        Manifest.decode(whole[:-1] + b',"version":0}', "here")
    with pytest.raises(Corrupt, match="not a full copy"):
        Manifest.decode(json.dumps(data | {"anchor": []}).encode(), "here")


json_values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(json_values, st.sampled_from(["parents", "tensors", "tied", "delta", "anchor", "run", "version"]))
def test_no_value_in_a_manifest_escapes_its_check(value: Any, field: str) -> None:
    """Corrupt or a manifest, never another exception."""
    store = MemoryStore()
    published(store, 1)
    data = json.loads(head(store)[1].encode())
    with suppress(Corrupt):
        Manifest.decode(json.dumps(data | {field: value}).encode(), "here")
