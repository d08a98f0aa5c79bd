"""The definition of the update, written densely over the vocabulary for automatic differentiation: slow, plain, float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from farflung.corrections import (
    Clipped,
    DifferenceMask,
    Masked,
    Plain,
    PpoClip,
    Supports,
    TokenDiagnostics,
    Weight,
    candidate_loss,
    vocabulary_loss,
)

FLOOR = 1e-6


@dataclass(frozen=True)
class Rule:
    """A weight, and the same from probabilities and an advantage without any logarithm. ``edges``: ratios where it jumps."""

    weight: Weight
    f: Callable[[Tensor, Tensor, float], Tensor]
    edges: tuple[float, ...] = ()

    def sure(self, p: Tensor, q: Tensor, margin: float) -> bool:
        """Whether no token is so near to a jump that rounding decides."""
        near = [(p / q - edge).abs().min() < margin * edge for edge in self.edges]
        if isinstance(self.weight, DifferenceMask):
            near.append(((p - q).abs() - self.weight.delta).abs().min() < margin)
        return not any(near)


def band(low: float, high: float, *, ratio: bool = True) -> Rule:
    def f(p: Tensor, q: Tensor, _: float) -> Tensor:
        r = p / q
        return torch.where((r >= low) & (r <= high), r if ratio else torch.ones_like(r), 0.0)

    return Rule(Masked(low, high, ratio), f, (low, high))


def ppo(p: Tensor, q: Tensor, advantage: float) -> Tensor:
    r = p / q
    return torch.where(r <= 1.28 if advantage > 0 else r >= 0.8, r, 0.0)


def dppo(p: Tensor, q: Tensor, advantage: float) -> Tensor:
    return torch.where(p - q <= 0.2 if advantage > 0 else q - p <= 0.2, p / q, 0.0)


RULES: dict[str, Rule] = {
    "none": Rule(Plain(), lambda p, q, _: torch.ones_like(p / q)),
    "is": Rule(Clipped(0.0, float("inf")), lambda p, q, _: p / q),
    "tis": Rule(Clipped(0.0, 2.0), lambda p, q, _: (p / q).clamp(max=2.0)),
    "cispo": Rule(Clipped(0.8, 1.28), lambda p, q, _: (p / q).clamp(0.8, 1.28)),
    "mis": band(0.5, 5.0),
    "narrow": band(0.9, 1.1),
    "mask": band(0.5, 5.0, ratio=False),
    "ppo": Rule(PpoClip(0.8, 1.28), ppo, (0.8, 1.28)),
    "dppo": Rule(DifferenceMask(0.2), dppo),
}
rules = st.sampled_from(sorted(RULES))


@dataclass(frozen=True)
class Problem:
    """``logprobs`` are the recorded ones of the sampled tokens, of which a "top_k" head need not hold all."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    supports: Supports
    sampled: Tensor
    logprobs: Tensor
    advantages: Tensor
    temperature: float

    def cast(self, dtype: torch.dtype) -> Problem:
        supports = dataclasses.replace(self.supports, logprobs=self.supports.logprobs.to(dtype))
        bias = None if self.bias is None else self.bias.to(dtype)
        hidden, head, logprobs = self.hidden.to(dtype), self.head.to(dtype), self.logprobs.to(dtype)
        return dataclasses.replace(self, hidden=hidden, head=head, bias=bias, supports=supports, logprobs=logprobs)

    def differentiable(self) -> Problem:
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        hidden, head = self.hidden.clone().requires_grad_(), self.head.clone().requires_grad_()
        return dataclasses.replace(self, hidden=hidden, head=head, bias=bias)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        inputs = [t for t in (self.hidden, self.head, self.bias) if t is not None]
        return list(torch.autograd.grad(loss, inputs))

    @property
    def logits(self) -> Tensor:
        """[rows, V], before temperature."""
        logits = self.hidden @ self.head.T
        return logits if self.bias is None else logits + self.bias

    def row(self, t: int) -> tuple[Tensor, Tensor]:
        """Ids and recorded probabilities of a row."""
        low, high = self.supports.offsets[t : t + 2].tolist()
        return self.supports.ids[low:high], self.supports.logprobs[low:high].exp()


