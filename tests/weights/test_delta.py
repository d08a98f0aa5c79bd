"""The codec: exact for every bit pattern, small where little changed, and deaf to hostile objects."""

from __future__ import annotations

import tracemalloc
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.weights import delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change, Dense, Whole
from farflung.weights.elements import ELEMENT_TYPES, Bits, digest
from farflung.weights.planes import compress, decompress
from farflung.weights.schema import PIECE_BYTES, Schema
from tests.weights.parts import flip, random_bits, schema

SIZES = {"F4": 60, "U8": 50, "F8_E4M3": 30, "BF16": 40, "F16": 1, "F32": 20, "F8_E5M2": 0}
ALL = schema(**{kind: (kind, (size,)) for kind, size in SIZES.items()})


@st.composite
def following(draw: st.DrawFn, before: list[Bits]) -> list[Bits]:
    """What pieces could become: the same, a few items else, or nothing alike."""
    after = [bits.copy() for bits in before]
    for bits in after:
        how = draw(st.sampled_from(["same", "few", "all"]))
        if how == "all":
            bits[:] = draw(hnp.arrays(bits.dtype, len(bits)))
        elif how == "few" and len(bits):
            bits[draw(st.integers(0, len(bits) - 1))] = draw(st.integers(0, int(np.iinfo(bits.dtype).max)))
    return after


def start() -> list[Bits]:
    return [random_bits(kind, size) for kind, size in SIZES.items()]


def compared(before: list[Bits], after: list[Bits], schema: Schema = ALL) -> list[Change]:
    found = (delta.compare(i, p, before[i], after[i]) for i, p in enumerate(schema.pieces))
    return [change for change in found if change is not None]


def through(changes: list[Change], schema: Schema = ALL) -> list[Change]:
    """Encoded and decoded."""
    encoded = delta.encode(changes, schema)
    return delta.decode(encoded.raw, schema, where="object k")


def applied(bits: list[Bits], changes: list[Change], schema: Schema = ALL) -> list[Bits]:
    result = [array.copy() for array in bits]
    for change in changes:
        delta.apply(result[change.piece], change.content, schema.pieces[change.piece].kind)
        assert digest(result[change.piece]) == change.after
    return result


def agree(found: list[Bits], expected: list[Bits]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None)
@given(st.data())
def test_every_bit_arrives_and_can_be_taken_back(data: st.DataObject) -> None:
    before = start()
    after = data.draw(following(before))
    changes = through(compared(before, after))
    assert [c.piece for c in changes] == [i for i in range(len(before)) if not np.array_equal(before[i], after[i])]
    agree(applied(before, changes), after)
    for change in changes:
        kind = ALL.pieces[change.piece].kind
        delta.apply(after[change.piece], delta.invert(change.content, kind), kind)
    agree(after, before)


@settings(deadline=None)
@given(st.data())
def test_changes_of_several_versions_fold_into_one(data: st.DataObject) -> None:
    versions = [start()]
    folded: dict[int, Change] = {}
    for _ in range(3):
        versions.append(data.draw(following(versions[-1])))
        for change in through(compared(versions[-2], versions[-1])):
            first, kind = folded.get(change.piece), ALL.pieces[change.piece].kind
            folded[change.piece] = change if first is None else delta.fold(first, change, kind)
    agree(applied(versions[0], through([folded[number] for number in sorted(folded)])), versions[-1])


@pytest.mark.parametrize("first", ["sparse", "dense", "whole"])
@pytest.mark.parametrize("second", ["sparse", "dense", "whole"])
@pytest.mark.parametrize("kind", ["F4", "BF16"])
def test_every_form_folds_onto_every_form_and_leaves_it_alone(first: str, second: str, kind: str) -> None:
    one = schema(a=(kind, (100,)))
    before = random_bits(kind, 100)

    def make(form: str, old: Bits, seed: int) -> tuple[Bits, Change]:
        new = random_bits(kind, 100, seed)
        if form == "sparse":
            new = np.where(np.arange(100) % 9 == seed % 9, new, old)
        change = delta.compare(0, one.pieces[0], old, new)
        assert change is not None
        return new, Change(0, change.after, Whole(new)) if form == "whole" else change

    middle, a = make(first, before, 1)
    after, b = make(second, middle, 2)
    (kept_a, kept_b), folded = through_each(one, a, b), delta.fold(a, b, one.pieces[0].kind)
    agree(applied([before], through([folded], one), one), [after])
    assert (kept_a, kept_b) == through_each(one, a, b)


def through_each(schema: Schema, *changes: Change) -> tuple[bytes, ...]:
    return tuple(delta.encode([change], schema).raw for change in changes)


