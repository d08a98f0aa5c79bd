"""Manifests, jumps and the pointer: strict, signed, and named by what is in them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor
from farflung.weights.manifest import (
    MAX_OBJECT,
    Gone,
    Jump,
    Manifest,
    Part,
    Ref,
    Seal,
    decode_pointer,
    encode_pointer,
    jump_key,
    manifest_key,
    name_part,
    object_key,
    read_jump,
    read_manifest,
    read_part,
    strides,
)
from tests.weights.parts import KEY, RUN, MemoryStore, flip, newest, publish, raw, walk

H = "0" * 64
OPEN = Seal(None)


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """Six versions in two formats, with jumps. Nobody writes to it."""
    store = MemoryStore()
    publish(store, walk(6), formats=("bf16", "fp8"), anchor_every=4)
    Compactor(store, RUN).step()
    return store


def test_a_manifest_comes_back_as_it_was(store: MemoryStore) -> None:
    version = newest(store)
    assert Manifest.decode(version.manifest.encode(), "here") == version.manifest
    assert [ref.version for ref in version.manifest.ancestors] == [5, 4]
    assert version.manifest.anchored is not None
    assert version.manifest.anchored.version == 4
    assert not version.manifest.whole
    assert set(version.manifest.streams) == {"bf16", "fp8"}


@pytest.mark.parametrize(
    ("version", "expected"), [(0, []), (1, [0]), (6, [5, 4]), (7, [6]), (8, [7, 6, 4, 0]), (12, [11, 10, 8])]
)
def test_strides_go_back_by_powers_of_two(version: int, expected: list[int]) -> None:
    assert strides(version) == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": 1}, "format 1, not 2"),
    ({"format": "2"}, "format '2', not 2"),
    ({"extra": 1}, "its fields are"),
    ({"run": 1}, "run 1"),
    ({"version": -1}, "'-1' is not a count"),
    ({"version": True}, "'True' is not a count"),
    ({"version": 6.0}, "'6.0' is not a count"),
    ({"version": 1 << 60}, "is not a count"),
    ({"version": 0}, r"version 0 has \[5, 4\]"),
    ({"ancestors": []}, r"version 6 has \[\]"),
    ({"ancestors": [[4, H]]}, r"version 6 has \[4\]"),
    ({"ancestors": [[5, H], [5, H]]}, r"version 6 has \[5, 5\]"),
    ({"ancestors": [[5, H], [4, H], [2, H]]}, r"version 6 has \[5, 4, 2\]"),
    ({"ancestors": [[5, "x"]]}, "'x' is not a SHA-256"),
    ({"ancestors": [[5, H.replace("0", "A")]]}, "is not a SHA-256"),
    ({"ancestors": [[5]]}, "not a manifest"),
    ({"ancestors": None}, "not a manifest"),
    ({"anchored": None}, "version 6 has None as its anchored version"),
    ({"anchored": [6, H]}, "before it"),
    ({"streams": {}}, "it has no stream"),
    ({"streams": {"../x": {}}}, "is not the name of a stream"),
    ({"streams": {"bf16": []}}, "a stream is not an object"),
    ({"streams": {"bf16": {}}}, "a stream's fields are"),
]
STREAM: list[tuple[dict[str, Any], str]] = [
    ({"more": 1}, "a stream's fields are"),
    ({"before": "0" * 63}, "is not a SHA-256"),
    ({"before": None}, "a stream without a version before it is not whole"),
    ({"before": None, "anchor": [[H, 1, 0]]}, "a stream without a version before it is not whole"),
    ({"root": None}, "is not a SHA-256"),
    ({"changed": -1}, "is not a count"),
    ({"changed": 5, "elements": 4}, "5 of 4 changed"),
    ({"elements": True}, "is not a count"),
    ({"delta": [["../../etc/passwd", 1, 0]]}, "is not a SHA-256"),
    ({"delta": [[H, -1, 0]]}, "is not a count"),
    ({"delta": [[H, 1]]}, "not a manifest"),
    ({"delta": [[H, MAX_OBJECT + 1, 0]]}, "an object of 268435457 bytes; at most"),
    ({"delta": {}}, "objects are not a list"),
    ({"anchor": 7}, "objects are not a list"),
    ({"schema": [H, MAX_OBJECT + 1]}, "an object of 268435457 bytes; at most"),
    ({"schema": None}, "not a manifest"),
    ({"delta": [[H, 1, 5], [H, 1, 4]]}, "objects are not in the order of their pieces"),
    ({"delta": [[H, 1, -1]]}, "is not a count"),
]


def refuse(data: dict[str, Any], match: str) -> None:
    with pytest.raises(Corrupt, match=f"here: not a manifest.*{match}" if match != "not a manifest" else match):
        Manifest.decode(json.dumps(data).encode(), "here")


@pytest.mark.parametrize(("changes", "match"), WRONG, ids=lambda item: item if isinstance(item, str) else "")
def test_manifests_are_strict(store: MemoryStore, changes: dict[str, Any], match: str) -> None:
    refuse(json.loads(newest(store).manifest.encode()) | changes, match)


@pytest.mark.parametrize(("changes", "match"), STREAM, ids=lambda item: item if isinstance(item, str) else "")
def test_streams_are_strict(store: MemoryStore, changes: dict[str, Any], match: str) -> None:
    data = json.loads(newest(store).manifest.encode())
    data["streams"]["fp8"] |= changes
    refuse(data, match)


def test_a_missing_or_repeated_field_is_refused(store: MemoryStore) -> None:
    whole = newest(store).manifest.encode()
    data = json.loads(whole)
    for field in data:
        refuse({name: value for name, value in data.items() if name != field}, "")
    with pytest.raises(Corrupt, match="a key comes twice"):
        Manifest.decode(whole[:-1] + b',"version":6}', "here")


values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.just(H),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(values, st.sampled_from(["run", "version", "ancestors", "anchored", "streams"]))
def test_no_value_in_a_manifest_escapes_its_check(store: MemoryStore, value: Any, field: str) -> None:
    data = json.loads(newest(store).manifest.encode())
    with suppress(Corrupt):
        assert Manifest.decode(json.dumps(data | {field: value}).encode(), "here").streams


@settings(deadline=None)
@given(values, st.sampled_from(["version", "span", "before", "root", "changed", "delta", "run", "stream"]))
def test_no_value_in_a_jump_escapes_its_check(store: MemoryStore, value: Any, field: str) -> None:
    jump = read_jump(store, RUN, "bf16", 4, 4, OPEN)
    assert jump is not None
    assert Jump.decode(jump.encode(), "here") == jump
    with suppress(Corrupt):
        Jump.decode(json.dumps(json.loads(jump.encode()) | {field: value}).encode(), "here")


@settings(deadline=None)
@given(st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), values))
def test_a_pointer_is_read_or_corrupt(data: bytes) -> None:
    ref = Ref(12, "a" * 64)
    assert decode_pointer(encode_pointer(ref), "here") == ref
    with pytest.raises(Corrupt, match="here: not a pointer"):
        decode_pointer(data, "here")


def test_what_is_signed_opens_with_its_key_alone() -> None:
    body = b'{"a":1}'
    signed = Seal(KEY).sign(body)
    assert Seal(KEY).open(signed, "here") == body
    assert OPEN.open(signed, "here") == OPEN.open(OPEN.sign(body), "here") == body
    with pytest.raises(Corrupt, match=r"here: it is not signed\n.*the same key"):
        Seal(KEY).open(body, "here")
    with pytest.raises(Corrupt, match="here: it was signed with another key, or changed since"):
        Seal(b"another").open(signed, "here")
    for at in range(len(signed)):
        with pytest.raises(Corrupt):
            Seal(KEY).open(flip(signed, at), "here")
    with pytest.raises(Corrupt):
        Seal(KEY).open(signed + b"\n", "here")
    with pytest.raises(BadInput, match="the run's key is empty"):
        Seal(b"")


def test_an_object_is_what_its_name_says(store: MemoryStore) -> None:
    part = newest(store).stream("bf16").delta[0]
    whole = read_part(store, RUN, part)
    assert name_part(whole) == part
    spoiled = MemoryStore()
    key = object_key(RUN, part)
    with pytest.raises(Gone, match=f"object {key}: a version needs it and it is not there"):
        read_part(spoiled, RUN, part)
    for other, match in (
        (whole[:-1], f"it has {len(whole) - 1} of its {len(whole)} bytes"),
        (b"", f"it has 0 of its {len(whole)} bytes"),
        (whole + b"\0", f"larger than {len(whole)} bytes"),
        (flip(whole, 7), "its bytes do not have the hash in its name"),
    ):
        spoiled.objects[key] = other
        with pytest.raises(Corrupt, match=match) as error:
            read_part(spoiled, RUN, part)
        assert key in error.value.where


def test_a_manifest_of_another_run_or_version_is_refused(store: MemoryStore) -> None:
    version = newest(store)
    body = raw(store, manifest_key(RUN, version.ref))
    other = MemoryStore()
    for run, number in (("run-2", 6), (RUN, 7)):
        ref = Ref(number, version.ref.sha256)
        other.put(manifest_key(run, ref), body)
        with pytest.raises(Corrupt, match="it describes version 6 of run 'run-1'"):
            read_manifest(other, run, ref, OPEN)


def test_a_jump_of_another_place_is_refused(store: MemoryStore) -> None:
    body = raw(store, jump_key(RUN, "bf16", 4, 4))
    other = MemoryStore()
    for run, format, version, span in (("run-2", "bf16", 4, 4), (RUN, "fp8", 4, 4), (RUN, "bf16", 8, 4)):
        other.put(jump_key(run, format, version, span), body)
        with pytest.raises(Corrupt, match="it describes bf16 4-4 of run 'run-1'"):
            read_jump(other, run, format, version, span, OPEN)
    assert read_jump(other, RUN, "bf16", 2, 2, OPEN) is None


def test_only_a_part_with_a_name_is_a_key() -> None:
    with pytest.raises(BadInput):
        MemoryStore().get(object_key(RUN, Part("../secret", 1)), 1)
