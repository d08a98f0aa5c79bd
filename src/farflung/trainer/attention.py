"""Attention for packed sequences: several sequences lie in one row, and each token sees only its own sequence.

A pack may hold a prefix that several sequences begin with once: a sequence's own rows then attend to the rows of its
whole sequence, wherever they lie in the pack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

NAME = "farflung_packed"


@dataclass(frozen=True, slots=True)
class Layout:
    """The sequences of a pack in the order of their own rows, which cover the pack.

    own: rows that each sequence adds, all above 0; lengths: tokens of the whole sequence, own ones last. gather
    [sum of lengths] int64: the rows of every sequence's tokens, or None if nothing is shared, that is if the rows are in
    order. Masks are made once and serve every layer.
    """

    own: tuple[int, ...]
    lengths: tuple[int, ...]
    gather: Tensor | None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """0 where an own row sees a token of its sequence, else -inf: [own, length], or None for plain causal attention."""
        own, length = self.own[index], self.lengths[index]
        if window is not None and window >= length:
            window = None
        if own == length and window is None:
            return None
        if (index, window) not in self.masks:
            row = torch.arange(length - own, length, device=like.device)[:, None]
            column = torch.arange(length, device=like.device)
            hidden = column > row
            if window is not None:
                hidden |= column <= row - window
            self.masks[index, window] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self.masks[index, window]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, d], key and value [1, kv heads, rows, d].

    Returns [1, rows, heads, d]. Raises ValueError for what it cannot do (soft caps, sinks, masks, biases, dropout), which
    the model's check at loading turns into one pass per sequence.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if layout is None or attention_mask is not None or unknown or dropout or not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention needs a layout, causal and without mask, dropout or {unknown}")
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings have made query and key float32 again
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if _varlen is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen_attention(query, key, value, scaling, sliding_window, layout), None
    # Splits, not slices: the backward pass of a split is one concatenation.
    queries = torch.split(query, list(layout.own), 2)
    keys, values = (torch.split(_spread(states, layout), list(layout.lengths), 2) for states in (key, value))
    parts = []
    for index, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        mask = layout.mask(index, sliding_window, q)
        parts.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def _spread(states: Tensor, layout: Layout) -> Tensor:
    """Keys or values [1, heads, rows, d] as those of every whole sequence in turn: [1, heads, sum of lengths, d]."""
    if layout.gather is None:
        return states
    # By token, as projections leave them in memory: whole rows are copied.
    return states.transpose(1, 2).index_select(1, layout.gather).transpose(1, 2)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, layout: Layout
) -> Tensor:
    """All sequences in one kernel. With fewer queries than keys it aligns their ends, as own rows need."""
    out: Tensor = _varlen(  # type: ignore[misc]
        query[0].transpose(0, 1),
        _spread(key, layout)[0].transpose(0, 1),
        _spread(value, layout)[0].transpose(0, 1),
        _offsets(layout.own, query.device),
        _offsets(layout.lengths, query.device),
        max(layout.own),
        max(layout.lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return out[None]


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    offsets[1:] = torch.tensor(lengths, device=device).cumsum(0)
    return offsets


def _supported(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The kernel, if this torch has it with grouped heads and windows."""
    if function is None or not {"enable_gqa", "window_size"} <= set(inspect.signature(function).parameters):
        return None
    return function


_varlen = _supported(varlen_attn)
