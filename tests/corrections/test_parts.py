"""Advantages, weights, supports and the candidate-only head on their own."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import (
    Masked,
    Plain,
    Supports,
    candidate_logits,
    candidate_loss,
    group_advantages,
    make_weight,
)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9), st.sampled_from([1e-200, 0.1, 1.0, 1e6]), st.booleans())
def test_advantages_are_centred(levels: list[int], scale: float, std: bool) -> None:
    advantages = group_advantages([scale * level for level in levels], std=std)
    if len(set(levels)) == 1:
        assert advantages == [0.0] * len(levels)
        return
    size = max(map(abs, advantages))
    assert abs(sum(advantages)) < 1e-9 * size
    assert [a < b for a, b in pairwise(advantages)] == [a < b for a, b in pairwise(levels)]
    if std:
        assert sum(a * a for a in advantages) == pytest.approx(len(levels))


def test_advantages_by_hand() -> None:
    assert group_advantages([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([1, 0, 0, 1], std=True) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_band_ends_are_inside_and_the_mass_is_p() -> None:
    log_q = torch.zeros(5, dtype=torch.float64)
    low, high = math.log(0.5), math.log(5.0)
    log_p = torch.tensor([low, high, low - 1e-12, high + 1e-12, 0.0], dtype=torch.float64)
    weights, mass = Masked(0.5, 5.0)(log_p, log_q)
    assert (weights > 0).tolist() == [True, True, False, False, True]
    assert torch.equal(mass, torch.where(weights > 0, log_p.exp(), 0.0))


def test_no_ratio_can_overflow() -> None:
    log_p, log_q = torch.tensor([-0.1, -200.0]), torch.tensor([-300.0, -0.1])
    weights, mass = Masked(0.5, 5.0)(log_p, log_q)
    assert weights.tolist() == [0, 0]
    assert mass.tolist() == [0, 0]
    weights, mass = Plain()(log_p, log_q)
    assert weights.tolist() == [1, 1]
    assert torch.equal(mass, log_q.exp())


def test_make_weight() -> None:
    assert make_weight("none") == Plain()
    assert make_weight("mis", (0.2, 4.0)) == Masked(0.2, 4.0)
    with pytest.raises(BadInput, match="valid weights: none, mis"):
        make_weight("ppo")


def test_select_and_find() -> None:
    supports = Supports(torch.tensor([4, 2, 7, 2, 9]), torch.arange(5.0), torch.tensor([0, 2, 3, 5]))
    assert supports.sizes.tolist() == [2, 1, 2]
    assert supports.rows.tolist() == [0, 0, 1, 2, 2]
    assert supports.find(torch.tensor([2, 7, 9])).tolist() == [1, 2, 4]
    chosen = supports.select(torch.tensor([2, 0]))
    assert chosen.ids.tolist() == [2, 9, 4, 2]
    assert chosen.logprobs.tolist() == [3.0, 4.0, 0.0, 1.0]
    assert chosen.offsets.tolist() == [0, 2, 4]
    assert len(supports.select(torch.tensor([], dtype=torch.int64))) == 0
    with pytest.raises(BadInput, match="row 1's sampled token 2 is 0 times"):
        supports.find(torch.tensor([2, 2, 9]))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_candidate_logits_are_rows_of_the_head(seed: int, dtype: torch.dtype, with_bias: bool) -> None:
    """Values and gradients against the dense product, from hidden states of any type and repeated candidates."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(6, 3, generator=g, dtype=wide).to(dtype).requires_grad_()
    head = torch.randn(9, 3, generator=g, dtype=wide).requires_grad_()
    bias = torch.randn(9, generator=g, dtype=wide).requires_grad_() if with_bias else None
    sizes = torch.randint(1, 6, (6,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.cat([torch.randperm(9, generator=g)[:n] for n in sizes.tolist()])
    supports = Supports(ids, torch.zeros(len(ids)), offsets)
    logits = candidate_logits(hidden, head, bias, supports)
    dense = hidden.to(wide) @ head.T + (0 if bias is None else bias)
    expected = dense[supports.rows, ids]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if wide == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits, expected, **tolerance)
    upstream = torch.randn(len(ids), generator=g, dtype=wide)
    inputs = [t for t in (hidden, head, bias) if t is not None]
    got, want = torch.autograd.grad(logits, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_nothing_to_compute() -> None:
    """A batch of singletons has a zero loss and zero gradients."""
    hidden, head = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    supports = Supports(torch.tensor([1, 3]), torch.zeros(2), torch.tensor([0, 1, 2]))
    loss, found = candidate_loss(
        hidden, head, None, supports, torch.tensor([1, 3]), torch.ones(2), weight=Plain(), denominator=2
    )
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert head.grad is None or not head.grad.any()
    assert found.measured.all()
