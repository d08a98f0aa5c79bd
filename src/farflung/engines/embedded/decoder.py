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


class Decoder:
    """Computes with any Weights of one architecture. ``round_kv`` is applied to keys and values before they are used."""

    def __init__(
        self,
        architecture: Architecture,
        context: int,
        round_kv: Callable[[Tensor], Tensor] | None,
        device: torch.device,
    ) -> None:
        a = architecture
        self.architecture = a
        self._round_kv = round_kv
        self._rotations = a.rotations(context).to(device)
        # sqrt(mean(x^2) + eps) is hypot(|x|, sqrt(n eps)) / sqrt(n): two operations. The gains carry the sqrt(n).
        self._floor = torch.tensor(math.sqrt(a.width * a.norm_eps), device=device)
        self._head_floor = torch.tensor(math.sqrt(a.head_dim * a.norm_eps), device=device)

    def hidden(self, weights: Weights, ids: Tensor, positions: Tensor, attend: Attention) -> Tensor | None:
        """ids, positions [n] int64 -> the last layer's output [n, width], or None when ``attend`` ended the pass."""
        a = self.architecture
        x = F.embedding(ids, weights.embedding)
        rotations = self._rotations.index_select(0, positions).unsqueeze(1)
        for index, layer in enumerate(weights.layers):
            h = _rms_norm(x, layer.input_gain, self._floor)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(-1, a.heads + 2 * a.kv_heads, a.head_dim)
            qk = qkv[:, : a.heads + a.kv_heads]
            if layer.qk_gain is not None:
                qk.copy_(_rms_norm(qk, layer.qk_gain, self._head_floor))
            _rotate(qk, rotations)
            keys_values = qkv[:, a.heads :]
            if self._round_kv is not None:
                keys_values = self._round_kv(keys_values)
            attended = attend(index, qkv[:, : a.heads], keys_values)
            if attended is None:
                return None
            x.addmm_(attended, layer.output)
            if layer.output_bias is not None:
                x.add_(layer.output_bias)
            h = _rms_norm(x, layer.mlp_gain, self._floor)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x.addmm_(F.silu(gate).mul_(up), layer.down)
            if layer.down_bias is not None:
                x.add_(layer.down_bias)
        return x

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> [n, vocabulary] float32."""
        return F.linear(_rms_norm(hidden, weights.final_gain, self._floor), weights.head).float()


def _rms_norm(x: Tensor, gain: Tensor | None, floor: Tensor) -> Tensor:
    size = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32), floor)
    if gain is None:
        return x / size
    return (x / size).mul_(gain).to(x.dtype)


def _rotate(x: Tensor, rotations: Tensor) -> None:
    """Turn every pair of x [n, heads, head_dim] in place by rotations [n, 1, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    pairs.mul_(rotations)
    if x.dtype != torch.float32:
        x.copy_(torch.view_as_real(pairs).flatten(-2))
