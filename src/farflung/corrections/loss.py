"""The losses: over all that could be drawn ("top_p", exact), and over the vocabulary with a recorded head ("top_k") or none.

Both are sums over tokens of -A (w_a log p_a - sum_b c_b log p_b) / denominator with the coefficients of
``farflung.corrections.centering``. The denominator comes from ``denominators``: it counts tokens as they were sampled,
whatever was masked, certain or without advantage. The value is no curve to look at; its parts are in TokenDiagnostics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.corrections.centering import Coefficients, coefficients
from farflung.corrections.checks import (
    PRECISE,
    REAL,
    check_count,
    check_guards,
    check_model,
    check_rows,
    check_supports,
    check_tensor,
    check_update,
)
from farflung.corrections.diagnostics import TokenDiagnostics, probe
from farflung.corrections.guards import Guards
from farflung.corrections.head import candidate_logits
from farflung.corrections.rows import wide
from farflung.corrections.supports import Supports, check_sampled
from farflung.corrections.vocabulary import vocabulary_log_probs
from farflung.corrections.weights import Weight


class _SupportLoss(torch.autograd.Function):
    """Candidate logits [n] -> loss [], with the closed form of the gradient: no second softmax, no graph."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        log_p: Tensor,
        supports: Supports,
        slots: Tensor,
        found: Coefficients,
        scale: Tensor,
        temperature: float,
    ) -> Tensor:
        ctx.save_for_backward(log_p, supports.rows, slots, found.sampled, found.candidates, found.total, scale)
        ctx.temperature = temperature
        return -(scale * found.objective(log_p, log_p[slots], supports)).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_p, rows, slots, sampled, candidates, total, scale = ctx.saved_tensors
        grad = (sampled - total)[rows] * log_p.exp() + candidates
        grad[slots] -= sampled
        grad *= (scale * (grads[0] / ctx.temperature))[rows]
        return grad, None, None, None, None, None, None


