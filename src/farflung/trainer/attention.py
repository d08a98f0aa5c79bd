"""Attention for packed sequences: several sequences lie in one row, and each token sees only its own sequence.

A pack may hold a prefix that several sequences begin with once: a sequence's own rows then attend to the rows of its
path, which are its whole sequence in order, wherever they lie in the pack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
class Segment:
    """Rows start..stop of the pack are the tokens that a sequence adds; ``path`` [n] int64 are the rows of its tokens.

    ``path`` is None when the sequence shares nothing, that is when it is exactly start..stop.
    """

    start: int
    stop: int
    path: Tensor | None

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.stop - self.start if self.path is None else len(self.path)


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments of a pack; together they cover its rows in order. Masks are made once and serve every layer."""

    segments: tuple[Segment, ...]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, index: int, window: int | None, device: torch.device) -> Tensor | None:
        """Which of its sequence's tokens each own row sees, [own, length] bool, or None for plain causal attention."""
        segment = self.segments[index]
        length, own = segment.length, segment.stop - segment.start
        if window is not None and window >= length:
            window = None
        if segment.path is None and window is None:
            return None
        if (index, window) not in self.masks:
            row = torch.arange(length - own, length, device=device)[:, None]
            column = torch.arange(length, device=device)
            seen = column <= row
            self.masks[index, window] = seen if window is None else seen & (column > row - window)
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
    parts = []
    for index, segment in enumerate(layout.segments):
        rows = slice(segment.start, segment.stop)
        if segment.path is None:
            k, v = key[:, :, rows], value[:, :, rows]
        else:
            k, v = key.index_select(2, segment.path), value.index_select(2, segment.path)
        mask = layout.mask(index, sliding_window, query.device)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, rows], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, layout: Layout
) -> Tensor:
    """All segments in one kernel. With fewer queries than keys it aligns their ends, as the own rows of a path need."""
    device = query.device
    paths = [
        torch.arange(s.start, s.stop, device=device) if s.path is None else s.path for s in layout.segments
    ]  # fmt: skip
    gathered = torch.cat(paths)
    own = [s.stop - s.start for s in layout.segments]
    lengths = [s.length for s in layout.segments]
    out: Tensor = _varlen(  # type: ignore[misc]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1)[gathered],
        value[0].transpose(0, 1)[gathered],
        _offsets(own, device),
        _offsets(lengths, device),
        max(own),
        max(lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return out[None]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    offsets[1:] = torch.tensor(lengths, device=device).cumsum(0)
    return offsets


def _supported(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The kernel, if this torch has it with grouped heads and windows."""
    if function is None or not {"enable_gqa", "window_size"} <= set(inspect.signature(function).parameters):
        return None
    return function


_varlen = _supported(varlen_attn)
