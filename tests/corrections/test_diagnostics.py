"""What an update measures, by hand and against the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from farflung.corrections import BAND, TIGHT_BAND, Masked, Plain, Supports, TokenDiagnostics, candidate_loss
from farflung.corrections.diagnostics import MAX_LOG_RATIO
from tests.corrections.oracle import RULES, Problem, close, fused, model, problems, rules


def test_diagnostics_by_hand() -> None:
    """Two candidates with p = (3/4, 1/4), q = (1/4, 3/4); a singleton; a row without advantage."""
    log = torch.tensor([0.25, 0.75, 1.0, 0.5, 0.5]).double().log()
    supports = Supports(torch.tensor([0, 1, 2, 0, 1]), log, torch.tensor([0, 2, 3, 5]))
    head = torch.eye(3, dtype=torch.float64)
    hidden = torch.tensor([[3.0, 1.0, 4.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).double().log()
    _, found = candidate_loss(
        hidden, head, None, supports, torch.tensor([1, 2, 0]), torch.tensor([1.0, 1.0, 0.0]),
        weight=Masked(0.5, 5.0), denominator=3, probes=8,
    )  # fmt: skip
    ratio = 1 / 3
    kl = 0.25 * math.log(1 / 3) + 0.75 * math.log(3.0)
    k3 = ratio - 1 - math.log(ratio)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.measured.tolist() == [True, True, False]
    torch.testing.assert_close(found.kl, torch.tensor([kl, 0, 0]).double())
    torch.testing.assert_close(found.k3, torch.tensor([k3, 0, 0]).double())
    torch.testing.assert_close(found.entropy, torch.tensor([entropy, 0, 0]).double())
    assert found.outside(BAND).tolist() == [False, False, False]
    assert found.outside(TIGHT_BAND).tolist() == [True, False, False]
    assert found.masked.tolist() == [True, False, False]
    # Token 0 has ratio 3, token 1 is masked: m = (3/4, 0), M = 3/4, m - M p = (3/16, -3/16).
    torch.testing.assert_close(found.drift, torch.tensor([0.375, 0, 0]).double())
    whole = torch.tensor([[3 / 8, 1 / 8, 1 / 2], [1 / 3, 1 / 3, 1 / 3]]).double()
    torch.testing.assert_close(found.vocabulary_entropy[:2], -(whole * whole.log()).sum(1))
    torch.testing.assert_close(found.head_p[:2], torch.tensor([0.5, 1 / 3]).double())
    assert found.vocabulary_entropy[2].isnan()
    summary = found.summary()
    assert summary == {
        "kl": pytest.approx(kl / 2), "k1": pytest.approx(math.log(3) / 2), "k2": pytest.approx(math.log(3) ** 2 / 4),
        "k3": pytest.approx(k3 / 2), "ratio": pytest.approx(2 / 3), "ess": pytest.approx((2 / 3) ** 2 / (5 / 9)),
        "out_of_band": 0, "out_of_tight_band": 0.5, "masked": 0.5, "dropped": 0, "drift": pytest.approx(0.1875),
        "rho": 1, "head_q": 1, "head_p": pytest.approx(5 / 12), "singletons": 0.5, "entropy": pytest.approx(entropy / 2),
        "candidates_p50": 1, "candidates_p99": 1, "candidates_max": 2, "vocabulary_entropy": pytest.approx(
            float(found.vocabulary_entropy[:2].mean())),
    }  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(problems("top_k"), rules)
def test_diagnostics_of_a_head_with_a_tail(problem: Problem, name: str) -> None:
    """KL and drift are those of the modelled q over the whole vocabulary."""
    _, found = fused(problem, RULES[name])
    for t in torch.nonzero(problem.advantages).squeeze(1).tolist():
        log_p, q, kept, rho = model(problem, problem.logits, t)
        p, advantage = log_p.exp(), float(problem.advantages[t])
        if rho > 1e3 or (not kept.all() and min(float(1 - p[kept].sum()), float(1 - q[kept].sum())) < 1e-4):
            continue
        mass = q * RULES[name].f(p, q, advantage)
        rare = torch.tensor(1e-9, dtype=torch.float64)
        mass[~kept] = (rho * p * RULES[name].f(rare, rare * rho, advantage))[~kept]
        close(found.drift[t], (mass - mass.sum() * p).abs().sum(), 1e-9)
        close(found.kl[t], (q * (q.log() - log_p)).sum(), 1e-9)
        close(found.log_rho[t].exp(), torch.tensor(rho, dtype=torch.float64), 1e-9)
        close(found.head_p[t], p[kept].sum(), 1e-12)
        close(found.head_q[t], q[kept].sum(), 1e-12)
        close(found.vocabulary_entropy[t], -(p * log_p).sum(), 1e-12)


def test_a_broken_replay_shows_in_the_ratio() -> None:
    """p over the whole vocabulary against a top-p q: E_q[p/q] is p's mass on the support, not 1."""
    log_q = torch.tensor([0.6, 0.4]).double().log()
    p = torch.tensor([0.3, 0.2]).double()
    drawn = torch.tensor([0] * 600 + [1] * 400)
    zeros = torch.zeros(1000).double()
    blank = TokenDiagnostics.blank(torch.ones(1000, dtype=torch.bool), torch.full((1000,), 2), zeros)
    blank.log_ratio.copy_((p.log() - log_q)[drawn])
    assert blank.summary()["ratio"] == pytest.approx(0.5)


