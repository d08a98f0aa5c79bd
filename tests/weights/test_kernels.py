"""The compiled loops do what numpy does, bit for bit, and refuse what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import Corrupt
from farflung.weights import changes, kernels, planes
from farflung.weights.elements import ELEMENT_TYPES, ElementType
from farflung.weights.planes import Span, compress

KINDS = [ELEMENT_TYPES[name] for name in ("F32", "BF16", "U8", "F4")]


@contextmanager
def compiled(on: bool) -> Iterator[None]:
    with mock.patch.object(kernels, "worth", return_value=on):
        yield


def test_they_can_be_tested() -> None:
    assert kernels.available(), "numba belongs to the extra dev"
    assert kernels.worth(1 << 20)
    assert not kernels.worth((1 << 20) - 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(
    seed=st.integers(0, 999),
    items=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.4, 1.0]),
    near=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_both_ways_give_the_same(kind: ElementType, seed: int, items: int, share: float, near: bool) -> None:
    rng = np.random.default_rng(seed)
    bits = 8 * kind.dtype.itemsize
    before = rng.integers(0, 2**bits, items, np.uint64).astype(kind.dtype)
    after = before.copy()
    where = np.flatnonzero(rng.random(items) < share)
    after[where] += (
        rng.integers(-3, 4, len(where)) if near else rng.integers(0, 2**bits, len(where), np.uint64)
    ).astype(kind.dtype)
    found: list[Any] = []
    for on in (False, True):
        with compiled(on):
            change = changes.find(before, after, kind)
            span = Span(items * kind.per_item, kind, len(change))
            packed, seen = planes.pack([span], [change])
            (there,) = planes.unpack(dict(packed), [span], "object")
            back, moved, again = there.changes(), before.copy(), before.copy()
            changes.apply(moved, back, kind)
            there.apply(again)
        assert np.array_equal(moved, after)
        assert np.array_equal(again, after)
        assert np.array_equal(back.positions, change.positions)
        assert np.array_equal(back.steps, change.steps)
        assert seen.sum() == len(change)
        found.append(
            (
                change.positions.tolist(),
                change.steps.tolist(),
                {n: p.tobytes() for n, p in packed.items()},
                seen.tolist(),
            )
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("on", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize(
    ("control", "gaps", "codes", "why"),
    [
        ([0x10, 0x10], [], [], "is outside its"),
        ([0xF0], [2**32 - 16], [], "is outside its"),
        ([0xF0, 0xF0], [2**31, 2**31], [], "is outside its"),
        ([0x0F], [], [2**16 - 1 - 15], "step"),
        ([0x0F], [], [2**32 - 16], "step"),
    ],
)
def test_both_refuse_what_does_not_fit(
    on: bool, control: list[int], gaps: list[int], codes: list[int], why: str
) -> None:
    parts = {"control": compress(np.array(control, np.uint8))}
    for name, numbers in (("gap", gaps), ("step", codes)):
        rows = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4)
        parts |= {f"{name}{i}": compress(np.ascontiguousarray(rows[:, i])) for i in range(4) if numbers}
    with compiled(on):
        (packed,) = planes.unpack(parts, [Span(len(control), ELEMENT_TYPES["BF16"], len(control))], "object")
        with pytest.raises(Corrupt, match=why):
            packed.changes()
        with pytest.raises(Corrupt, match=why):
            packed.apply(np.zeros(len(control), np.uint16))
