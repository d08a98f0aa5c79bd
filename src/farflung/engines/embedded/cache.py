"""Keys and values: of the rows that decode now, of a sequence that is being read, and of sessions that wait."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.core.supports import Int32, Int64
from farflung.engines.embedded.architecture import Architecture

_STEP = 16
"""Decoding attends to a multiple of this many positions, so that views of the cache last for several tokens."""


def kv_shape(a: Architecture, length: int) -> tuple[int, int, int, int, int]:
    """Of one sequence: [layers, 2 (keys, values), kv_heads, length, head_dim]."""
    return a.layers, 2, a.kv_heads, length, a.head_dim


@dataclass(frozen=True, slots=True)
class Stored:
    """A waiting session: ids [n] and their keys and values ``kv_shape(n)``."""

    ids: Int32
    kv: Tensor


def attention_scale(a: Architecture, dtype: torch.dtype) -> float:
    """What is left to multiply scores by: in float32, the weights of the queries carry 1 / sqrt(head_dim)."""
    return 1.0 if dtype == torch.float32 else a.head_dim**-0.5


class IdleSessions:
    """Keys and values between the turns of sessions, least recently used out first beyond ``budget`` bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._sessions: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, session: str, stored: Stored) -> None:
        self.drop(session)
        self._sessions[session] = stored
        self._bytes += stored.kv.nbytes
        while self._bytes > self._budget:
            self.drop(next(iter(self._sessions)))

    def take(self, session: str, ids: Int32) -> Stored | None:
        """Remove the session and return what it shares with ``ids``, less the last id, whose output is still to come."""
        stored = self._sessions.get(session)
        if stored is None:
            return None
        self.drop(session)
        n = min(len(stored.ids), len(ids) - 1)
        differ = np.flatnonzero(stored.ids[:n] != ids[:n])
        shared = int(differ[0]) if len(differ) else n
        return Stored(stored.ids[:shared], stored.kv[:, :, :, :shared]) if shared else None

    def drop(self, session: str) -> None:
        stored = self._sessions.pop(session, None)
        if stored is not None:
            self._bytes -= stored.kv.nbytes

    def clear(self) -> None:
        self._sessions.clear()
        self._bytes = 0


