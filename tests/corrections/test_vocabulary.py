"""The loss over the whole vocabulary against its definition with the modelled tail written out, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.corrections import Plain, Supports, vocabulary, vocabulary_loss
from farflung.corrections.centering import TAIL_FLOOR
from tests.corrections.oracle import RULES, Rule

ROWS, WIDTH, VOCABULARY = 6, 4, 13
rules = st.sampled_from(sorted(RULES.keys() - {"ppo", "dppo"}))  # functions of the ratio alone


class Case:
    """Random heads of one to nearly all tokens, of q far from or close to p, and sampled tokens inside and outside of them."""

    def __init__(self, seed: int, noise: float, temperature: float, softcap: float | None, with_bias: bool) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.temperature, self.softcap = temperature, softcap
        self.hidden, self.weight = normal(ROWS, WIDTH).requires_grad_(), normal(VOCABULARY, WIDTH).requires_grad_()
        self.bias = normal(VOCABULARY).requires_grad_() if with_bias else None
        self.log_q = (self.tempered().detach() + noise * normal(ROWS, VOCABULARY)).log_softmax(-1)
        sizes = torch.randint(1, VOCABULARY - 1, (ROWS,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        order = self.log_q.argsort(-1, descending=True)
        ids = torch.cat([order[t, :n] for t, n in enumerate(sizes.tolist())])
        rows = torch.repeat_interleave(sizes)
        self.recorded = Supports(ids, self.log_q[rows, ids], offsets, "top_k")
        self.sampled = torch.multinomial(self.log_q.exp(), 1, generator=g).squeeze(1)
        self.advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0, 0.3], dtype=torch.float64)

    def tempered(self) -> Tensor:
        logits = self.hidden @ self.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def modelled(self) -> Tensor:
        """q as far as it is known: recorded on H, rho p elsewhere; [rows, V] probabilities."""
        p, (q_tail, p_tail) = self.tempered().detach().softmax(-1), self.tails().clamp(min=TAIL_FLOOR)
        return torch.where(self.inside(), self.log_q.exp(), (q_tail / p_tail)[:, None] * p)

    def tails(self) -> Tensor:
        """What the recorded heads leave of q and of p, [2, rows]."""
        p = self.tempered().detach().softmax(-1)
        return torch.stack([torch.where(self.inside(), 0, each).sum(-1) for each in (self.log_q.exp(), p)])

    def inside(self) -> Tensor:
        inside = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
        inside[self.recorded.rows, self.recorded.ids] = True
        return inside

    def drawn(self) -> Tensor:
        return self.log_q.gather(1, self.sampled[:, None]).squeeze(1)

    def inputs(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def loss(self, rule: str, centering: bool, denominator: float = 1.0) -> Tensor:
        found, _ = vocabulary_loss(
            self.hidden, self.weight, self.bias, self.sampled, self.drawn(), self.advantages,
            supports=self.recorded, weight=RULES[rule].weight, centering=centering, softcap=self.softcap,
            temperature=self.temperature, denominator=denominator,
        )  # fmt: skip
        return found


cases = st.builds(
    Case, st.integers(0, 2**31), st.sampled_from([0.02, 0.5, 3.0]), st.sampled_from([1.0, 0.6]),
    st.sampled_from([None, 1.5]), st.booleans(),
)  # fmt: skip


def definition(case: Case, rule: Rule, centering: bool) -> Tensor:
    """The sum over rows of -A (w_a log p_a - sum_b q_b w_b log p_b) over all of the vocabulary."""
    log_p = case.tempered().log_softmax(-1)
    p, q = log_p.detach().exp(), case.modelled()
    a = case.sampled[:, None]
    term = rule.f(p.gather(1, a), case.drawn()[:, None].exp(), 1.0) * log_p.gather(1, a)
    if centering:
        term = term - (q * rule.f(p, q, 1.0) * log_p).sum(-1, keepdim=True)
    return -(case.advantages[:, None] * term).sum()


@settings(deadline=None, max_examples=120)
@given(cases, rules, st.booleans(), st.sampled_from([1, 2 * VOCABULARY, 1 << 20]))
def test_the_gradient_is_that_of_the_definition(case: Case, rule: str, centering: bool, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK", chunk)
        got = torch.autograd.grad(case.loss(rule, centering, 3.0), case.inputs())
    want = torch.autograd.grad(definition(case, RULES[rule], centering) / 3.0, case.inputs())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=40)
@given(cases, rules, st.sampled_from([1.0, -0.4]))
def test_a_constant_advantage_moves_nothing(case: Case, rule: str, advantage: float) -> None:
    """Averaged over the modelled q at every position, whatever the rule: also where the tail is out of the band."""
    assume(bool((case.tails() > TAIL_FLOOR).all()))
    q, every = case.modelled(), torch.arange(VOCABULARY)
    owner = torch.arange(ROWS).repeat_interleave(VOCABULARY)
    total, _ = vocabulary_loss(
        case.hidden[owner], case.weight, case.bias, every.repeat(ROWS), q.log().flatten(), advantage * q.flatten(),
        supports=case.recorded.select(owner), weight=RULES[rule].weight, softcap=case.softcap,
        temperature=case.temperature, denominator=1,
    )  # fmt: skip
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(total, case.inputs()))


@settings(deadline=None, max_examples=40)
@given(cases)
def test_diagnostics_are_over_the_vocabulary(case: Case) -> None:
    assume(bool((case.tails() > TAIL_FLOOR).all()))
    _, found = vocabulary_loss(
        case.hidden, case.weight, case.bias, case.sampled, case.drawn(), case.advantages,
        supports=case.recorded, weight=Plain(), softcap=case.softcap, temperature=case.temperature, denominator=1,
    )  # fmt: skip
    log_p, q, live = case.tempered().detach().log_softmax(-1), case.modelled(), case.advantages != 0
    ratio = log_p.gather(1, case.sampled[:, None]).squeeze(1) - case.drawn()
    assert torch.equal(found.measured, live)
    torch.testing.assert_close(found.kl, (q * (q.log() - log_p)).sum(-1) * live, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_ratio, ratio * live, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(-1) * live, rtol=1e-9, atol=1e-12)


def test_a_head_of_all_tokens_has_no_tail() -> None:
    """What rounding leaves of 1 - Q is floored, so nothing is divided by zero."""
    case = Case(1, 0.5, 1.0, None, False)
    offsets = torch.arange(ROWS + 1) * VOCABULARY
    case.recorded = Supports(torch.arange(VOCABULARY).repeat(ROWS), case.log_q.flatten(), offsets, "top_k")
    for got, want in zip(
        torch.autograd.grad(case.loss("mis", True), case.inputs()),
        torch.autograd.grad(definition(case, RULES["mis"], True), case.inputs()),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_kind", [torch.float32, torch.bfloat16])
def test_narrow_types_are_computed_in_float32(
    hidden_kind: torch.dtype, weight_kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place and by blocks of the vocabulary; autocast outside changes nothing."""
    monkeypatch.setattr(vocabulary, "BLOCK", 3 * WIDTH)
    case = Case(2, 0.5, 1.0, None, True)
    assert case.bias is not None
    for name, kind in (("hidden", hidden_kind), ("weight", weight_kind), ("bias", weight_kind)):
        setattr(case, name, getattr(case, name).detach().to(kind).requires_grad_())

    def run(in_place: bool) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            total, _ = vocabulary_loss(
                case.hidden, case.weight, case.bias, case.sampled, case.drawn(), case.advantages,
                supports=case.recorded, weight=Plain(), denominator=1, in_place=in_place,
            )  # fmt: skip
            total.backward()
        assert total.dtype == torch.float32
        found = [t.grad for t in case.inputs()]
        for tensor in case.inputs():
            tensor.grad = None
        return found

    ordinary, placed = run(False), run(True)
    for name in ("hidden", "weight", "bias"):
        setattr(case, name, getattr(case, name).detach().double().requires_grad_())
    exact = torch.autograd.grad(definition(case, RULES["none"], True), case.inputs())
    for a, b, want, kind in zip(ordinary, placed, exact, (hidden_kind, weight_kind, weight_kind), strict=True):
        assert a is not None
        assert a.dtype == kind
        tolerance = 1e-5 if kind == torch.float32 else 2e-2
        torch.testing.assert_close(a.double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def test_rows_without_advantage_are_never_computed() -> None:
    case = Case(3, 0.5, 1.0, None, False)
    poisoned = case.hidden.detach().clone()
    poisoned[case.advantages == 0] = torch.nan
    case.hidden = poisoned.requires_grad_()
    grads = torch.autograd.grad(case.loss("mis", True), case.inputs())
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][case.advantages == 0].any()
    case.advantages = torch.zeros(ROWS, dtype=torch.float64)
    total = case.loss("mis", True)
    assert total == 0
    assert not any(g.any() for g in torch.autograd.grad(total, case.inputs()))


@pytest.mark.parametrize(("temperature", "denominator"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_bad_scales_are_refused(temperature: float, denominator: float) -> None:
    case = Case(4, 0.5, 1.0, None, False)
    case.temperature = temperature
    with pytest.raises(BadInput, match=r"denominator is 0|temperature is"):
        case.loss("none", True, denominator)
