"""The forward pass of a Llama or Qwen3 decoder over a flat row of tokens; where keys and values lie is the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.weights import Weights


class Attention(Protocol):
    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor | None:
        """Store keys_values [n, 2 kv_heads, head_dim] (keys first), attend with queries [n, heads, head_dim].

        Returns [n, heads * head_dim], or None when nothing after this layer is of interest.
        """
        ...


class Workspace:
    """Buffers of a pass and the views of them that a layer works on, so that a layer makes neither.

    x [n, width] is the residual stream, h [n, width] its normed copy, q [n, heads, head_dim], kv [n, 2 kv_heads,
    head_dim] and qk [n, heads + kv_heads, head_dim] parts of qkv, ``pairs`` qk as complex numbers (float32 only), gate
    and up [n, mlp_width] halves of gate_up. Behind x stands a column that holds sqrt(width eps): the norm of both is
    sqrt(|x|^2 + width eps), which is what an RMS norm divides by, but for a factor sqrt(width) that the gains carry.
    """

    def __init__(self, a: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._a, self._dtype, self._device = a, dtype, device
        self._rows, self._n = 0, 0

    def fit(self, n: int) -> None:
        """Make all views n rows long."""
        if n == self._n:
            return
        if n > self._rows:
            self._allocate(max(n, 2 * self._rows))
        a, heads = self._a, self._a.heads
        self._n = n
        self.x, self.x_and_floor = self._stream[:n, : a.width], self._stream[:n, : a.width + 1]
        self.h, self.size = self._h[:n], self._size[:n]
        self.qkv, self.gate_up = self._qkv[:n], self._gate_up[:n]
        split = self.qkv.view(n, heads + 2 * a.kv_heads, a.head_dim)
        self.q, self.kv, self.qk = split[:, :heads], split[:, heads:], split[:, : heads + a.kv_heads]
        if self._dtype == torch.float32:
            self.pairs = torch.view_as_complex(self.qk.view(n, heads + a.kv_heads, -1, 2))
        self.gate, self.up = self.gate_up.chunk(2, -1)

    def _allocate(self, rows: int) -> None:
        a = self._a

        def buffer(columns: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=self._device)

        self._rows = rows
        self._stream = buffer(a.width + 16)
        self._stream[:, a.width] = math.sqrt(a.width * a.norm_eps)
        self._h, self._size = buffer(a.width), buffer(1, torch.float32)
        self._qkv = buffer((a.heads + 2 * a.kv_heads) * a.head_dim)
        self._gate_up = buffer(2 * a.mlp_width)


class Decoder:
    """Computes with any Weights of one architecture. ``round_kv`` is applied to keys and values before they are used."""

    def __init__(
        self,
        architecture: Architecture,
        context: int,
        round_kv: Callable[[Tensor], Tensor] | None,
        device: torch.device,
    ) -> None:
        self.architecture = architecture
        self._round_kv = round_kv
        self._rotations = architecture.rotations(context).to(device)
        self._head_floor = torch.tensor(math.sqrt(architecture.head_dim * architecture.norm_eps), device=device)

    def hidden(
        self, weights: Weights, ids: Tensor, positions: Tensor, attend: Attention, workspace: Workspace
    ) -> Tensor | None:
        """ids, positions [n] int64 -> the last layer's output [n, width] in the workspace, or None when ``attend`` ended
        the pass."""
        w = workspace
        w.fit(len(ids))
        x = w.x
        x.copy_(F.embedding(ids, weights.embedding))
        rotations = self._rotations.index_select(0, positions).unsqueeze(1)
        for index, layer in enumerate(weights.layers):
            _norm(w, layer.input_gain)
            torch.mm(w.h, layer.qkv, out=w.qkv)
            if layer.qkv_bias is not None:
                w.qkv.add_(layer.qkv_bias)
            if layer.qk_gain is not None:
                self._norm_heads(w.qk, layer.qk_gain)
            _rotate(w, rotations)
            attended = attend(index, w.q, w.kv if self._round_kv is None else self._round_kv(w.kv))
            if attended is None:
                return None
            x.addmm_(attended, layer.output)
            if layer.output_bias is not None:
                x.add_(layer.output_bias)
            _norm(w, layer.mlp_gain)
            torch.mm(w.h, layer.gate_up, out=w.gate_up)
            if layer.gate_up_bias is not None:
                w.gate_up.add_(layer.gate_up_bias)
            F.silu(w.gate, inplace=True).mul_(w.up)
            x.addmm_(w.gate, layer.down)
            if layer.down_bias is not None:
                x.add_(layer.down_bias)
        return x

    def logits(self, weights: Weights, workspace: Workspace) -> Tensor:
        """What ``hidden`` left in the workspace -> [n, vocabulary] float32."""
        _norm(workspace, weights.final_gain)
        return F.linear(workspace.h, weights.head).float()

    def _norm_heads(self, qk: Tensor, gain: Tensor) -> None:
        size = torch.hypot(torch.linalg.vector_norm(qk, 2, -1, True, dtype=torch.float32), self._head_floor)
        if qk.dtype == torch.float32:
            qk.div_(size).mul_(gain)
        else:
            qk.copy_((qk / size).mul_(gain))


def _norm(w: Workspace, gain: Tensor | None) -> None:
    """h = RMS norm of x."""
    torch.linalg.vector_norm(w.x_and_floor, 2, -1, True, dtype=torch.float32, out=w.size)
    if w.h.dtype == torch.float32:
        torch.div(w.x, w.size, out=w.h)
        if gain is not None:
            w.h.mul_(gain)
    else:
        y = w.x / w.size
        w.h.copy_(y if gain is None else y.mul_(gain))


def _rotate(w: Workspace, rotations: Tensor) -> None:
    """Turn every pair of queries and keys in place by rotations [n, 1, head_dim / 2]."""
    if w.qk.dtype == torch.float32:
        w.pairs.mul_(rotations)
    else:
        pairs = torch.view_as_complex(w.qk.float().view(*w.qk.shape[:-1], -1, 2)).mul_(rotations)
        w.qk.copy_(torch.view_as_real(pairs).flatten(-2))
