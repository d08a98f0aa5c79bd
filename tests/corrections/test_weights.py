"""The weights: against plain formulas, at the ends of their bands, and far outside what an exponential can hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import WEIGHTS, Clipped, DifferenceMask, Masked, Plain, PpoClip, make_weight
from tests.corrections.oracle import RULES, rules

ONE = torch.ones(1, dtype=torch.float64)


@settings(max_examples=200, deadline=None)
@given(rules, st.floats(-12, 0), st.floats(-12, 0), st.sampled_from([-1.0, 1.0]))
def test_weight_and_mass_are_the_plain_formulas(name: str, log_p: float, log_q: float, sign: float) -> None:
    rule, p, q = RULES[name], ONE * math.exp(log_p), ONE * math.exp(log_q)
    if not rule.sure(p, q, 1e-9):
        return
    weight, mass = rule.weight(ONE * log_p, ONE * log_q, ONE * sign)
    expected = rule.f(p, q, sign)
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(mass, expected * q, rtol=1e-12, atol=0)


def test_band_ends_are_inside_and_the_mass_is_p() -> None:
    low, high = math.log(0.5), math.log(5.0)
    log_p = torch.tensor([low, high, low - 1e-12, high + 1e-12, 0.0], dtype=torch.float64)
    zero = torch.zeros_like(log_p)
    weights, mass = Masked(0.5, 5.0)(log_p, zero, zero)
    assert (weights > 0).tolist() == [True, True, False, False, True]
    assert torch.equal(mass, torch.where(weights > 0, log_p.exp(), 0.0))
    assert (Masked(0.5, 5.0, ratio=False)(log_p, zero, zero)[0]).tolist() == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_ratio_can_overflow_into_the_mass(name: str) -> None:
    log_p, log_q = torch.tensor([-0.1, -200.0]), torch.tensor([-300.0, -0.1])
    for sign in (-1.0, 1.0):
        weights, mass = make_weight(name)(log_p, log_q, torch.full((2,), sign))
        assert torch.isfinite(mass).all()
        assert (mass <= 1).all()
        assert not weights.isnan().any()


def test_the_sign_of_the_advantage_decides_what_is_clipped() -> None:
    log_q = torch.full((4,), 0.25).log()
    log_p = torch.tensor([0.1, 0.4, 0.1, 0.4]).log()
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert (PpoClip(0.8, 1.28)(log_p, log_q, signs)[0] > 0).tolist() == [True, False, False, True]
    assert (DifferenceMask(0.1)(log_p, log_q, signs)[0] > 0).tolist() == [True, False, False, True]
    assert (DifferenceMask(0.2)(log_p, log_q, signs)[0] > 0).tolist() == [True] * 4


def test_make_weight() -> None:
    assert make_weight("none") == Plain()
    assert make_weight("is") == Clipped(0, math.inf)
    assert make_weight("tis", cap=3.0) == Clipped(0, 3)
    assert make_weight("mis", (0.2, 4.0)) == make_weight("icepop", (0.2, 4.0)) == Masked(0.2, 4.0)
    assert make_weight("mask", (0.2, 4.0)) == Masked(0.2, 4.0, ratio=False)
    assert make_weight("cispo", clip_range=(0.0, 4.0)) == Clipped(0, 4)
    assert make_weight("ppo") == PpoClip(0.8, 1.28)
    assert make_weight("dppo", delta=0.1) == DifferenceMask(0.1)
    assert {type(make_weight(name)) for name in WEIGHTS} == {Plain, Clipped, Masked, PpoClip, DifferenceMask}
    with pytest.raises(BadInput, match="unknown weight 'grpo'\n  valid weights: none, is, tis, mis, icepop, mask"):
        make_weight("grpo")


@pytest.mark.parametrize("kind", [Masked, Clipped, PpoClip])
@pytest.mark.parametrize("band", [(5.0, 0.5), (1.0, 1.0), (-0.1, 1.0), (0.5, math.nan)])
def test_a_band_that_is_none_is_refused(kind: type, band: tuple[float, float]) -> None:
    with pytest.raises(BadInput, match=r"the band is \[.*\]; it needs 0 <= low < high"):
        kind(*band)


def test_a_bound_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"difference of probabilities is 0.0, not in \(0, 1\)"):
        DifferenceMask(0.0)