class RowCache:
    """Keys and values of up to ``rows`` decoding sequences, packed: the active ones are the first rows.

    ``attend`` serves one decoding step: ``begin`` fixes rows and positions, then every layer stores one token per row and
    attends. Sequences of different length share a mask that hides what lies behind each one's end.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._a = architecture
        self._dtype, self._device = dtype, device
        self._scale = attention_scale(architecture, dtype)
        # On a CPU two plain products beat the fused kernel by far when every head has a query or two.
        self._plain = dtype == torch.float32 and device.type == "cpu"
        self._rows, self._length = 0, 0
        self._kv = torch.zeros(0)
        self._mask = torch.zeros(0)
        self._flat: list[Tensor] = []
        self._seen = (0, 0)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask_view = torch.zeros(0)
        self._index, self._places = torch.zeros(0), torch.zeros(0)
        self._written = True

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` sequences of ``length`` tokens; grows by doubling, and never shrinks."""
        if rows <= self._rows and length <= self._length:
            return
        a = self._a
        old, old_mask, old_rows, old_length = self._kv, self._mask, self._rows, self._length
        self._rows = max(rows, 2 * old_rows) if rows > old_rows else old_rows
        self._length = max(-(-length // 256) * 256, 2 * old_length) if length > old_length else old_length
        # Zeros, not garbage: a masked score times NaN would be NaN.
        shape = (a.layers, 2, self._rows, a.kv_heads, self._length, a.head_dim)
        self._kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        mask_shape = (self._rows, a.kv_heads, self._length)
        self._mask = torch.full(mask_shape, -torch.inf, dtype=self._dtype, device=self._device)
        if old_rows:
            self._kv[:, :, :old_rows, :, :old_length] = old
            self._mask[:old_rows, :, :old_length] = old_mask
        self._flat = [layer.view(-1, a.head_dim) for layer in self._kv]
        self._flat_mask = self._mask.view(-1)
        # Where each row's heads start in a layer: [rows, 2 kv_heads], keys first; the first half also in the mask.
        heads = (np.arange(self._rows)[:, None] * a.kv_heads + np.arange(a.kv_heads)) * self._length
        self._slots = np.concatenate([heads, heads + self._rows * a.kv_heads * self._length], 1)
        self._seen, self._written = (0, 0), True

    def write(self, row: int, kv: Tensor) -> None:
        """Set a row to a sequence's keys and values, ``kv_shape(n)``."""
        length = kv.shape[3]
        self._written = True
        self._kv[:, :, row, :, :length] = kv
        self._mask[row].fill_(-torch.inf)
        self._mask[row, :, :length] = 0

    def read(self, row: int, length: int) -> Tensor:
        """A view of a row's first ``length`` tokens, ``kv_shape(length)``."""
        return self._kv[:, :, row, :, :length]

    def begin(self, lengths: Int64) -> None:
        """lengths [n]: tokens that each of the first n rows holds already; the next one is stored behind them.

        As long as no row is written and n stays, every call means one token more per row.
        """
        n, extent = len(lengths), -(-(int(lengths.max()) + 1) // _STEP) * _STEP
        if self._written or self._seen[0] != n:
            slots = self._slots[:n] + lengths[:, None]
            self._index = torch.from_numpy(slots.reshape(-1)).to(self._device)
            self._places = torch.from_numpy(slots[:, : self._a.kv_heads].flatten()).to(self._device)
            self._written = False
        else:
            self._index.add_(1)
            self._places.add_(1)
        if self._seen != (n, extent):
            self._view(n, extent)
            self._seen = (n, extent)
        self._flat_mask.index_fill_(0, self._places, 0.0)

    def _view(self, n: int, extent: int) -> None:
        """Views of the first n rows and ``extent`` tokens of every layer, as ``attend`` wants them."""
        a = self._a
        if self._plain:
            heads = n * a.kv_heads
            parts = [layer.view(2, -1, self._length, a.head_dim)[:, :heads, :extent] for layer in self._kv]
            self._keys = [part[0].transpose(1, 2) for part in parts]
            mask = self._mask.view(-1, 1, self._length)[:heads, :, :extent]
            self._mask_view = mask.expand(-1, a.heads // a.kv_heads, -1)
        else:
            parts = [layer[:, :n, :, :extent] for layer in self._kv]
            self._keys = [part[0] for part in parts]
            self._mask_view = self._mask[:n, :, None, :extent]
        self._values = [part[1] for part in parts]

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        a, n = self._a, len(queries)
        self._flat[layer].index_copy_(0, self._index, keys_values.reshape(-1, a.head_dim))
        # A group's queries share a key-value head: they take the place of a query's length, and nothing is repeated.
        group = a.heads // a.kv_heads
        if self._plain:
            scores = torch.baddbmm(self._mask_view, queries.reshape(-1, group, a.head_dim), self._keys[layer])
            return torch.bmm(torch.softmax(scores, -1), self._values[layer]).view(n, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries.view(n, a.kv_heads, group, a.head_dim),
            self._keys[layer],
            self._values[layer],
            attn_mask=self._mask_view,
            scale=self._scale,
        )
        return out.reshape(n, -1)


class Reading:
    """Attention of one pass over the new parts of several sequences, laid end to end; only keys and values come of it."""

    def __init__(self, architecture: Architecture, parts: list[tuple[Tensor, int, int]]) -> None:
        """parts: each sequence's store ``kv_shape(room)``, how many tokens it holds, how many are added now."""
        self._a, self._parts = architecture, parts
        self._scale = attention_scale(architecture, parts[0][0].dtype)
        self._masks = [_causal(kv, held, added) for kv, held, added in parts]

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor | None:
        a = self._a
        outputs: list[Tensor] = []
        start = 0
        for (kv, held, added), mask in zip(self._parts, self._masks, strict=True):
            stop, end = start + added, held + added
            kv[layer, :, :, held:end] = keys_values[start:stop].view(added, 2, a.kv_heads, -1).permute(1, 2, 0, 3)
            if layer < a.layers - 1:
                # [kv_heads, group, added, head_dim] against keys that a group shares by a stride of zero.
                group = a.heads // a.kv_heads
                grouped = queries[start:stop].view(added, a.kv_heads, group, a.head_dim).permute(1, 2, 0, 3)
                shape = (a.kv_heads, group, end, a.head_dim)
                keys, values = (part[:, None, :end].expand(shape) for part in kv[layer])
                out = torch.nn.functional.scaled_dot_product_attention(
                    grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scale
                )
                outputs.append(out.permute(2, 0, 1, 3).reshape(added, -1))
            start = stop
        return torch.cat(outputs) if outputs else None


def _causal(kv: Tensor, held: int, added: int) -> Tensor | None:
    """What each new token may see, [added, held + added]: 0 or -inf. None when nothing was held: plain causal order."""
    if held == 0:
        return None
    mask = torch.full((added, held + added), -torch.inf, dtype=kv.dtype, device=kv.device)
    return mask.triu_(held + 1)