def test_every_pattern_of_sixteen_bits_arrives() -> None:
    """Both zeros, subnormals, infinities and every NaN, as changes and whole."""
    two = schema(sparse=("BF16", (1 << 18,)), dense=("BF16", (1 << 16,)), whole=("BF16", (1 << 16,)))
    every = np.arange(1 << 16, dtype="<u2")
    before = [random_bits("BF16", 1 << 18), random_bits("BF16", 1 << 16), every]
    after = [before[0].copy(), every, every]
    after[0][::4] = every
    changes = [*compared(before, after, two), Change(2, digest(every), Whole(every))]
    assert [type(change.content) for change in changes] == [Changes, Dense, Whole]
    agree(applied(before, through(changes, two), two), after)


def test_a_piece_that_came_whole_cannot_be_taken_back() -> None:
    with pytest.raises(BadInput, match="cannot be taken back"):
        delta.invert(Whole(np.zeros(2, np.uint8)), ELEMENT_TYPES["U8"])


def test_no_change_costs_tens_of_bytes() -> None:
    encoded = delta.encode([], ALL)
    assert len(encoded.raw) < 100
    assert (encoded.changed, encoded.bound) == (0, 0)
    assert delta.decode(encoded.raw, ALL, where="here") == []


@pytest.mark.parametrize(("kind", "one_each"), [("F4", 0x11), ("BF16", 1)])
def test_where_most_changed_every_element_has_its_step(kind: str, one_each: int) -> None:
    one = schema(a=(kind, (200,)))
    for changed, form in ((120, Changes), (121, Dense)):
        after = np.zeros(200, ELEMENT_TYPES[kind].dtype)
        after[:changed] = one_each
        (change,) = compared([np.zeros_like(after)], [after], one)
        assert type(change.content) is form
        assert delta.encode([change], one).changed == changed * ELEMENT_TYPES[kind].per_item


