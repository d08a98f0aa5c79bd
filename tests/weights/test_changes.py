"""Changes of elements: found exactly, applied, taken back and folded, for every width of elements."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.weights import changes
from farflung.weights.changes import BLOCK
from farflung.weights.elements import ELEMENT_TYPES, Bits, ElementType

KINDS = [ELEMENT_TYPES[name] for name in ("F4", "U8", "BF16", "F32")]


@st.composite
def arrays(draw: st.DrawFn, number: int) -> tuple[ElementType, list[Bits]]:
    """Some arrays of one length and type, each either unlike the one before or the same but for a few items."""
    kind = draw(st.sampled_from(KINDS))
    size = draw(st.integers(0, 40))
    found = [draw(hnp.arrays(kind.dtype, size))]
    while len(found) < number:
        after = found[-1].copy()
        for at in draw(st.lists(st.integers(0, size - 1), max_size=6)) if size else []:
            after[at] = draw(st.integers(0, int(np.iinfo(kind.dtype).max)))
        found.append(draw(st.sampled_from([after, draw(hnp.arrays(kind.dtype, size)), found[0]])))
    return kind, found


def values(array: Bits, kind: ElementType) -> list[int]:
    """Element by element."""
    return [int(x) for x in array] if kind.bits > 4 else [c for x in array for c in (int(x) & 15, int(x) >> 4)]


@settings(deadline=None)
@given(arrays(2))
def test_exactly_the_elements_that_differ_are_found(drawn: tuple[ElementType, list[Bits]]) -> None:
    kind, (before, after) = drawn
    old, new = values(before, kind), values(after, kind)
    found = changes.find(before, after, kind)
    assert found.positions.tolist() == [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    assert found.steps.tolist() == [(b - a) % 2**kind.bits for a, b in zip(old, new, strict=True) if a != b]
    assert found.steps.dtype == kind.dtype


@settings(deadline=None)
@given(arrays(2))
def test_applied_and_taken_back(drawn: tuple[ElementType, list[Bits]]) -> None:
    kind, (before, after) = drawn
    found, array = changes.find(before, after, kind), before.copy()
    changes.apply(array, found, kind)
    np.testing.assert_array_equal(array, after)
    changes.apply(array, changes.invert(found, kind), kind)
    np.testing.assert_array_equal(array, before)


@settings(deadline=None)
@given(arrays(3))
def test_two_changes_fold_into_what_is_found_between_the_ends(drawn: tuple[ElementType, list[Bits]]) -> None:
    kind, (one, two, three) = drawn
    first, second = changes.find(one, two, kind), changes.find(two, three, kind)
    folded, whole = changes.fold(first, second, kind), changes.find(one, three, kind)
    np.testing.assert_array_equal(folded.positions, whole.positions)
    np.testing.assert_array_equal(folded.steps, whole.steps)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("items", [BLOCK // 4 - 3, BLOCK + 5])
def test_changes_at_the_edges_of_words_and_blocks_are_found(kind: ElementType, items: int) -> None:
    before = np.zeros(items, kind.dtype)
    after = before.copy()
    per_block = BLOCK // kind.dtype.itemsize
    at: Any = sorted({0, 7, 8, per_block - 1, per_block, 2 * per_block, items - 1} & set(range(items)))
    after[at] = 1
    found = changes.find(before, after, kind)
    assert found.positions.tolist() == [i * kind.per_item for i in at]
    # A piece may begin anywhere in its tensor, and its words need not be aligned in memory.
    odd = changes.find(before[1:], after[1:], kind)
    assert odd.positions.tolist() == [(i - 1) * kind.per_item for i in at if i]
