"""Logits of recorded candidates only: rows of the LM head are gathered, never the whole [tokens, vocabulary] product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from farflung.corrections.supports import Supports

CHUNK = 1 << 22
"""Gathered values per piece of work (candidates x width); it bounds the temporary memory to 2 x 16 MiB in float32."""


class _CandidateLogits(torch.autograd.Function):
    """hidden [N, d], weight [V, d], bias [V] or None -> logits [n] in at least float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, rows: Tensor, offsets: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        wide = hidden.to(dtype)
        logits = torch.empty(len(ids), dtype=dtype, device=hidden.device)
        step = max(1, CHUNK // hidden.shape[1])
        for at in range(0, len(ids), step):
            piece = slice(at, at + step)
            gathered = weight.index_select(0, ids[piece]).to(dtype)
            logits[piece] = (gathered * wide.index_select(0, rows[piece])).sum(-1)
        if bias is not None:
            logits += bias[ids]
        ctx.save_for_backward(hidden, weight, bias, ids, rows, offsets)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """dhidden_t = sum of g_k W[id_k] over row t, dW[v] = sum of g_k hidden[row_k] over entries with id v.

        Both are weighted bags of rows, summed in a fixed order.
        """
        (grad,) = grads
        hidden, weight, bias, ids, rows, offsets = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dhidden = dweight = dbias = None
        if need_hidden:
            bags = _bags(weight, ids, offsets, grad)
            dhidden = bags.to(hidden.dtype)
        if need_weight or need_bias:
            order = torch.argsort(ids, stable=True)
            used, counts = torch.unique_consecutive(ids[order], return_counts=True)
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        if need_weight:
            dweight = torch.zeros_like(weight)
            dweight[used] = _bags(hidden, rows[order], starts, grad[order]).to(weight.dtype)
        if need_bias:
            sums = _bags(grad[:, None], order, starts, torch.ones_like(grad))
            dbias = torch.zeros_like(bias)
            dbias[used] = sums.squeeze(1).to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None


def _bags(table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    """Row t: the sum of scale_k * table[entries_k] over offsets[t] <= k < offsets[t+1]; [bags, d] in scale's dtype."""
    if table.dtype != scale.dtype:
        used, entries = torch.unique(entries, return_inverse=True)
        table = table[used].to(scale.dtype)
    return embedding_bag(entries, table, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True)


def candidate_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, supports: Supports) -> Tensor:
    """<hidden_t, weight_b> + bias_b for every candidate b of every row t: [n], float32 or wider.

    hidden [rows, d] of any float dtype, weight [V, d]; gradients reach hidden, weight and bias.
    """
    logits: Tensor = _CandidateLogits.apply(hidden, weight, bias, supports.ids, supports.rows, supports.offsets)  # type: ignore[no-untyped-call]
    return logits
