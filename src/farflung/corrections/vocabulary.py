"""The loss over the whole vocabulary, for tokens that were sampled without a finite candidate set.

What the sampler recorded of a position is its token's log-probability and, if anything, a head H: its most probable
tokens with their log-probabilities over the whole vocabulary. The rest of q is modelled as rho p, so that it sums to what
H leaves over. Logits exist for a chunk of rows at a time, and are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farflung.core.errors import BadInput
from farflung.corrections.diagnostics import TokenDiagnostics, sampled_diagnostics
from farflung.corrections.head import takes_rows, weight_gradient
from farflung.corrections.rows import wide
from farflung.corrections.supports import Supports
from farflung.corrections.weights import Weight

CHUNK = 1 << 24
"""Logits in a tensor at once; forward and backward hold two such tensors, three with a soft cap."""

BLOCK = 1 << 24
"""Values of a weight narrower than float32 that are widened at once."""

FLOOR = 1e-6
"""No tail is taken to be lighter: 1 - Q and 1 - P are differences of numbers close to one."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a row's update is made of, from detached log-probabilities.

    w [rows]: weight of the sampled token. r [n]: q_b w_b - alpha p_b of the recorded tokens. total [rows]: its sum by row.
    log_rho [rows]: the modelled tail's log q/p.
    """

    w: Tensor
    r: Tensor
    total: Tensor
    log_rho: Tensor


def terms(log_p: Tensor, log_p_a: Tensor, log_q_a: Tensor, head: Supports, weight: Weight, centering: bool) -> Terms:
    """log_p [n]: the trainer's log-probabilities of the recorded tokens; log_p_a, log_q_a [rows]: of the sampled ones.

    With the tail q = rho p and sum_b p_b s_b = 0, the expectation to subtract is the sum of r_b s_b over H alone, where
    r_b = q_b f(p_b / q_b) - alpha p_b and alpha = rho f(1 / rho). An empty H gives rho = alpha = 1 and nothing to subtract.
    """
    w, _ = weight(log_p_a, log_q_a)
    rows, zero = head.rows, torch.zeros_like(log_p_a)
    log_q = head.logprobs.to(log_p.dtype)

    def remaining(log: Tensor) -> Tensor:
        return (1 - zero.index_add(0, rows, log.exp())).clamp(min=FLOOR)

    log_rho = (remaining(log_q) / remaining(log_p)).log()
    if not centering:
        return Terms(w, torch.zeros_like(log_p), zero, log_rho)
    _, mass = weight(log_p, log_q)
    _, alpha = weight(zero, log_rho)
    r = mass - alpha[rows] * log_p.exp()
    return Terms(w, r, zero.index_add(0, rows, r), log_rho)


@dataclass(frozen=True, slots=True)
class _Task:
    """Everything but what is differentiated. ``live`` [rows]: where the rows stand in the hidden states."""

    live: Tensor
    head: Supports
    sampled: Tensor
    log_q: Tensor
    advantages: Tensor
    weight: Weight
    centering: bool
    softcap: float | None
    temperature: float
    denominator: float
    in_place: bool


class _VocabularyLoss(torch.autograd.Function):
    """hidden [N, d], weight [V, d], bias [V] -> loss [], and by row log p_a, entropy, w, KL; only the loss has a gradient.

    Surrogate of a row: -A (w_a log p_a - sum_H r_b log p_b); its gradient in the tempered logits is
    -A (w_a 1[j = a] - r_j 1[j in H] - (w_a - R) p_j) with R = sum_H r_b.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, ...]:
        head, dtype = task.head, wide(hidden, weight)
        log_total, log_p_a, entropy = torch.empty(3, len(task.live), dtype=dtype, device=hidden.device)
        log_p = torch.empty(len(head.ids), dtype=dtype, device=hidden.device)
        for rows, entries, at in _chunks(task, len(weight)):
            z = _logits(hidden.index_select(0, task.live[rows]).to(dtype), weight, bias, task)
            log_p[entries] = z.view(-1)[at]
            log_p_a[rows] = z.gather(1, task.sampled[rows, None]).squeeze(1)
            top = z.amax(-1)
            p = z.sub_(top[:, None]).exp()
            total = p.sum(-1)
            entropy[rows] = total.log() - p.mul_(z).sum(-1) / total
            log_total[rows] = top + total.log()
        owner = head.rows
        log_p -= log_total[owner]
        log_p_a -= log_total
        log_q = task.log_q.to(dtype)
        found = terms(log_p, log_p_a, log_q, head, task.weight, task.centering)
        expected = torch.zeros_like(log_p_a).index_add_(0, owner, found.r * log_p)
        advantages = task.advantages.to(dtype)
        loss = -(advantages * (found.w * log_p_a - expected)).sum() / task.denominator
        kl = _kl(log_p, head, found)
        ctx.save_for_backward(hidden, weight, bias, log_total, advantages, found.w, found.r, found.total)
        ctx.task = task
        ctx.parameter = weight if task.in_place else None
        ctx.mark_non_differentiable(log_p_a, entropy, found.w, kl)
        return loss, log_p_a, entropy, found.w, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias, log_total, advantages, w, r, total = ctx.saved_tensors
        task, dtype = ctx.task, log_total.dtype
        need_hidden, need_weight, need_bias, _ = ctx.needs_input_grad
        dhidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if need_hidden else None
        dbias = torch.zeros(len(weight), dtype=dtype, device=hidden.device) if need_bias else None
        target, dweight = weight_gradient(weight, ctx.parameter) if need_weight else (None, None)
        scale = advantages * (grad / (task.temperature * task.denominator))
        sparse = r * scale[task.head.rows]
        for rows, entries, at in _chunks(task, len(weight)):
            states = hidden.index_select(0, task.live[rows]).to(dtype)
            z = _logits(states, weight, bias, task)
            slope = None if task.softcap is None else 1 - (z * (task.temperature / task.softcap)) ** 2
            dz = z.sub_(log_total[rows, None]).exp_().mul_((scale * (w - total))[rows, None])
            dz.view(-1).index_add_(0, at, sparse[entries])
            dz.scatter_add_(1, task.sampled[rows, None], -(w * scale)[rows, None])
            if slope is not None:
                dz *= slope
            if dbias is not None:
                dbias += dz.sum(0)
            for part, table in _blocks(weight, dtype):
                if dhidden is not None:
                    _add_product(dhidden, task.live[rows], dz[:, part], table)
                if target is not None:
                    _add_product(target, part, dz[:, part].t(), states)
        return (
            None if dhidden is None else dhidden.to(hidden.dtype),
            dweight,
            None if dbias is None else dbias.to(bias.dtype),
            None,
        )


