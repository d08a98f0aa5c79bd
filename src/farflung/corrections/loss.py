"""The losses: over recorded candidates (exact, centred), and over the whole vocabulary (not centred).

Both are sums over tokens divided by ``denominator``, which the caller sets to the number of action tokens of the whole
batch, whatever was masked, certain or without advantage. So the step does not grow when tokens are masked, and the
expectation over the sampler stays what the formulas say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils.checkpoint import checkpoint

from farflung.core.errors import BadInput
from farflung.corrections.diagnostics import TokenDiagnostics, sampled_diagnostics
from farflung.corrections.head import candidate_logits
from farflung.corrections.supports import Supports
from farflung.corrections.weights import Weight

VOCABULARY_CHUNK = 1 << 24
"""Logits in memory at once on the whole-vocabulary path."""


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
    temperature: float = 1.0,
    denominator: float,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] straight from hidden states, with what each token measured.

    hidden [N, d] predicts sampled [N] int64; head [V, d] and bias [V] are the LM head; supports has N rows; advantages
    [N]. Rows with one candidate or no advantage have no gradient and are never computed.
    """
    _check(temperature, denominator)
    measured = advantages != 0
    live = torch.nonzero((supports.sizes > 1) & measured).squeeze(1)
    chosen = supports.select(live)
    slots = chosen.find(sampled[live])
    logits = candidate_logits(hidden.index_select(0, live), head, bias, chosen)
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


def vocabulary_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    weight: Weight,
    temperature: float = 1.0,
    denominator: float,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] for tokens drawn from the whole vocabulary, of which only the sampled log-probability [N] was recorded.

    The expectation under q is unknown here, so nothing is centred: the update is A w_a s_a. ``kl`` is the one-sample
    estimate k3. Logits exist for a chunk of rows at a time and are computed again in the backward pass.
    """
    _check(temperature, denominator)
    measured = advantages != 0
    live = torch.nonzero(measured).squeeze(1)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    found = TokenDiagnostics.blank(measured, dtype)
    loss = hidden.new_zeros((), dtype=dtype)
    for rows in torch.split(live, max(1, VOCABULARY_CHUNK // len(head))):
        advantage, log_q = advantages[rows].to(dtype), logprobs[rows].to(dtype)
        log_p, entropy = checkpoint(
            _vocabulary_log_p, hidden.index_select(0, rows), head, bias, sampled[rows], temperature, use_reentrant=False
        )
        weights, _ = weight(log_p.detach(), log_q)
        loss = loss - (advantage * weights * log_p).sum() / denominator
        k3, found.out_of_band[rows] = sampled_diagnostics(log_p.detach(), log_q)
        found.kl[rows] = found.k3[rows] = k3
        found.entropy[rows] = entropy
        found.masked[rows] = weights == 0
    return loss, found


def _vocabulary_log_p(
    hidden: Tensor, head: Tensor, bias: Tensor | None, sampled: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log p of the sampled tokens and, detached, the entropy of p: [rows] each."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.nn.functional.linear(hidden.to(dtype), head.to(dtype), None if bias is None else bias.to(dtype))
    log_p = log_softmax(logits / temperature, -1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(1, sampled[:, None]).squeeze(1), entropy


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
