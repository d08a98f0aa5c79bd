"""Every loss against automatic differentiation of its definition, and the identities that make centering worth it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import Masked, Plain, Supports, candidate_loss, centred_loss, vocabulary_loss
from tests.corrections.oracle import RULES, Problem, dense_logits, problems, surrogate

rules = st.sampled_from(sorted(RULES))


def gradients(problem: Problem, loss: torch.Tensor) -> list[torch.Tensor]:
    inputs = [t for t in (problem.hidden, problem.head, problem.bias) if t is not None]
    return list(torch.autograd.grad(loss, inputs))


def differentiable(problem: Problem) -> Problem:
    bias = None if problem.bias is None else problem.bias.clone().requires_grad_()
    return dataclasses.replace(
        problem, hidden=problem.hidden.clone().requires_grad_(), head=problem.head.clone().requires_grad_(), bias=bias
    )


def fused(problem: Problem, rule: str, centering: bool, denominator: float = 1.0) -> torch.Tensor:
    loss, _ = candidate_loss(
        problem.hidden, problem.head, problem.bias, problem.supports, problem.sampled, problem.advantages,
        weight=RULES[rule][0], centering=centering, temperature=problem.temperature, denominator=denominator,
    )  # fmt: skip
    return loss


@settings(deadline=None, max_examples=150)
@given(problems(), rules, st.booleans(), st.sampled_from([1.0, 17.0]))
def test_candidate_loss_is_the_surrogate(problem: Problem, rule: str, centering: bool, denominator: float) -> None:
    problem = differentiable(problem)
    loss = fused(problem, rule, centering, denominator)
    expected = surrogate(problem, dense_logits(problem), RULES[rule][1], centering=centering) / denominator
    # A row with one candidate is worth zero in both: log p = 0.
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    for got, want in zip(gradients(problem, loss), gradients(problem, expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(problems(), st.booleans())
def test_candidate_loss_in_float32(problem: Problem, centering: bool) -> None:
    """With a rule that has no edge: at the edge of a band, rounding decides which side a ratio falls on."""
    exact = differentiable(problem)
    want = gradients(exact, fused(exact, "importance", centering))
    single = differentiable(problem.cast(torch.float32))
    for got, reference in zip(gradients(single, fused(single, "importance", centering)), want, strict=True):
        assert got.dtype == torch.float32
        scale = max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(got.double() / scale, reference / scale, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(problems(), rules, st.sampled_from([-0.3, 1.0]))
def test_a_constant_advantage_moves_nothing(problem: Problem, rule: str, advantage: float) -> None:
    """The update, averaged over q at every position, is zero for every f; without centering it is not."""
    count, slots = len(problem.supports), torch.arange(len(problem.supports.ids))
    logits = torch.randn(len(slots), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    # One row per candidate, each weighted by its q: the exact expectation.
    owner = problem.supports.rows
    expanded = problem.supports.select(owner)
    entry = torch.cat([torch.arange(*problem.supports.offsets[t : t + 2].tolist()) for t in owner.tolist()])
    place = slots - problem.supports.offsets[owner] + expanded.offsets[:-1]
    loss, _, _ = centred_loss(
        logits[entry], expanded, place, advantage * problem.supports.logprobs.exp(),
        weight=RULES[rule][0], denominator=count,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.abs().max() < 1e-14


@settings(deadline=None, max_examples=60)
@given(problems())
def test_centering_importance_weights_changes_nothing(problem: Problem) -> None:
    problem = differentiable(problem)
    plain, centred = (gradients(problem, fused(problem, "importance", c)) for c in (False, True))
    for a, b in zip(plain, centred, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@settings(deadline=None, max_examples=60)
@given(problems(), rules)
def test_silent_rows_contribute_exactly_zero(problem: Problem, rule: str) -> None:
    """Rows with one candidate or no advantage: their hidden states get exactly zero, also when they hold NaN."""
    silent = (problem.supports.sizes == 1) | (problem.advantages == 0)
    poisoned = problem.hidden.clone()
    poisoned[silent] = torch.nan
    problem = differentiable(dataclasses.replace(problem, hidden=poisoned))
    loss = fused(problem, rule, True)
    grads = gradients(problem, loss)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][silent] == 0).all()


def test_a_masked_sampled_token_is_still_centred() -> None:
    """p = (1/2, 1/2) and q = (0.95, 0.05): token 1's ratio is 10, outside the band, so the update is -A mu_w."""
    supports = Supports(torch.tensor([0, 1]), torch.tensor([0.95, 0.05]).double().log(), torch.tensor([0, 2]))
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss, _, weights = centred_loss(
        logits, supports, torch.tensor([1]), torch.tensor([2.0]), weight=Masked(0.5, 5.0), denominator=1
    )
    assert weights[1] == 0
    (grad,) = torch.autograd.grad(loss, logits)
    # mu_w = p_0 s_0 with s_0 = (1/2, -1/2); descent on the loss is ascent along -A mu_w.
    torch.testing.assert_close(-grad, -2.0 * 0.5 * torch.tensor([0.5, -0.5]).double())


