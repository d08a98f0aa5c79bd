"""Advantages of a group, and the denominators of a batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import denominators, group_advantages


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=9),
    st.sampled_from([1e-200, 0.1, 1.0, 1e6]),
    st.booleans(),
    st.sampled_from(["group", "others"]),
)
def test_advantages_are_centred(levels: list[int], scale: float, std: bool, baseline: str) -> None:
    advantages = group_advantages([scale * level for level in levels], std=std, baseline=baseline)  # type: ignore[arg-type]
    if len(set(levels)) == 1:
        assert advantages == [0.0] * len(levels)
        return
    size = max(map(abs, advantages))
    assert abs(sum(advantages)) < 1e-9 * size
    assert [a < b for a, b in pairwise(advantages)] == [a < b for a, b in pairwise(levels)]
    if std and baseline == "group":
        assert sum(a * a for a in advantages) == pytest.approx(len(levels))


def test_advantages_by_hand() -> None:
    assert group_advantages([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([1, 0, 0, 1], std=True) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert group_advantages([]) == []


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_leave_one_out_is_the_reward_minus_the_others_mean(rewards: list[float]) -> None:
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    expected = [r - o for r, o in zip(rewards, others, strict=True)]
    assert group_advantages(rewards, baseline="others") == pytest.approx(expected, abs=1e-12)


def test_denominators_by_hand() -> None:
    """Three sequences of 1, 3 and 4 tokens."""
    lengths = [1, 3, 4]
    assert denominators(lengths) == [8, 8, 8]
    assert denominators(lengths, "sequence") == [3, 9, 12]
    assert denominators(lengths, "fixed", fixed_length=10) == [30, 30, 30]
    assert denominators([0, 2], "sequence") == [2, 4]


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match="2 sequences hold no sampled token"):
        denominators([0, 0])
    with pytest.raises(BadInput, match="0 sequences hold no sampled token"):
        denominators([])
    with pytest.raises(BadInput, match="fixed_length is None"):
        denominators([3], "fixed")
