"""Schemas: what a stream's tensors are, cut into pieces, and read strictly."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import Corrupt
from farflung.weights.elements import ELEMENT_TYPES
from farflung.weights.schema import MAX_EMPTY, MAX_SCHEMA, PIECE_BYTES, Schema, TensorType, cut, groups
from tests.weights.parts import schema

SMALL = schema(a=("BF16", (2, 3)), b=("F4", (4,)), c=("F32", ()), empty=("F8_E4M3", (0, 7)))
WHOLE = json.loads(Schema(SMALL.tensors, SMALL.pieces, {"head": "a"}).encode())


@pytest.mark.parametrize("kind", ["F4", "U8", "BF16", "F32"])
def test_a_large_tensor_is_several_pieces_and_none_is_larger_than_allowed(kind: str) -> None:
    type = ELEMENT_TYPES[kind]
    items = 5 * PIECE_BYTES // (2 * type.dtype.itemsize)
    pieces = list(cut("t", TensorType(type, (items,))))
    assert [piece.nbytes for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]
    assert [piece.start for piece in pieces] == [0, pieces[0].size, 2 * pieces[0].size]
    assert pieces[2].items == slice(items - (items - 4 * items // 5), items)
    part = list(cut("t", TensorType(type, (items,)), start=20, size=10))
    assert [(piece.start, piece.size, piece.items) for piece in part] == [
        (20, 10, slice(20 // type.per_item, 30 // type.per_item))
    ]


def test_an_empty_tensor_has_one_empty_piece() -> None:
    assert [(piece.start, piece.size) for piece in cut("t", TensorType(ELEMENT_TYPES["BF16"], (0, 4)))] == [(0, 0)]


def test_groups_hold_what_one_object_may() -> None:
    third = PIECE_BYTES // 3
    many = schema(**{f"t{i}": ("U8", (size,)) for i, size in enumerate([third, third, third, third, PIECE_BYTES, 1])})
    assert list(map(list, groups(many))) == [[0, 1, 2], [3], [4], [5]]
    assert list(groups(Schema({}, (), {}))) == []


def test_a_schema_comes_back_as_it_was() -> None:
    whole = Schema(SMALL.tensors, SMALL.pieces, {"head": "a"})
    assert Schema.decode(whole.encode(), "here") == whole
    assert whole.nbytes == 12 + 4 + 4
    assert whole.tensors["b"].size == 8


def test_the_root_names_the_schema_and_every_hash() -> None:
    hashes = [bytes([i]) * 16 for i in range(4)]
    tied = Schema(SMALL.tensors, SMALL.pieces, {"head": "a"})
    roots = {SMALL.root(hashes), SMALL.root(hashes[::-1]), SMALL.root(hashes[:3]), tied.root(hashes)}
    assert len(roots) == 4
    assert SMALL.root(hashes) in roots


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": 1}, "format 1, not 2"),
    ({"more": 1}, "its fields are"),
    ({"tensors": []}, "is not an object"),
    ({"tensors": WHOLE["tensors"] | {"a": ["I64", [2, 3]]}}, "tensor 'a' has type 'I64'"),
    ({"tensors": WHOLE["tensors"] | {"a": [["BF16"], [2, 3]]}}, "not a schema"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [2, -3]]}}, "-3' is not a count"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [2, 3.0]]}}, "3.0' is not a count"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [True, 6]]}}, "'True' is not a count"),
    ({"tensors": WHOLE["tensors"] | {"c": ["F32", ""]}}, "shape"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [1] * 33]}}, "tensor 'a' has shape"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [1 << 47, 1 << 47]]}}, "tensor 'a' has shape"),
    ({"tensors": WHOLE["tensors"] | {"a": ["BF16", [2, 4]]}}, "the pieces of 'a' hold 6 of its 8 elements"),
    ({"tensors": WHOLE["tensors"] | {"d": ["BF16", [2]]}}, "the pieces of 'd' hold 0 of its 2 elements"),
    ({"pieces": [[0, 0, 3], [0, 4, 2], *WHOLE["pieces"][1:]]}, "a piece of 'a' starts at 4, not at 3"),
    ({"pieces": [[0, 0, 6], [0, 0, 6], *WHOLE["pieces"][1:]]}, "a piece of 'a' starts at 0, not at 6"),
    ({"pieces": [WHOLE["pieces"][0], [1, 0, 3], [1, 3, 5], *WHOLE["pieces"][2:]]}, "a piece of 'b' cuts a byte"),
    ({"pieces": [*WHOLE["pieces"], [4, 0, 1]]}, "a piece of tensor 4, of 4"),
    ({"pieces": [[-1, 0, 6]]}, "'-1' is not a count"),
    ({"pieces": [[0, 0]]}, "not a schema"),
    ({"pieces": {"a": 1}}, "not a schema"),
    ({"tied": {"head": "nothing"}}, "'head' is tied to 'nothing'"),
    ({"tied": {"b": "a"}}, "'b' is tied to 'a'"),
    ({"tied": {"head": ["a"]}}, "'head' is tied to"),
    ({"tied": [["head", "a"]]}, "is not an object"),
]


@pytest.mark.parametrize(("changes", "match"), WRONG, ids=lambda item: item if isinstance(item, str) else "")
def test_what_does_not_fit_is_refused(changes: dict[str, Any], match: str) -> None:
    assert Schema.decode(json.dumps(WHOLE).encode(), "here").tied == {"head": "a"}
    with pytest.raises(Corrupt, match=f"schema k: not a schema: .*{match}" if match != "not a schema" else match):
        Schema.decode(json.dumps(WHOLE | changes).encode(), "schema k")


def test_a_piece_larger_than_any_is_refused() -> None:
    size = PIECE_BYTES + 1
    large = {"format": 2, "tensors": {"a": ["U8", [size]]}, "pieces": [[0, 0, size]], "tied": {}}
    with pytest.raises(Corrupt, match=f"a piece of {size} bytes"):
        Schema.decode(json.dumps(large).encode(), "here")


def test_empty_pieces_are_as_many_as_ranks_may_be() -> None:
    def with_empty(count: int) -> Schema:
        return Schema.decode(json.dumps(WHOLE | {"pieces": [[0, 0, 0]] * count + WHOLE["pieces"]}).encode(), "here")

    assert len(with_empty(MAX_EMPTY).pieces) == MAX_EMPTY + len(WHOLE["pieces"])
    with pytest.raises(Corrupt, match=f"more than {MAX_EMPTY} empty pieces of 'a'"):
        with_empty(MAX_EMPTY + 1)


def test_a_schema_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(Corrupt, match=f"k: not a schema: it has {MAX_SCHEMA + 1} bytes; at most {MAX_SCHEMA}"):
        Schema.decode(bytes(MAX_SCHEMA + 1), "k")


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"1", b"[" * 4000, b"\xff\xfe", b'{"format": 2, "format": 2}', b"{} {}", b"NaN"]
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="here: not a schema"):
        Schema.decode(raw, "here")


values = st.recursive(
    st.none() | st.integers() | st.floats() | st.sampled_from(["a", "F4", ""]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(values, st.sampled_from(["tensors", "pieces", "tied"]))
def test_no_value_escapes_its_check(value: Any, field: str) -> None:
    """Corrupt or a schema whose pieces cover its tensors, never another exception."""
    with suppress(Corrupt):
        found = Schema.decode(json.dumps(WHOLE | {field: value}).encode(), "here")
        assert sum(piece.size for piece in found.pieces) == sum(tensor.size for tensor in found.tensors.values())
