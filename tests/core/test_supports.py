"""Supports slice and stack like the rows they stand for; what is not a distribution over its candidates is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.core.errors import Corrupt
from farflung.core.supports import Supports

Make = Callable[[list[int], int], tuple[Supports, np.ndarray, np.ndarray]]
sizes = st.lists(st.integers(1, 8), max_size=12)
seeds = st.integers(0, 2**32)


@given(sizes=sizes, seed=seeds)
def test_valid_supports_pass(make_supports: Make, sizes: list[int], seed: int) -> None:
    supports, sampled, logprobs = make_supports(sizes, seed)
    supports.check(sampled, logprobs)
    assert supports.sizes.tolist() == sizes
    assert len(supports) == len(sizes)


@given(sizes=sizes, seed=seeds, cuts=st.lists(st.floats(0, 1), max_size=4))
def test_cutting_and_stacking_gives_the_same(
    make_supports: Make, sizes: list[int], seed: int, cuts: list[float]
) -> None:
    supports, _, _ = make_supports(sizes, seed)
    borders = [0, *sorted(round(c * len(sizes)) for c in cuts), len(sizes)]
    parts = [supports.rows(a, b) for a, b in pairwise(borders)]
    stacked = Supports.concat(parts)
    for name in ("ids", "logprobs", "offsets"):
        np.testing.assert_array_equal(getattr(stacked, name), getattr(supports, name))


def test_nothing_stacks_to_nothing() -> None:
    assert len(Supports.concat([])) == len(Supports.empty()) == 0
    Supports.empty().check(np.zeros(0, np.int32), np.zeros(0, np.float32))


def spoilt(
    kind: str, s: Supports, sampled: np.ndarray, logprobs: np.ndarray
) -> tuple[Supports, np.ndarray, np.ndarray]:
    ids, probs, offsets = s.ids.copy(), s.logprobs.copy(), s.offsets.copy()
    sampled, logprobs = sampled.copy(), logprobs.copy()
    if kind == "sum":
        probs[:] -= 0.1
    elif kind == "nan":
        probs[0] = np.nan
    elif kind == "above one":
        probs[0] = 0.5
    elif kind == "twice":
        ids[1] = ids[0]
    elif kind == "not among":
        sampled[0] = 5000
    elif kind == "other log-probability":
        logprobs[0] -= 0.01
    elif kind == "rows":
        sampled, logprobs = sampled[1:], logprobs[1:]
    elif kind == "empty row":
        offsets[1] = 0
    elif kind == "falling offsets":
        offsets[1] = 10**9
    return Supports(ids, probs, offsets), sampled, logprobs


@pytest.mark.parametrize(
    "kind",
    ["sum", "nan", "above one", "twice", "not among", "other log-probability", "rows", "empty row", "falling offsets"],
)
def test_whatever_is_wrong_is_refused(make_supports: Make, kind: str) -> None:
    made = make_supports([3, 4, 1, 5], 7)
    made[0].check(made[1], made[2])
    supports, sampled, logprobs = spoilt(kind, *made)
    with pytest.raises(Corrupt):
        supports.check(sampled, logprobs)