def centred_loss(
    logits: Tensor,
    supports: Supports,
    sampled: Tensor,
    advantages: Tensor,
    *,
    weight: Weight,
    centering: bool = True,
    temperature: float = 1.0,
    denominator: float | Tensor,
) -> tuple[Tensor, Tensor, Coefficients]:
    """Loss [] of candidate logits [n] ("top_p"), with log p [n] over each support and the coefficients, both detached.

    logits: of every entry of ``supports``, before temperature, of any float type; sampled [rows] int; advantages [rows];
    denominator: one number, or one for each row. Computed in float32 or wider; logits that are NaN make the loss NaN.
    Raises BadInput.
    """
    check_tensor("logits", logits, (None,), REAL)
    check_supports(logits, supports, "top_p")
    check_tensor("logits", logits, (len(supports.ids),), REAL)
    check_rows(logits, len(supports), sampled, advantages)
    check_update(logits, len(supports), weight, temperature, denominator)
    supports.check(sampled)
    slots = supports.find(sampled)
    logits = logits.to(wide(logits))
    log_p = supports.log_softmax(logits.detach() / temperature)
    found = coefficients(log_p, log_p[slots], supports, supports.logprobs[slots], advantages, weight)
    if not centering:
        found = found.uncentred()
    scale = advantages.to(log_p.dtype) / denominator
    return _support_loss(logits, log_p, supports, slots, found, scale, temperature), log_p, found


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
    denominator: float | Tensor,
    guards: Guards | None = None,
    sequences: Tensor | None = None,
    staleness: Tensor | None = None,
    probes: int = 0,
    in_place: bool = False,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] straight from hidden states with "top_p" supports, with what each token measured.

    hidden [N, d] predicts sampled [N] int; head [V, d] and bias [V] are the LM head; supports has N rows; advantages [N];
    denominator: one number, or [N]. Rows with one candidate or no advantage have no gradient and are never computed.
    guards need whole sequences in one call, sequences [N] int that numbers them from 0 and, for ``max_staleness``,
    staleness [N] int. At about ``probes`` evenly spaced tokens the
    whole vocabulary is looked at too (TokenDiagnostics.vocabulary_entropy, head_p). With ``softcap`` c the logits z are
    c tanh(z / c). Hidden states and heads that are NaN where they are computed make the loss NaN. Raises BadInput.

    ``in_place`` is for ``Tensor.backward``: the head's gradient is added to ``head.grad`` row by row (which is made if it
    is None) and is not seen by ``torch.autograd.grad`` or by DistributedDataParallel. It adds up with all that reaches the
    same parameter by other ways: further packs, other calls, a tied embedding. Parameters with hooks, and tensors that were
    computed from others, get an ordinary gradient.
    """
    check_model(hidden, head, bias, softcap)
    check_supports(hidden, supports, "top_p")
    check_rows(hidden, len(hidden), sampled, advantages)
    check_update(hidden, len(hidden), weight, temperature, denominator)
    check_count("probes", probes)
    sampled = sampled.to(torch.int64)
    supports.check(sampled, len(head))
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
    log_p = chosen.log_softmax(logits.detach() / temperature)
    log_q = chosen.logprobs[slots].to(log_p.dtype)
    found = coefficients(log_p, log_p[slots], chosen, log_q, advantages[live], weight)
    every = advantages.to(log_p.dtype)
    diagnostics = TokenDiagnostics.blank(measured, supports.sizes, _weight_of_one(weight, every))
    entropy = -chosen.sum(log_p.exp() * log_p)
    diagnostics.fill(live, log_p, chosen, log_p[slots], log_q, found, entropy)
    if probes and (measured_rows := torch.nonzero(measured).squeeze(1)).numel():
        at = measured_rows[:: 1 + len(measured_rows) // probes]
        states = hidden.detach().index_select(0, at)
        full = probe(states, head, bias, supports.select(at), softcap=softcap, temperature=temperature)
        diagnostics.vocabulary_entropy[at], diagnostics.head_p[at] = full
    scale = _scale(every, denominator, diagnostics, guards, sequences, staleness)[live]
    if not centering:
        found = found.uncentred()
    return _support_loss(logits, log_p, chosen, slots, found, scale, temperature), diagnostics


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
    denominator: float | Tensor,
    guards: Guards | None = None,
    sequences: Tensor | None = None,
    staleness: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] for tokens drawn from the whole vocabulary, of which logprobs [N] of the sampled ones were recorded.

    supports: "top_k" heads of N rows, which the modelled tail completes; without them the expectation under q is unknown
    and nothing is centred: the update is A w_a s_a. Rows without advantage have no gradient and are never computed.
    Everything else is as in ``candidate_loss``. Logits exist for a chunk of rows at a time and are computed again in the
    backward pass.
    """
    check_model(hidden, head, bias, softcap)
    check_rows(hidden, len(hidden), sampled, advantages)
    check_update(hidden, len(hidden), weight, temperature, denominator)
    check_tensor("logprobs", logprobs, (len(hidden),), PRECISE, hidden)
    check_sampled(sampled, logprobs, len(head))
    sampled = sampled.to(torch.int64)
    if supports is None:
        supports = Supports.blank(len(sampled), hidden.device)
    else:
        check_supports(hidden, supports, "top_k")
        supports.check(sampled, len(head))
    measured = advantages != 0
    live = torch.nonzero(measured).squeeze(1)
    chosen = supports.select(live)
    log_p_sampled, log_p, entropy = vocabulary_log_probs(
        hidden.index_select(0, live), head, bias, sampled[live], chosen,
        softcap=softcap, temperature=temperature, in_place=in_place,
    )  # fmt: skip
    log_q, every = logprobs[live].to(log_p.dtype), advantages.to(log_p.dtype)
    found = coefficients(log_p.detach(), log_p_sampled.detach(), chosen, log_q, advantages[live], weight)
    diagnostics = TokenDiagnostics.blank(measured, supports.sizes, _weight_of_one(weight, every))
    diagnostics.fill(live, log_p.detach(), chosen, log_p_sampled.detach(), log_q, found, entropy)
    scale = _scale(every, denominator, diagnostics, guards, sequences, staleness)[live]
    if not centering:
        found = found.uncentred()
    return -(scale * found.objective(log_p, log_p_sampled, chosen)).sum(), diagnostics


def _support_loss(*args: Any) -> Tensor:
    loss: Tensor = _SupportLoss.apply(*args)  # type: ignore[no-untyped-call]
    return loss


def _scale(
    advantages: Tensor,
    denominator: float | Tensor,
    diagnostics: TokenDiagnostics,
    guards: Guards | None,
    sequences: Tensor | None,
    staleness: Tensor | None,
) -> Tensor:
    """What each row's objective is multiplied with, [N]; the guards' factors go into the diagnostics."""
    if guards:
        sequences, staleness = check_guards(advantages, len(advantages), guards, sequences, staleness)
        diagnostics.factor.copy_(guards.factors(diagnostics.log_ratio, sequences, advantages, staleness))
    return advantages * diagnostics.factor / denominator


def _weight_of_one(weight: Weight, advantages: Tensor) -> Tensor:
    zero = torch.zeros_like(advantages)
    return weight(zero, zero, advantages)[0]