def vocabulary_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    recorded: Supports | None = None,
    weight: Weight,
    centering: bool = True,
    softcap: float | None = None,
    temperature: float = 1.0,
    denominator: float,
    in_place: bool = False,
) -> tuple[Tensor, TokenDiagnostics]:
    """Loss [] for tokens drawn from the whole vocabulary, straight from hidden states, with what each token measured.

    hidden [N, d] predicts sampled [N] int64, which the sampler drew with log-probability logprobs [N]; head [V, d] and bias
    [V] are the LM head, whose logits z become c tanh(z / c) with ``softcap`` c. ``recorded`` has N rows: the sampler's most
    probable tokens with their log-probabilities over the whole vocabulary (not renormalised), which may be any number and
    need not hold the sampled one. Without it nothing is centred and the update is A w_a s_a. Rows without advantage have
    no gradient and are never computed. ``in_place`` is as for ``candidate_logits``.

    ``kl`` is KL(q || p) with the modelled tail where a head was recorded, else its one-sample estimate k3; entropy is over
    the vocabulary. Memory: two tensors of CHUNK logits. Raises BadInput for a temperature or denominator not above 0.
    """
    if not (temperature > 0 and denominator > 0):
        raise BadInput(f"temperature {temperature} and denominator {denominator} must be above 0", where="loss")
    measured = advantages != 0
    live = torch.nonzero(measured).squeeze(1)
    if recorded is None:
        ids = sampled.new_zeros(0)
        recorded = Supports(ids, logprobs.new_zeros(0), ids.new_zeros(len(sampled) + 1))
    task = _Task(
        live, recorded.select(live), sampled[live], logprobs[live], advantages[live],
        weight, centering, softcap, temperature, denominator, in_place and takes_rows(head),
    )  # fmt: skip
    loss, log_p_a, entropy, w, kl = _VocabularyLoss.apply(hidden, head, bias, task)  # type: ignore[no-untyped-call]
    found = TokenDiagnostics.blank(measured, log_p_a.dtype)
    found.k3[live], found.out_of_band[live] = sampled_diagnostics(log_p_a, task.log_q.to(log_p_a.dtype))
    found.kl[live] = torch.where(task.head.sizes > 0, kl, found.k3[live])
    found.entropy[live] = entropy
    found.masked[live] = w == 0
    return loss, found


def _kl(log_p: Tensor, head: Supports, found: Terms) -> Tensor:
    """KL(q || p) by row: over H as recorded, over the tail as modelled."""
    log_q = head.logprobs.to(log_p.dtype)
    zero = torch.zeros_like(found.w)
    left = (1 - zero.index_add(0, head.rows, log_q.exp())).clamp(min=0)
    return (left * found.log_rho).index_add(0, head.rows, log_q.exp() * (log_q - log_p))


def _chunks(task: _Task, vocabulary: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, their entries of the recorded head, where those stand in the chunk's flattened logits)."""
    step = max(1, CHUNK // vocabulary)
    for start in range(0, len(task.live), step):
        rows = slice(start, min(start + step, len(task.live)))
        offsets = task.head.offsets[rows.start : rows.stop + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        owner = torch.repeat_interleave(offsets.diff())
        yield rows, entries, owner * vocabulary + task.head.ids[entries]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> Tensor:
    """[rows, V] over the temperature, in the states' type."""
    z = torch.empty(len(states), len(weight), dtype=states.dtype, device=states.device)
    for part, table in _blocks(weight, states.dtype):
        with _float32(z):
            torch.mm(states, table.t(), out=z[:, part])
    if bias is not None:
        z += bias
    if task.softcap is not None:
        z.div_(task.softcap).tanh_().mul_(task.softcap)
    return z.div_(task.temperature)


def _float32(tensor: Tensor) -> torch.autocast:
    """Products in the types that they are written in, also where the caller has autocast on."""
    return torch.autocast(tensor.device.type, enabled=False)


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in ``dtype``: as it lies if it has it, else widened block by block."""
    step = len(weight) if weight.dtype == dtype else max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, min(start + step, len(weight)))
        yield part, weight[part].to(dtype)


def _add_product(target: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor) -> None:
    """target[rows] += left @ right; where the rows lie together and the type allows it, without a product of their size."""
    with _float32(target):
        if isinstance(rows, slice) and target.dtype == right.dtype:
            target[rows].addmm_(left, right)
        else:
            target[rows] += left @ right