@settings(deadline=None, max_examples=40)
@given(problems(), st.sampled_from(["none", "importance", "mis"]))
def test_vocabulary_loss_is_the_uncentred_surrogate(problem: Problem, rule: str) -> None:
    count, size = len(problem.supports), len(problem.head)
    log_q = torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    whole = Supports(torch.arange(size).repeat(count), log_q.flatten(), torch.arange(count + 1) * size)
    problem = differentiable(dataclasses.replace(problem, supports=whole))
    recorded = log_q.gather(1, problem.sampled[:, None]).squeeze(1)
    loss, found = vocabulary_loss(
        problem.hidden, problem.head, problem.bias, problem.sampled, recorded, problem.advantages,
        weight=RULES[rule][0], temperature=problem.temperature, denominator=3.0,
    )  # fmt: skip
    expected = surrogate(problem, dense_logits(problem), RULES[rule][1], centering=False) / 3.0
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    if problem.advantages.any():
        for got, want in zip(gradients(problem, loss), gradients(problem, expected), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    _, exact = candidate_loss(
        problem.hidden, problem.head, problem.bias, whole, problem.sampled, problem.advantages,
        weight=RULES[rule][0], temperature=problem.temperature, denominator=3.0,
    )  # fmt: skip
    for name in ("measured", "k3", "entropy", "out_of_band", "masked"):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), rtol=1e-9, atol=1e-12)


def test_diagnostics_are_right() -> None:
    """Two candidates with p = (3/4, 1/4), q = (1/4, 3/4); a singleton; a row without advantage."""
    log = torch.tensor([0.25, 0.75, 1.0, 0.5, 0.5]).double().log()
    supports = Supports(torch.tensor([0, 1, 2, 0, 1]), log, torch.tensor([0, 2, 3, 5]))
    head = torch.eye(3, dtype=torch.float64)
    hidden = torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).double().log()
    _, found = candidate_loss(
        hidden, head, None, supports, torch.tensor([1, 2, 0]), torch.tensor([1.0, 1.0, 0.0]),
        weight=Masked(0.5, 5.0), denominator=3,
    )  # fmt: skip
    assert found.measured.tolist() == [True, True, False]
    ratio = 1 / 3
    kl = 0.25 * torch.log(torch.tensor(1 / 3)) + 0.75 * torch.log(torch.tensor(3.0))
    torch.testing.assert_close(found.kl, torch.tensor([float(kl), 0, 0]).double())
    k3 = ratio - 1 - float(torch.log(torch.tensor(ratio)))
    torch.testing.assert_close(found.k3, torch.tensor([k3, 0, 0]).double())
    entropy = -(0.75 * torch.log(torch.tensor(0.75)) + 0.25 * torch.log(torch.tensor(0.25)))
    torch.testing.assert_close(found.entropy, torch.tensor([float(entropy), 0, 0]).double())
    assert found.out_of_band.tolist() == [False, False, False]
    assert found.masked.tolist() == [True, False, False]


def test_drift_loop_collapses_without_centering_only() -> None:
    """A sampler that is the trainer with a fixed distortion, and an advantage that says nothing but is not zero on average.

    With masks alone the policy drifts until much of q lies outside the band; the centred update stays where it was.
    """

    generator = torch.Generator().manual_seed(3)
    start = torch.randn(40, dtype=torch.float64, generator=generator)
    normal, divisor = torch.randn(2, 40, dtype=torch.float64, generator=generator)
    noise = (0.3 * normal / divisor.abs()).clamp(-2, 2)
    every, once = torch.arange(40), torch.tensor([0, 40])

    def run(centering: bool) -> tuple[float, float]:
        logits = start
        for _ in range(300):
            logits.requires_grad_()
            log_q = (logits.detach() + noise).log_softmax(-1)
            supports = Supports(every, log_q, once).select(torch.zeros(40, dtype=torch.int64))
            # All 40 outcomes weighted by q: the expected update itself.
            loss, _, _ = centred_loss(
                logits.repeat(40), supports, every * 41, -0.3 * log_q.exp(),
                weight=Masked(0.5, 5.0), centering=centering, denominator=1,
            )  # fmt: skip
            (grad,) = torch.autograd.grad(loss, logits)
            logits = logits.detach() - 2.0 * grad
        log_p, log_q = logits.log_softmax(-1), (logits + noise).log_softmax(-1)
        outside = ((log_p - log_q).exp() < 0.5) | ((log_p - log_q).exp() > 5)
        return float(-(log_p.exp() * log_p).sum()), float(log_q.exp()[outside].sum())

    (masked_entropy, masked_outside), (centred_entropy, centred_outside) = run(False), run(True)
    assert masked_entropy < centred_entropy - 0.5
    assert masked_outside > centred_outside + 0.3


def test_bad_input() -> None:
    supports = Supports(torch.tensor([0, 1]), torch.tensor([0.5, 0.5]).log(), torch.tensor([0, 2]))
    hidden, head, one = torch.ones(1, 2), torch.ones(3, 2), torch.ones(1)
    with pytest.raises(BadInput, match="row 0's sampled token 2 is 0 times"):
        candidate_loss(hidden, head, None, supports, torch.tensor([2]), one, weight=Plain(), denominator=1)
    with pytest.raises(BadInput, match="denominator is 0"):
        candidate_loss(hidden, head, None, supports, torch.tensor([0]), one, weight=Plain(), denominator=0)
    with pytest.raises(BadInput, match="temperature is 0"):
        candidate_loss(
            hidden, head, None, supports, torch.tensor([0]), one, weight=Plain(), denominator=1, temperature=0
        )
    with pytest.raises(BadInput, match="band"):
        Masked(5.0, 0.5)
