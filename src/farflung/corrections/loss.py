"""The losses: over recorded candidates (exact), and over the whole vocabulary with a recorded head of it, or none.

Both are sums over tokens divided by ``denominator``, which the caller sets to the number of action tokens of the whole
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
from farflung.corrections.vocabulary import vocabulary_log_probs
from farflung.corrections.weights import Weight

TAIL_FLOOR = 1e-6
"""No tail is taken to be lighter: 1 - Q and 1 - P are differences of numbers close to one."""


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


def vocabulary_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    supports: Supports | None = None,
    weight: Weight,
    centering: bool = True,
    softcap: float | None = None,
    temperature: float = 1.0,
    denominator: float,
    in_place: bool = False,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] for tokens drawn from the whole vocabulary, of which logprobs [N] of the sampled ones were recorded.

    supports has N rows: the sampler's most probable tokens with their log-probabilities over the whole vocabulary (not
    renormalised), any number of them, with or without the sampled one. Without it nothing is centred: the update is
    A w_a s_a. Rows without advantage have no gradient and are never computed. ``softcap`` and ``in_place`` are as for
    ``candidate_logits``. ``kl`` is KL(q || p) with the modelled tail; without recorded tokens it is k3.
    """
    _check(temperature, denominator)
    measured = advantages != 0
    live = torch.nonzero(measured).squeeze(1)
    if supports is None:
        none = sampled.new_zeros(0)
        supports = Supports(none, logprobs.new_zeros(0), none.new_zeros(len(sampled) + 1))
    chosen = supports.select(live)
    log_p_a, log_p, entropy = vocabulary_log_probs(
        hidden.index_select(0, live), head, bias, sampled[live], chosen,
        softcap=softcap, temperature=temperature, in_place=in_place,
    )  # fmt: skip
    log_q_a = logprobs[live].to(log_p.dtype)
    weights, residual, kl = _head_terms(log_p.detach(), log_p_a.detach(), log_q_a, chosen, weight)
    objective = weights * log_p_a
    if centering:
        objective = objective - _row_sum(residual * log_p, chosen.rows, len(live))
    found = TokenDiagnostics.blank(measured, log_p.dtype)
    found.k3[live], found.out_of_band[live] = sampled_diagnostics(log_p_a.detach(), log_q_a)
    found.kl[live] = torch.where(chosen.sizes > 0, kl, found.k3[live])
    found.entropy[live] = entropy
    found.masked[live] = weights == 0
    return -(advantages[live].to(log_p.dtype) * objective).sum() / denominator, found


def _head_terms(
    log_p: Tensor, log_p_a: Tensor, log_q_a: Tensor, head: Supports, weight: Weight
) -> tuple[Tensor, Tensor, Tensor]:
    """w_a [rows], r_b [n] and KL(q || p) [rows] from detached log-probabilities of sampled and recorded tokens.

    The tail is modelled as q = rho p. Since sum_b p_b s_b = 0 over the vocabulary, the expectation to subtract is the sum
    of r_b s_b over the head alone, with r_b = q_b f(p_b / q_b) - alpha p_b and alpha = rho f(1 / rho).
    """
    rows, log_q = head.rows, head.logprobs.to(log_p.dtype)
    left_q, left_p = ((1 - _row_sum(log.exp(), rows, len(head))).clamp(min=TAIL_FLOOR) for log in (log_q, log_p))
    log_rho = (left_q / left_p).log()
    weights, _ = weight(log_p_a, log_q_a)
    _, mass = weight(log_p, log_q)
    _, alpha = weight(torch.zeros_like(log_rho), log_rho)
    kl = left_q * log_rho + _row_sum(log_q.exp() * (log_q - log_p), rows, len(head))
    return weights, mass - alpha[rows] * log_p.exp(), kl


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
