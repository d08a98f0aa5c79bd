"""The definition of the update, written densely for automatic differentiation: slow, plain, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from farflung.corrections import Masked, Plain, Supports, Weight

RULES: dict[str, tuple[Weight, Callable[[Tensor], Tensor]]] = {
    "none": (Plain(), torch.ones_like),
    "importance": (Masked(0.0, float("inf")), lambda r: r),
    "mis": (Masked(0.5, 5.0), lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0)),
    "narrow": (Masked(0.9, 1.1), lambda r: torch.where((r >= 0.9) & (r <= 1.1), r, 0.0)),
}


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    supports: Supports
    sampled: Tensor
    advantages: Tensor
    temperature: float

    def cast(self, dtype: torch.dtype) -> Problem:
        supports = Supports(self.supports.ids, self.supports.logprobs.to(dtype), self.supports.offsets)
        bias = None if self.bias is None else self.bias.to(dtype)
        return Problem(
            self.hidden.to(dtype), self.head.to(dtype), bias, supports, self.sampled, self.advantages, self.temperature
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small random problems with singletons, zero advantages, and q far from or close to p."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary, width, rows = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    sizes = [draw(st.integers(1, vocabulary)) for _ in range(rows)]
    advantages = [draw(st.sampled_from([0.0, 1.0, -1.0, 0.25, -0.7])) for _ in range(rows)]
    temperature = draw(st.sampled_from([1.0, 0.6, 1.7]))
    noise = draw(st.sampled_from([0.02, 0.5, 3.0]))
    hidden = torch.tensor(rng.normal(size=(rows, width)))
    head = torch.tensor(rng.normal(size=(vocabulary, width)))
    bias = torch.tensor(rng.normal(size=vocabulary)) if draw(st.booleans()) else None
    logits = hidden @ head.T + (0 if bias is None else bias)
    ids = [rng.permutation(vocabulary)[:size] for size in sizes]
    log_q = [
        torch.log_softmax(logits[t, i] / temperature + noise * torch.tensor(rng.normal(size=len(i))), -1)
        for t, i in enumerate(map(torch.tensor, ids))
    ]
    supports = Supports(
        torch.tensor(np.concatenate(ids)), torch.cat(log_q), torch.tensor(np.concatenate([[0], np.cumsum(sizes)]))
    )
    sampled = torch.tensor([rng.choice(i) for i in ids])
    return Problem(hidden, head, bias, supports, sampled, torch.tensor(advantages, dtype=torch.float64), temperature)


def surrogate(
    problem: Problem,
    logits: Tensor,
    f: Callable[[Tensor], Tensor],
    *,
    centering: bool,
    sampled: Sequence[int] | None = None,
) -> Tensor:
    """The sum over rows of -A (w_a log p_a - sum_b q_b w_b log p_b), from dense logits [rows, V] before temperature."""
    total = logits.new_zeros(())
    for t in range(len(problem.supports)):
        low, high = problem.supports.offsets[t : t + 2].tolist()
        ids, q = problem.supports.ids[low:high], problem.supports.logprobs[low:high].exp()
        log_p = torch.log_softmax(logits[t, ids] / problem.temperature, -1)
        w = f(log_p.detach().exp() / q)
        token = int(problem.sampled[t] if sampled is None else sampled[t])
        a = ids.tolist().index(token)
        term = w[a] * log_p[a]
        if centering:
            term = term - (q * w * log_p).sum()
        total = total - problem.advantages[t] * term
    return total


def dense_logits(problem: Problem) -> Tensor:
    logits = problem.hidden @ problem.head.T
    return logits if problem.bias is None else logits + problem.bias
