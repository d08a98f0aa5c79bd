"""Log-probabilities over the whole vocabulary of a few tokens per row, without ever holding the logits of all rows.

For tokens that were sampled without a finite candidate set. Logits exist for a chunk of rows at a time and are computed
again in the backward pass, where the gradient of any loss in those log-probabilities has a closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farflung.corrections.head import takes_rows, weight_gradient
from farflung.corrections.rows import wide
from farflung.corrections.supports import Supports

CHUNK = 1 << 24
"""Logits in a tensor at once; both passes hold two such tensors, three with a soft cap."""

BLOCK = 1 << 24
"""Values of a weight narrower than float32 that are widened at once."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What is not differentiated. offsets [rows + 1] and ids [n]: the tokens asked for beside the sampled ones [rows]."""

    sampled: Tensor
    ids: Tensor
    offsets: Tensor
    temperature: float
    softcap: float | None
    in_place: bool

    def chunks(self, vocabulary: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, their entries, where those stand in the chunk's flattened logits)."""
        step = max(1, CHUNK // vocabulary)
        for start in range(0, len(self.sampled), step):
            rows = slice(start, min(start + step, len(self.sampled)))
            offsets = self.offsets[rows.start : rows.stop + 1]
            entries = slice(int(offsets[0]), int(offsets[-1]))
            yield rows, entries, torch.repeat_interleave(offsets.diff()) * vocabulary + self.ids[entries]


class _LogProbs(torch.autograd.Function):
    """hidden [rows, d], weight [V, d], bias [V] -> log p of sampled tokens [rows] and entries [n]; entropy [rows].

    With gradients g_a and g_k of the former two, that of the tempered logits of a row is
    g_a 1[j = a] + sum_k g_k 1[j = id_k] - (g_a + sum_k g_k) p_j: one softmax and as many additions as there are entries.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, ...]:
        dtype = wide(hidden, weight)
        log_total, log_p_sampled, entropy = torch.empty(3, len(hidden), dtype=dtype, device=hidden.device)
        log_p = torch.empty(len(task.ids), dtype=dtype, device=hidden.device)
        for rows, entries, at in task.chunks(len(weight)):
            z = _logits(hidden[rows].to(dtype), weight, bias, task)
            log_p[entries] = z.view(-1)[at]
            log_p_sampled[rows] = z.gather(1, task.sampled[rows, None]).squeeze(1)
            top = z.amax(-1)
            p = z.sub_(top[:, None]).exp()
            total = p.sum(-1)
            entropy[rows] = total.log() - p.mul_(z).sum(-1) / total
            log_total[rows] = top + total.log()
        log_p -= torch.repeat_interleave(log_total, task.offsets.diff())
        log_p_sampled -= log_total
        ctx.save_for_backward(hidden, weight, bias, log_total)
        ctx.task = task
        ctx.parameter = weight if task.in_place else None
        ctx.mark_non_differentiable(entropy)
        return log_p_sampled, log_p, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, on_sampled: Tensor, on_entries: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias, log_total = ctx.saved_tensors
        task, dtype = ctx.task, log_total.dtype
        need_hidden, need_weight, need_bias, _ = ctx.needs_input_grad
        dhidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if need_hidden else None
        dbias = torch.zeros(len(weight), dtype=dtype, device=hidden.device) if need_bias else None
        target, dweight = weight_gradient(weight, ctx.parameter) if need_weight else (None, None)
        owner = torch.repeat_interleave(task.offsets.diff())
        total = on_sampled.index_add(0, owner, on_entries)
        for rows, entries, at in task.chunks(len(weight)):
            states = hidden[rows].to(dtype)
            z = _logits(states, weight, bias, task)
            slope = None if task.softcap is None else 1 - (z * (task.temperature / task.softcap)) ** 2
            dz = z.sub_(log_total[rows, None]).exp_().mul_(-total[rows, None])
            dz.view(-1).index_add_(0, at, on_entries[entries])
            dz.scatter_add_(1, task.sampled[rows, None], on_sampled[rows, None])
            dz /= task.temperature
            if slope is not None:
                dz *= slope
            if dbias is not None:
                dbias += dz.sum(0)
            for part, table in _blocks(weight, dtype):
                if dhidden is not None:
                    _add_product(dhidden[rows], dz[:, part], table)
                if target is not None:
                    _add_product(target[part], dz[:, part].t(), states)
        return (
            None if dhidden is None else dhidden.to(hidden.dtype),
            dweight,
            None if dbias is None else dbias.to(bias.dtype),
            None,
        )


def vocabulary_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled: Tensor,
    supports: Supports,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p [rows] of the sampled tokens and [n] of recorded ones, and the entropy [rows] of p, over the whole vocabulary.

    hidden [rows, d] and weight [V, d] of any float types, bias [V], sampled [rows] int64; supports has as many rows, any of
    them empty. Everything is computed in float32 or wider, also under autocast. Logits z become c tanh(z / c) with
    ``softcap`` c and are then divided by ``temperature``. Gradients reach hidden, weight and bias through the first two
    results; the entropy has none. ``in_place`` is as in ``candidate_loss``. Memory: two tensors of CHUNK logits. All ids are
    trusted: those who call this check them first.
    """
    task = _Task(
        sampled, supports.ids, supports.offsets, temperature, softcap, in_place and takes_rows(weight)
    )  # fmt: skip
    result: tuple[Tensor, Tensor, Tensor] = _LogProbs.apply(hidden, weight, bias, task)  # type: ignore[no-untyped-call]
    return result


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> Tensor:
    """[rows, V] over the temperature, in the states' type."""
    z = torch.empty(len(states), len(weight), dtype=states.dtype, device=states.device)
    with _as_written(z):
        for part, table in _blocks(weight, states.dtype):
            torch.mm(states, table.t(), out=z[:, part])
    if bias is not None:
        z += bias
    if task.softcap is not None:
        z.div_(task.softcap).tanh_().mul_(task.softcap)
    return z.div_(task.temperature)


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in ``dtype``: as it lies if it has it, else widened block by block."""
    step = len(weight) if weight.dtype == dtype else max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, min(start + step, len(weight)))
        yield part, weight[part].to(dtype)


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right in place, without a product of the target's size where the types allow it."""
    with _as_written(target):
        if target.dtype == right.dtype:
            target.addmm_(left, right)
        else:
            target += left @ right


def _as_written(tensor: Tensor) -> torch.autocast:
    """Products in the types of their factors, also where the caller has autocast on."""
    return torch.autocast(tensor.device.type, enabled=False)
