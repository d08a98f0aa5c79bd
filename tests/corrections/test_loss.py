"""Every loss against automatic differentiation of its definition, and the identities that make centering worth it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import (
    Guards,
    Masked,
    Plain,
    Supports,
    candidate_loss,
    centred_loss,
    vocabulary_loss,
)
from tests.corrections.oracle import RULES, Problem, close, fused, model, problems, rounding, rules, surrogate

either = st.sampled_from(["top_p", "top_k"]).flatmap(problems)


@settings(deadline=None, max_examples=200)
@given(either, rules, st.booleans(), st.sampled_from([1.0, 17.0, "rows"]))
def test_every_loss_is_its_surrogate(problem: Problem, name: str, centering: bool, divisor: float | str) -> None:
    problem, rule = problem.differentiable(), RULES[name]
    count = torch.full((len(problem.supports),), 17.0).double() if divisor == "rows" else divisor
    loss, _ = fused(problem, rule, centering=centering, denominator=count)
    want = surrogate(problem, problem.logits, rule, centering=centering) / (17.0 if divisor == "rows" else divisor)
    unsure = rounding(problem)
    close(loss, want, 1e-12 + unsure)
    for got, expected in zip(problem.gradients(loss), problem.gradients(want), strict=True):
        close(got, expected, 1e-10 + 10 * unsure)


@settings(deadline=None, max_examples=120)
@given(either, rules, st.booleans())
def test_every_loss_in_float32(problem: Problem, name: str, centering: bool) -> None:
    """Where no ratio is so near to an edge that rounding decides, and no tail so small that 1 - sum p is mostly rounding."""
    rule, exact = RULES[name], problem.differentiable()
    for t in range(len(problem.supports)):
        log_p, q, kept, rho = model(problem, problem.logits, t)
        p, a = log_p.exp(), problem.sampled[t]
        assume(rule.sure(p[kept], q[kept], 1e-4))
        assume(rule.sure(p[a], problem.logprobs[t].exp(), 1e-4))
        if problem.supports.kind == "top_k":
            assume(
                rule.sure(torch.tensor(1 / rho), torch.tensor(1.0), 1e-4) and 1 - p[kept].sum() > 0.1 and 0.1 < rho < 10
            )
    single = problem.cast(torch.float32).differentiable()
    loss, _ = fused(single, rule, centering=centering)
    want, _ = fused(exact, rule, centering=centering)
    assert loss.dtype == torch.float32
    close(loss, want, 1e-5)
    for got, expected in zip(single.gradients(loss), exact.gradients(want), strict=True):
        assert got.dtype == torch.float32
        close(got, expected, 1e-5)


@settings(deadline=None, max_examples=150)
@given(problems(), rules, st.sampled_from([-0.3, 1.0]))
def test_a_constant_advantage_moves_nothing(problem: Problem, name: str, advantage: float) -> None:
    """The update, averaged over q at every position, is zero for every f; without centering it is not."""
    count, slots = len(problem.supports), torch.arange(len(problem.supports.ids))
    logits = torch.randn(len(slots), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    # One row per candidate, each weighted by its q: the exact expectation.
    owner = problem.supports.rows
    expanded = problem.supports.select(owner)
    entry = torch.cat([torch.arange(*problem.supports.offsets[t : t + 2].tolist()) for t in owner.tolist()])
    loss, _, _ = centred_loss(
        logits[entry], expanded, problem.supports.ids, advantage * problem.supports.logprobs.exp(),
        weight=RULES[name].weight, denominator=count,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.abs().max() < 1e-13


@settings(deadline=None, max_examples=80)
@given(problems("top_k"), rules, st.sampled_from([-0.3, 1.0]))
def test_a_constant_advantage_moves_nothing_where_q_is_the_model(problem: Problem, name: str, advantage: float) -> None:
    """The same with a modelled tail, averaged over every token of the vocabulary as the model draws it."""
    rule, logits = RULES[name], problem.logits.detach()
    vocabulary = logits.shape[1]
    for t in range(len(problem.supports)):
        log_p, q, kept, rho = model(problem, logits, t)
        p = log_p.exp()
        # Tail tokens are taken to be rare, so a difference of probabilities does not mask them.
        assume(not (~kept).any() or (float(1 - p[kept].sum()) > 1e-4 and float(1 - q[kept].sum()) > 1e-4))
        assume(name != "dppo" or bool(((p - q)[~kept].abs() < 0.2).all()))
        assume(not (~kept).any() or rule.sure(torch.tensor(1 / rho), torch.tensor(1.0), 1e-9))
        each = torch.full((vocabulary,), t)
        z = logits[t].clone().requires_grad_()
        loss, _ = vocabulary_loss(
            z.expand(vocabulary, -1), torch.eye(vocabulary).double(), None, torch.arange(vocabulary), q.log(), advantage * q,
            supports=problem.supports.select(each), weight=rule.weight, temperature=problem.temperature, denominator=1,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, z)
        assert grad.abs().max() < 1e-10 * max(1.0, rho)


@settings(deadline=None, max_examples=80)
@given(either)
def test_centering_importance_weights_changes_nothing(problem: Problem) -> None:
    """With f(r) = r and no mask the expected score is sum_b p_b s_b = 0."""
    problem = problem.differentiable()
    plain, centred = (problem.gradients(fused(problem, RULES["is"], centering=c)[0]) for c in (False, True))
    for a, b in zip(plain, centred, strict=True):
        close(a, b, 1e-12)


@settings(deadline=None, max_examples=80)
@given(problems())
def test_with_a_mask_only_masked_tokens_are_centred(problem: Problem) -> None:
    """mu_w = sum_{kept} p_b s_b = - sum_{masked} p_b s_b: with every candidate in band the update is that of f(r) = r."""
    log_q = problem.supports.log_softmax(
        problem.logits[problem.supports.rows, problem.supports.ids] / problem.temperature
    )
    shift = 0.3 * torch.tanh(torch.arange(len(log_q)).double() - 2)
    near = dataclasses.replace(problem.supports, logprobs=problem.supports.log_softmax(log_q + shift))
    problem = dataclasses.replace(problem, supports=near).differentiable()
    for a, b in zip(*(problem.gradients(fused(problem, RULES[n])[0]) for n in ("mis", "is")), strict=True):
        close(a, b, 1e-12)


@settings(deadline=None, max_examples=80)
@given(problems(), rules)
def test_silent_rows_contribute_exactly_zero(problem: Problem, name: str) -> None:
    """Rows with one candidate or no advantage: their hidden states get exactly zero, also when they hold NaN."""
    silent = (problem.supports.sizes == 1) | (problem.advantages == 0)
    poisoned = problem.hidden.clone()
    poisoned[silent] = torch.nan
    problem = dataclasses.replace(problem, hidden=poisoned).differentiable()
    loss, _ = fused(problem, RULES[name])
    grads = problem.gradients(loss)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][silent] == 0).all()


@settings(deadline=None, max_examples=40)
@given(problems("top_k"), rules)
def test_rows_without_advantage_contribute_exactly_zero(problem: Problem, name: str) -> None:
    silent = problem.advantages == 0
    poisoned = problem.hidden.clone()
    poisoned[silent] = torch.nan
    problem = dataclasses.replace(problem, hidden=poisoned).differentiable()
    loss, _ = fused(problem, RULES[name])
    assert torch.isfinite(loss)
    assert (problem.gradients(loss)[0][silent] == 0).all()


@settings(deadline=None, max_examples=60)
@given(problems("top_k"), rules)
def test_without_recorded_heads_nothing_is_centred(problem: Problem, name: str) -> None:
    problem, rule = problem.differentiable(), RULES[name]
    loss, found = vocabulary_loss(
        problem.hidden, problem.head, problem.bias, problem.sampled, problem.logprobs, problem.advantages,
        weight=rule.weight, temperature=problem.temperature, denominator=3.0,
    )  # fmt: skip
    want = surrogate(problem, problem.logits, rule, centering=False) / 3.0
    close(loss, want, 1e-12)
    for got, expected in zip(problem.gradients(loss), problem.gradients(want), strict=True):
        close(got, expected, 1e-10)
    assert torch.equal(found.kl, torch.where(found.measured, found.k3, 0.0))


def test_chunks_of_the_vocabulary_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 4, generator=generator).double().requires_grad_() for n in (9, 7))
    log_q = torch.randn(9, 7, generator=generator).double().log_softmax(-1)
    top = log_q.topk(3)
    supports = Supports(top.indices.flatten(), top.values.flatten(), torch.arange(10) * 3, "top_k")
    advantages = torch.tensor([1.0, -1, 0, 1, 1, -1, 0.5, 0, 1]).double()
    results = []
    for chunk in (1, 7, 20, 1 << 24):
        monkeypatch.setattr("farflung.corrections.vocabulary.CHUNK", chunk)
        loss, _ = vocabulary_loss(
            hidden, head, None, torch.arange(9) % 7, log_q[torch.arange(9), torch.arange(9) % 7], advantages,
            supports=supports, weight=Masked(0.5, 5.0), denominator=9,
        )  # fmt: skip
        results.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            close(a, b, 1e-14)


def test_a_masked_sampled_token_is_still_centred() -> None:
    """p = (1/2, 1/2) and q = (0.95, 0.05): token 1's ratio is 10, outside the band, so the update is -A mu_w."""
    supports = Supports(torch.tensor([0, 1]), torch.tensor([0.95, 0.05]).double().log(), torch.tensor([0, 2]))
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss, _, found = centred_loss(
        logits, supports, torch.tensor([1]), torch.tensor([2.0]), weight=Masked(0.5, 5.0), denominator=1
    )
    assert found.sampled[0] == 0
    (grad,) = torch.autograd.grad(loss, logits)
    # mu_w = p_0 s_0 with s_0 = (1/2, -1/2); descent on the loss is ascent along -A mu_w.
    torch.testing.assert_close(-grad, -2.0 * 0.5 * torch.tensor([0.5, -0.5]).double())


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
    loss, _ = vocabulary_loss(
        hidden, head, None, torch.tensor([1, 3]), torch.zeros(2), torch.zeros(2), weight=Plain(), denominator=2
    )
    loss.backward()
    assert loss == 0


