"""Advantages of a group, and the denominators of a batch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
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


@pytest.mark.parametrize("std", [False, True])
def test_rounding_is_no_advantage(std: bool) -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], std=std) == [0.0] * 4
    assert group_advantages([-1e6, -1e6 - 1e-9], std=std) == [0.0] * 2
    assert any(group_advantages([1e-12, 2e-12, 1e-12], std=std))


def test_rewards_of_any_sequence_and_none_that_is_not_finite() -> None:
    assert group_advantages(torch.tensor([0.0, 1.0])) == [-0.5, 0.5]  # type: ignore[arg-type]
    for bad in (math.nan, math.inf, -math.inf, 1e301):
        with pytest.raises(BadInput, match=f"reward 1 is {bad}; rewards must be finite".replace("+", r"\+")):
            group_advantages([0.0, bad, 1.0])
    with pytest.raises(BadInput, match="rewards must be a sequence of numbers"):
        group_advantages(torch.zeros(2, 2))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="unknown baseline 'other'"):
        group_advantages([0.0, 1.0], baseline="other")  # type: ignore[arg-type]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_leave_one_out_is_the_reward_minus_the_others_mean(rewards: list[float]) -> None:
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    expected = [r - o for r, o in zip(rewards, others, strict=True)]
    assert group_advantages(rewards, baseline="others") == pytest.approx(
        expected, abs=2e-9
    )  # equal but for rounding is equal


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
    with pytest.raises(BadInput, match=r"fixed_length is 2\.5"):
        denominators([3], "fixed", fixed_length=2.5)  # type: ignore[arg-type]


def test_lengths_are_counts() -> None:
    assert denominators(torch.tensor([1, 3])) == [4, 4]  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="a sequence has -1 sampled tokens"):
        denominators([-1, 5])
    with pytest.raises(BadInput, match="lengths of sequences must be whole numbers"):
        denominators([1.5, 5])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="unknown aggregation 'mean'"):
        denominators([1, 2], "mean")  # type: ignore[arg-type]