@st.composite
def problems(draw: st.DrawFn, kind: str = "top_p", least: int = 1) -> Problem:
    """Small random problems with singletons, zero advantages, and q far from or close to p.

    A "top_k" head keeps at least ``least`` and at most all tokens of the vocabulary.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary, width, rows = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    sizes = [draw(st.integers(min(least, vocabulary), vocabulary)) for _ in range(rows)]
    advantages = torch.tensor([draw(st.sampled_from([0.0, 1.0, -1.0, 0.25, -0.7])) for _ in range(rows)]).double()
    temperature = draw(st.sampled_from([1.0, 0.6, 1.7]))
    noise = draw(st.sampled_from([0.02, 0.5, 3.0]))
    hidden = torch.tensor(rng.normal(size=(rows, width)))
    head = torch.tensor(rng.normal(size=(vocabulary, width)))
    bias = torch.tensor(rng.normal(size=vocabulary)) if draw(st.booleans()) else None
    logits = hidden @ head.T + (0 if bias is None else bias)
    disturbed = logits / temperature + noise * torch.tensor(rng.normal(size=logits.shape))
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(sizes)]))
    if kind == "top_p":
        ids = [torch.tensor(rng.permutation(vocabulary)[:size]) for size in sizes]
        log_q = [disturbed[t, i].log_softmax(-1) for t, i in enumerate(ids)]
        sampled = torch.stack([i[rng.integers(len(i))] for i in ids])
        drawn = torch.stack([q[i == a][0] for i, q, a in zip(ids, log_q, sampled, strict=True)])
    else:
        every = disturbed.log_softmax(-1)
        ids = [row.topk(size).indices for row, size in zip(every, sizes, strict=True)]
        log_q = [every[t, i] for t, i in enumerate(ids)]
        sampled = torch.tensor(rng.integers(vocabulary, size=rows))
        drawn = every.gather(1, sampled[:, None]).squeeze(1)
    supports = Supports(torch.cat(ids), torch.cat(log_q), offsets, kind)  # type: ignore[arg-type]
    return Problem(hidden, head, bias, supports, sampled, drawn, advantages, temperature)


def model(problem: Problem, logits: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Row t over the vocabulary: log p, q with the modelled tail, whether a token was recorded, and rho."""
    ids, recorded = problem.row(t)
    kept = torch.zeros(logits.shape[1], dtype=torch.bool)
    kept[ids] = True
    z = logits[t] / problem.temperature
    if problem.supports.kind == "top_p":
        log_p = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
        return log_p, torch.zeros_like(z).index_put((ids,), recorded), kept, 1.0
    log_p = z.log_softmax(-1)
    p = log_p.detach().exp()
    rho = float((1 - recorded.sum()).clamp(min=FLOOR) / (1 - p[ids].sum()).clamp(min=FLOOR))
    return log_p, (rho * p).index_put((ids,), recorded), kept, rho


def rounding(problem: Problem) -> float:
    """What float64 leaves uncertain of rho, which comes from 1 - sum q and 1 - sum p: nothing if the tails are large."""
    worst = 0.0
    for t in range(len(problem.supports)) if problem.supports.kind == "top_k" else ():
        log_p, q, kept, rho = model(problem, problem.logits.detach(), t)
        tails = [max(FLOOR, 1 - float(mass[kept].sum())) for mass in (log_p.exp(), q)]
        if not kept.all():
            worst = max(worst, 1e-15 * (1 + rho) * sum(1 / tail for tail in tails))
    return worst


def surrogate(problem: Problem, logits: Tensor, rule: Rule, *, centering: bool = True) -> Tensor:
    """The sum over rows of -A (w_a log p_a - sum_b q_b w_b log p_b), over all b, from dense logits [rows, V].

    With a modelled tail of mass alpha p, alpha times sum_b p_b log p_b (p without gradient) is added: its gradient is zero,
    and what is left of the value is the sum over the head alone.
    """
    total = logits.new_zeros(())
    for t in range(len(problem.supports)):
        advantage, a = float(problem.advantages[t]), int(problem.sampled[t])
        log_p, q, kept, rho = model(problem, logits, t)
        p = log_p.detach().exp()
        w = torch.zeros_like(p)
        w[kept] = rule.f(p[kept], q[kept], advantage)
        rare = torch.tensor(1e-9, dtype=torch.float64)
        tail = float(rule.f(rare, rare * rho, advantage))
        w[~kept] = tail
        own = rule.f(p[a], problem.logprobs[t].exp(), advantage)
        term = own * log_p[a]
        if centering:
            finite = torch.isfinite(log_p)
            term = term - (q * w * log_p)[finite].sum()
            if problem.supports.kind == "top_k":
                term = term + rho * tail * (p * log_p).sum()
        total = total - advantage * term
    return total


def fused(
    problem: Problem, rule: Rule, *, centering: bool = True, denominator: float | Tensor = 1.0
) -> tuple[Tensor, TokenDiagnostics]:
    """The loss that the package computes."""
    p, weight, temperature = problem, rule.weight, problem.temperature
    if p.supports.kind == "top_p":
        return candidate_loss(
            p.hidden, p.head, p.bias, p.supports, p.sampled, p.advantages,
            weight=weight, centering=centering, temperature=temperature, denominator=denominator,
        )  # fmt: skip
    return vocabulary_loss(
        p.hidden, p.head, p.bias, p.sampled, p.logprobs, p.advantages,
        supports=p.supports, weight=weight, centering=centering, temperature=temperature, denominator=denominator,
    )  # fmt: skip


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Equal to ``tolerance`` of the largest value, or of one if all are smaller."""
    scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got.double() / scale, want.double() / scale, rtol=0, atol=tolerance)