@pytest.mark.parametrize("kind", ["top_p", "top_k"])
def test_guards_scale_whole_sequences(kind: str) -> None:
    """Three sequences of two tokens; the one that is too old has no update, the others are as they were."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 3, generator=generator).requires_grad_() for n in (6, 4))
    log_q = torch.randn(6, 4, generator=generator).log_softmax(-1)
    supports = Supports(torch.arange(4).repeat(6), log_q.flatten(), torch.arange(7) * 4, kind)  # type: ignore[arg-type]
    advantages, first = torch.tensor([1.0, 1, -1, -1, 0.5, 0.5]), torch.zeros(6, dtype=torch.int32)
    sequences, staleness = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 4, 3, 3])

    def gradient(**how: object) -> tuple[torch.Tensor, torch.Tensor]:
        how = {"weight": Masked(0.5, 5.0), "denominator": 6, "supports": supports} | how
        if kind == "top_p":
            loss, found = candidate_loss(hidden, head, None, sampled=first, advantages=advantages, **how)  # type: ignore[arg-type]
        else:
            loss, found = vocabulary_loss(hidden, head, None, first, log_q[:, 0], advantages, **how)  # type: ignore[arg-type]
        return torch.autograd.grad(loss, hidden)[0], found.factor

    free, _ = gradient()
    guarded, factor = gradient(guards=Guards(max_staleness=3), sequences=sequences, staleness=staleness)
    assert factor.tolist() == [1, 1, 0, 0, 1, 1]
    assert torch.equal(guarded, free * factor[:, None])
    assert free[2:4].any()
    with pytest.raises(BadInput, match="sequence of every token"):
        gradient(guards=Guards(max_staleness=3))


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
                logits.repeat(40), supports, every, -0.3 * log_q.exp(),
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
