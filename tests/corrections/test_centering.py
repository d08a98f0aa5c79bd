"""The coefficients and the closed form of the gradient, against automatic differentiation and central differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from farflung.corrections import Clipped, Coefficients, Masked, Plain, Supports, coefficients, vocabulary_loss
from farflung.corrections.centering import TAIL_FLOOR
from tests.corrections.oracle import RULES, Problem, close, problems, rules


def prepared(problem: Problem, name: str) -> tuple[Tensor, Tensor, Coefficients]:
    """log p [rows, V] over the vocabulary, that of the candidates [n], and the coefficients."""
    s = problem.supports
    log_p = (problem.logits / problem.temperature).log_softmax(-1)
    found = coefficients(
        log_p[s.rows, s.ids], log_p.gather(1, problem.sampled[:, None]).squeeze(1), s, problem.logprobs, problem.advantages,
        RULES[name].weight,
    )  # fmt: skip
    return log_p, log_p[s.rows, s.ids], found


@settings(deadline=None, max_examples=100)
@given(problems("top_k"), rules)
def test_the_closed_form_is_the_gradient(problem: Problem, name: str) -> None:
    """dJ/dz_j = A (w_a 1[j = a] - c_j - (w_a - C) p_j)."""
    z = (problem.logits / problem.temperature).detach().requires_grad_()
    _, _, found = prepared(problem, name)
    s, a = problem.supports, problem.advantages
    log_p = z.log_softmax(-1)
    objective = found.objective(log_p[s.rows, s.ids], log_p.gather(1, problem.sampled[:, None]).squeeze(1), s)
    (want,) = torch.autograd.grad((a * objective).sum(), z)
    p, rows = log_p.detach().exp(), torch.arange(len(s))
    formula = -(found.sampled - found.total)[:, None] * p
    formula[rows, problem.sampled] += found.sampled
    formula[s.rows, s.ids] -= found.candidates
    close(a[:, None] * formula, want, 1e-11)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_closed_form_against_central_differences(name: str) -> None:
    """Three candidates of five tokens; the weights stay what they are while the logits move."""
    z = torch.tensor([0.3, -1.0, 0.5, 0.1, -0.4], dtype=torch.float64)
    log_q = torch.tensor([0.3, 0.25, 0.2], dtype=torch.float64).log()
    s = Supports(torch.tensor([2, 0, 3]), log_q, torch.tensor([0, 3]), "top_k")
    a, advantage = torch.tensor([0]), torch.tensor([-0.7], dtype=torch.float64)
    log_p = z.log_softmax(-1)
    found = coefficients(log_p[s.ids], log_p[a], s, log_q[1:2], advantage, RULES[name].weight)

    def objective(z: Tensor) -> float:
        log_p = z.log_softmax(-1)
        return float(advantage * found.objective(log_p[s.ids], log_p[a], s))

    logits = z[None].clone().requires_grad_()
    loss, _ = vocabulary_loss(
        logits,
        torch.eye(5).double(),
        None,
        a,
        log_q[1:2],
        advantage,
        supports=s,
        weight=RULES[name].weight,
        denominator=1,
    )
    (got,) = torch.autograd.grad(-loss, logits)
    step = 1e-6 * torch.eye(5, dtype=torch.float64)
    want = [(objective(z + step[j]) - objective(z - step[j])) / 2e-6 for j in range(5)]
    close(got[0], torch.tensor(want, dtype=torch.float64), 1e-9)


@settings(deadline=None, max_examples=60)
@given(problems("top_k"))
def test_with_the_tail_in_band_only_masked_candidates_have_coefficients(problem: Problem) -> None:
    """MIS: alpha is 1 or 0. With 1, c is exactly -p on the masked candidates and exactly 0 on the others."""
    _, log_p, found = prepared(problem, "mis")
    log_q, rows = problem.supports.logprobs, problem.supports.rows
    ratio = (log_p - log_q).exp()
    kept = (ratio >= 0.5) & (ratio <= 5.0)
    tail = (-found.log_rho).exp()
    in_band = ((tail >= 0.5) & (tail <= 5.0))[rows]
    want = torch.where(kept, 0.0, -log_p.exp())
    assert torch.equal(found.candidates[in_band], want[in_band])
    without = torch.where(kept, log_p.exp(), 0.0)
    assert torch.equal(found.candidates[~in_band], without[~in_band])


def test_the_tail_by_hand() -> None:
    """One recorded candidate of q = 0.8 and p = 0.6: rho = 0.2 / 0.4."""
    s = Supports(torch.tensor([3]), torch.tensor([0.8]).double().log(), torch.tensor([0, 1]), "top_k")
    log_p = torch.tensor([0.6]).double().log()

    def found(weight: object) -> Coefficients:
        return coefficients(log_p, log_p, s, s.logprobs, torch.ones(1), weight)  # type: ignore[arg-type]

    plain = found(Plain())
    torch.testing.assert_close(plain.log_rho.exp(), torch.tensor([0.5]).double())
    torch.testing.assert_close(plain.candidates, torch.tensor([0.8 - 0.5 * 0.6]).double())
    # The tail's ratio is 2: a cap of 1.5 leaves the mass 0.5 x 1.5 of each p there.
    torch.testing.assert_close(found(Clipped(0, 1.5)).candidates, torch.tensor([0.6 - 0.75 * 0.6]).double())
    torch.testing.assert_close(found(Masked(0.5, 1.9)).candidates, torch.tensor([0.6]).double())
    assert torch.equal(plain.total, plain.candidates)
    assert not plain.uncentred().candidates.any()


def test_tails_below_the_floor_are_taken_to_agree() -> None:
    """Rounding may leave 1 - sum q at 1e-8 or below 0."""
    s = Supports(torch.tensor([0, 1]), torch.tensor([0.5, 0.5 + 1e-8]).double().log(), torch.tensor([0, 2]), "top_k")
    log_p = torch.tensor([0.4, 0.6 - 1e-9]).double().log()
    found = coefficients(log_p, log_p[:1], s, s.logprobs[:1], torch.ones(1), Plain())
    assert found.log_rho.tolist() == [0.0]
    assert TAIL_FLOOR == 1e-6