@pytest.mark.parametrize("share", [0.03, 0.01, 0.001])
@pytest.mark.parametrize(("kind", "steps"), [("BF16", [1, -1, 2, -2]), ("U8", [1, -1, 2, -2]), ("F4", [1, -1])])
def test_objects_come_close_to_the_entropy_of_what_is_in_them(kind: str, steps: list[int], share: float) -> None:
    """Twelve million elements in pieces of several sizes, of which so many went up or down by a step or two."""
    draw = np.random.default_rng(1)
    type = ELEMENT_TYPES[kind]
    sizes = (8_000_000, 3_900_000, 100_000)
    three = schema(**{f"t{size}": (kind, (size // type.per_item,)) for size in sizes})
    changes = []
    for number, size in enumerate(sizes):
        at = np.cumsum(draw.geometric(share, int(1.2 * share * size))) - 1
        at = at[at < size]
        step = draw.choice(np.array(steps), len(at)) % 2**type.bits
        changes.append(Change(number, bytes(16), Changes(at, step.astype(type.dtype))))
    encoded = delta.encode(changes, three)
    assert encoded.changed == sum(len(change.content.positions) for change in changes)  # type: ignore[union-attr]
    assert encoded.bound < len(encoded.raw) <= 1.10 * encoded.bound


BIG = schema(**{f"big{i}": ("BF16", (PIECE_BYTES // 2,)) for i in range(40)}).pieces
ALL_BYTES = sum(piece.nbytes for piece in ALL.pieces)
HOSTILE = Schema(ALL.tensors | {piece.tensor: piece for piece in BIG}, (*ALL.pieces, *BIG), {})  # type: ignore[dict-item]
"""Most of it is 40 pieces of 64 MiB that no sound object here touches, but that a spoiled table may claim."""


def sound() -> bytes:
    """An object with every form, and elements of every width."""
    before, after = start(), start()
    after[0][7] ^= 0x11
    after[1][:] += 1
    after[3][[0, 39]] ^= 0x8001
    after[5][4] += 7
    whole = Change(2, digest(after[2]), Whole(after[2]))
    return delta.encode(sorted([*compared(before, after), whole], key=lambda c: c.piece), ALL).raw


def rebuilt(data: dict[str, Any] | None = None, drop: str = "", **arrays: Any) -> bytes:
    header, planes = frame.decode(sound())
    planes = {name: plane for name, plane in planes.items() if name != drop}
    return frame.encode(header if data is None else data, planes | arrays)


def table(at: int, value: int) -> bytes:
    """A byte of the table replaced: numbers at 0 (uint32), forms at 20, counts at 25 (uint32)."""
    _, planes = frame.decode(sound())
    columns = decompress(planes["table"], 45, "table").copy()
    columns[at] = value
    return rebuilt(table=compress(columns))


WRONG = [
    (rebuilt({"kind": "delta-1", "pieces": 5}), "not a delta-2 object"),
    (rebuilt({"kind": "delta-2"}), "not a delta-2 object"),
    (rebuilt({"kind": "delta-2", "pieces": 5, "more": 1}), "not a delta-2 object"),
    (rebuilt({"kind": "delta-2", "pieces": True}), "not a delta-2 object"),
    (rebuilt({"kind": "delta-2", "pieces": 5.0}), "not a delta-2 object"),
    (rebuilt({"kind": "delta-2", "pieces": -1}), "it is of -1 pieces"),
    (rebuilt({"kind": "delta-2", "pieces": 48}), "it is of 48 pieces, the schema has 47"),
    (rebuilt({"kind": "delta-2", "pieces": 4}), "table: 45 bytes where 36 belong"),
    (rebuilt({"kind": "delta-2", "pieces": 0}), "no part of the form"),
    (rebuilt(drop="table"), "its table is missing"),
    (rebuilt(drop="hashes"), "its table is missing"),
    (rebuilt(hashes=np.zeros(79, np.uint8)), "79 bytes of hashes for 5 pieces"),
    (rebuilt(more=np.zeros(1, np.uint8)), "no part of the form.*more"),
    (rebuilt(drop="whole1.0"), r"plane whole1\.0: it is missing"),
    (rebuilt(drop="dense1.0"), r"plane dense1\.0: it is missing"),
    (rebuilt(drop="control"), "plane control: it is missing"),
    (table(0, 43), "piece 48 of a schema of 47"),
    (table(20, 3), "tensor F4: form 3 with 2 of 120 elements"),
    (table(20, 2), "tensor F4: form 2 with 2 of 120 elements"),
    (table(26, 1), "tensor F4: form 0 with 258 of 120 elements"),
    (table(28, 255), "tensor F4: form 0 with 4278190082 of 120 elements"),
    (b"", "not a frame"),
    (b"\x80\x04}q\x00.", "not a frame"),
]


@pytest.mark.parametrize(("raw", "match"), WRONG, ids=lambda item: item if isinstance(item, str) else "")
def test_header_and_table_are_checked_before_use(raw: bytes, match: str) -> None:
    assert len(delta.decode(sound(), HOSTILE, where="object k")) == 5
    with pytest.raises(Corrupt, match=f"object k.*{match}"):
        delta.decode(raw, HOSTILE, where="object k")


def test_an_object_that_claims_more_than_any_object_holds_is_refused() -> None:
    columns = np.concatenate([np.zeros(4 * 47, np.uint8), np.full(47, 1, np.uint8), np.zeros(4 * 47, np.uint8)])
    arrays = {"table": compress(columns), "hashes": np.zeros(16 * 47, np.uint8)}
    with pytest.raises(Corrupt, match=f"object k: its pieces take {ALL_BYTES + 40 * PIECE_BYTES} bytes; at most"):
        delta.decode(frame.encode({"kind": delta.KIND, "pieces": 47}, arrays), HOSTILE, where="object k")


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A sound object of which one thing was changed."""
    header, planes = frame.decode(sound())
    name = draw(st.sampled_from(sorted(planes)))
    plane = planes[name].copy()
    how = draw(st.sampled_from(["flip", "table", "header", "drop", "cut", "other", "swap", "bomb", "dtype"]))
    if how == "flip":
        raw = sound()
        for _ in range(draw(st.integers(1, 3))):
            raw = flip(raw, draw(st.integers(0, len(raw) - 1)), draw(st.integers(1, 255)))
        return raw
    if how == "table":
        columns = decompress(planes["table"], 45, "table").copy()
        columns[draw(st.integers(0, 44))] = draw(st.integers(0, 255))
        planes["table"] = compress(columns)
    elif how == "header":
        header["pieces"] = draw(st.integers(-1, 48) | st.none() | st.just(1 << 70))
    elif how == "drop":
        del planes[name]
    elif how == "cut":
        planes[name] = plane[: draw(st.integers(0, len(plane)))]
    elif how == "other":
        planes[name] = compress(draw(hnp.arrays(np.uint8, st.integers(0, 60))))
    elif how == "swap":
        planes[name] = planes[draw(st.sampled_from(sorted(planes)))]
    elif how == "bomb":
        planes[name] = compress(np.zeros(draw(st.sampled_from([1 << 20, PIECE_BYTES // 2])), np.uint8))
    else:
        planes[name] = np.concatenate([plane, np.zeros(-len(plane) % 8, np.uint8)]).view(np.float64).reshape(-1, 1)
    return frame.encode(header, planes)


@settings(deadline=None)
@given(spoiled())
def test_a_spoiled_object_is_corrupt_or_fits_the_schema_and_costs_no_memory(raw: bytes) -> None:
    """Alone, without the hashes around it."""
    tracemalloc.start()
    try:
        changes = delta.decode(raw, HOSTILE, where="object k")
    except Corrupt:
        changes = []
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
    for change in changes:
        piece = HOSTILE.pieces[change.piece]
        delta.apply(np.zeros(piece.size // piece.kind.per_item, piece.kind.dtype), change.content, piece.kind)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        delta.decode(raw, ALL, where="here")
