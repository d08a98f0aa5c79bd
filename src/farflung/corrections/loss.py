"""The loss over recorded candidates: exact and centred.

It is a sum over tokens divided by ``denominator``, which the caller sets to the number of action tokens of the whole
batch, whatever was masked, certain or without advantage. So the step does not grow when tokens are masked, and the
expectation over the sampler stays what the formulas say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.corrections.diagnostics import TokenDiagnostics, sampled_diagnostics
from farflung.corrections.head import candidate_logits
from farflung.corrections.supports import Supports
from farflung.corrections.weights import Weight


class _CentredLoss(torch.autograd.Function):
    """Candidate logits [n] -> (loss [], log p [n], weights [n]); only the loss has a gradient.

    Surrogate of one row: -A (w_a log p_a - sum_b m_b log p_b) with m = q w; its gradient in the tempered logits is
    -A (w_a 1[j = a] - m_j - (w_a - M) p_j) with M = sum_b m_b, so the backward pass needs no second softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        supports: Supports,
        slots: Tensor,
        advantages: Tensor,
        weight: Weight,
        centering: bool,
        temperature: float,
        denominator: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = supports.rows
        log_p = _row_log_softmax(logits / temperature, rows, len(supports))
        weights, mass = weight(log_p, supports.logprobs.to(log_p.dtype))
        if not centering:
            mass = torch.zeros_like(mass)
        advantages = advantages.to(log_p.dtype)
        weight_a = weights[slots]
        expected = _row_sum(mass * log_p, rows, len(supports))
        loss = -(advantages * (weight_a * log_p[slots] - expected)).sum() / denominator
        ctx.save_for_backward(log_p, rows, slots, advantages, weight_a, mass)
        ctx.scale = 1 / (temperature * denominator)
        ctx.mark_non_differentiable(log_p, weights)
        return loss, log_p, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_p, rows, slots, advantages, weight_a, mass = ctx.saved_tensors
        total = _row_sum(mass, rows, len(slots))
        grad = (weight_a - total)[rows] * log_p.exp() + mass
        grad[slots] -= weight_a
        grad *= (advantages * (grads[0] * ctx.scale))[rows]
        return grad, None, None, None, None, None, None, None


def centred_loss(
    logits: Tensor,
    supports: Supports,
    slots: Tensor,
    advantages: Tensor,
    *,
    weight: Weight,
    centering: bool = True,
    temperature: float = 1.0,
    denominator: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [] of candidate logits [n], with log p [n] over each support and weights f(p/q) [n], both detached.

    slots [rows]: the entry of each row's sampled token (``Supports.find``); advantages [rows]; logits before temperature.
    """
    _check(temperature, denominator)
    result: tuple[Tensor, Tensor, Tensor] = _CentredLoss.apply(  # type: ignore[no-untyped-call]
        logits, supports, slots, advantages, weight, centering, temperature, denominator
    )
    return result


def candidate_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    supports: Supports,
    sampled: Tensor,
    advantages: Tensor,
    *,
    weight: Weight,
    centering: bool = True,
    softcap: float | None = None,
    temperature: float = 1.0,
    denominator: float,
    in_place: bool = False,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] straight from hidden states, with what each token measured.

    hidden [N, d] predicts sampled [N] int64; head [V, d] and bias [V] are the LM head; supports has N rows; advantages
    [N]. Rows with one candidate or no advantage have no gradient and are never computed. ``softcap`` and ``in_place`` are
    as for ``candidate_logits``.
    """
    _check(temperature, denominator)
    measured = advantages != 0
    alive = (supports.sizes > 1) & measured
    live = torch.nonzero(alive).squeeze(1)
    chosen = supports.select(live)
    slots = chosen.find(sampled[live])
    # The head reads hidden states where they are: the same entries, with the other rows empty.
    offsets = torch.zeros_like(supports.offsets)
    torch.cumsum(torch.where(alive, supports.sizes, 0), 0, out=offsets[1:])
    spread = Supports(chosen.ids, chosen.logprobs, offsets)
    logits = candidate_logits(hidden, head, bias, spread, softcap=softcap, in_place=in_place)
    loss, log_p, weights = centred_loss(
        logits, chosen, slots, advantages[live],
        weight=weight, centering=centering, temperature=temperature, denominator=denominator,
    )  # fmt: skip
    found = TokenDiagnostics.blank(measured, log_p.dtype)
    log_q = chosen.logprobs.to(log_p.dtype)
    rows = chosen.rows
    found.kl[live] = _row_sum(log_q.exp() * (log_q - log_p), rows, len(live))
    found.entropy[live] = -_row_sum(log_p.exp() * log_p, rows, len(live))
    found.k3[live], found.out_of_band[live] = sampled_diagnostics(log_p[slots], log_q[slots])
    found.masked[live] = weights[slots] == 0
    return loss, found


def _row_sum(values: Tensor, rows: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add_(0, rows, values)


def _row_log_softmax(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    top = logits.new_full((count,), -torch.inf).scatter_reduce_(0, rows, logits, "amax")
    shifted = logits - top[rows]
    return shifted - _row_sum(shifted.exp(), rows, count).log()[rows]


def _check(temperature: float, denominator: float) -> None:
    if not temperature > 0:
        raise BadInput(f"temperature is {temperature}; it must be above 0", where="loss")
    if not denominator > 0:
        raise BadInput(f"the denominator is {denominator}; a batch needs action tokens", where="loss")
