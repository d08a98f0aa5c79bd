"""Logits of recorded candidates only: rows of the LM head are read where they lie, never a [tokens, vocabulary] product.

The backward pass writes as little. A weight's gradient is as large as the weight, and a support touches a few thousand of
its rows, so ``in_place`` adds those rows to ``weight.grad`` and makes no second matrix of that size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farflung.corrections.rows import add_bags, bags, dots
from farflung.corrections.supports import Supports


class _CandidateProducts(torch.autograd.Function):
    """hidden [N, d], weight [V, d], ids [n], offsets [N + 1] -> <hidden_t, weight_b> [n] in at least float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids, offsets)
        # The parameter itself: checkpointing gives saved tensors back as copies that have no gradient of their own.
        ctx.parameter = weight if in_place else None
        return dots(hidden, weight, ids, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """dhidden_t = sum of g_k W[id_k] over row t, dW[v] = sum of g_k hidden[row_k] over entries with id v."""
        hidden, weight, ids, offsets = ctx.saved_tensors
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = bags(weight, ids, offsets, grad).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            target, dweight = weight_gradient(weight, ctx.parameter)
            order = torch.argsort(ids, stable=True)
            used, counts = torch.unique_consecutive(ids[order], return_counts=True)
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            owner = torch.repeat_interleave(offsets.diff())
            add_bags(target, used, hidden, owner[order], ends, grad[order])
        return dhidden, dweight, None, None, None


def candidate_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    supports: Supports,
    *,
    softcap: float | None = None,
    in_place: bool = False,
) -> Tensor:
    """z = <hidden_t, weight_b> + bias_b for every candidate b of every row t: [n], float32 or wider.

    hidden [N, d] and weight [V, d] of any float types, bias [V]; supports has N rows, of which some may be empty: their
    hidden states are never read. Supports are trusted: those who call this check them first. ``softcap`` and ``in_place``
    are as in ``candidate_loss``.
    """
    logits: Tensor = _CandidateProducts.apply(  # type: ignore[no-untyped-call]
        hidden, weight, supports.ids, supports.offsets, in_place and takes_rows(weight)
    )
    if bias is not None:
        # Widened first: the backward pass adds up in the type of what is indexed, and thousands of rows share a token.
        logits = logits + bias.to(logits.dtype).index_select(0, supports.ids)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def takes_rows(weight: Tensor) -> bool:
    """Whether a gradient may go to ``weight.grad`` behind autograd's back: nobody waits for it on the way."""
    return (
        weight.is_leaf
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )


def weight_gradient(weight: Tensor, parameter: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(where to add the weight's gradient, what to return to autograd): the parameter's own, or a new one of zeros."""
    if parameter is None or (parameter.grad is not None and parameter.grad.layout != torch.strided):
        target = torch.zeros_like(weight)
        return target, target
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad, None