def test_one_token_cannot_make_a_mean_infinite() -> None:
    found = TokenDiagnostics.blank(torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64), torch.ones(2))
    found.log_ratio[0] = 1e4
    found.log_rho[0] = 1e4
    summary = found.summary()
    assert all(value is None or math.isfinite(value) for value in summary.values())
    assert summary["ratio"] == pytest.approx((1 + math.exp(MAX_LOG_RATIO)) / 2)


def test_parts_and_pools() -> None:
    def part(measured: list[bool], ratios: list[float]) -> TokenDiagnostics:
        found = TokenDiagnostics.blank(
            torch.tensor(measured), torch.ones(len(ratios), dtype=torch.int64), torch.ones(len(ratios))
        )
        found.log_ratio.copy_(torch.tensor(ratios))
        return found

    whole = TokenDiagnostics.cat([part([True, False], [1.0, 9.0]), part([True], [3.0])])
    assert whole.summary()["k1"] == -2
    assert whole.select(torch.tensor([False, False, True])).summary()["k1"] == -3
    assert whole.select(torch.tensor([False, True, False])).summary() == {}


def test_probes_are_spread_over_the_measured_tokens() -> None:
    n = 50
    supports = Supports(torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.arange(n + 1))
    _, found = candidate_loss(
        torch.randn(n, 3), torch.randn(4, 3), None, supports, torch.zeros(n, dtype=torch.int64),
        (torch.arange(n) % 2).float(), weight=Plain(), denominator=n, probes=5,
    )  # fmt: skip
    probed = torch.nonzero(~found.head_p.isnan()).squeeze(1).tolist()
    assert probed == [1, 13, 25, 37, 49]


def test_probes_see_capped_and_tempered_logits() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (2, 5))
    supports = Supports(torch.tensor([0, 1, 2, 3]), torch.full((4,), math.log(0.5)), torch.tensor([0, 2, 4]))
    _, found = candidate_loss(
        hidden, head, None, supports, torch.tensor([0, 2]), torch.ones(2),
        weight=Plain(), softcap=0.7, temperature=0.6, denominator=2, probes=8,
    )  # fmt: skip
    p = (0.7 * torch.tanh(hidden @ head.T / 0.7) / 0.6).softmax(-1)
    torch.testing.assert_close(found.vocabulary_entropy, -(p * p.log()).sum(1))
    torch.testing.assert_close(found.head_p, torch.stack([p[0, :2].sum(), p[1, 2:4].sum()]))
