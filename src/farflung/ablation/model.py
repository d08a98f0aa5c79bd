"""A Llama-like decoder that computes several sets of weights side by side: one per pool for sampling, one for training.

Weights are named as in a Hugging Face checkpoint, so that what a pool's format covers is decided by the same rule as
anywhere else. Every tensor has a leading dimension, the copies: [1, ...] in the trainer, [pools, ...] in the samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.ablation.recipe import ModelConfig

Weights = Mapping[str, Tensor]
Rounding = Callable[[Tensor], Tensor]

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp: int

    @staticmethod
    def of(model: ModelConfig, vocabulary: int) -> Shape:
        return Shape(vocabulary, model.width, model.layers, model.heads, model.mlp)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name, without the leading dimension."""
        width, mlp = self.width, self.mlp
        named: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, width)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            named[f"{at}.input_layernorm.weight"] = (width,)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                named[f"{at}.self_attn.{name}.weight"] = (width, width)
            named[f"{at}.post_attention_layernorm.weight"] = (width,)
            named[f"{at}.mlp.gate_proj.weight"] = (mlp, width)
            named[f"{at}.mlp.up_proj.weight"] = (mlp, width)
            named[f"{at}.mlp.down_proj.weight"] = (width, mlp)
        return named | {"model.norm.weight": (width,), HEAD: (self.vocabulary, width)}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


class Cache:
    """Keys and values so far, [layers][copies, n, 2, heads, positions, head_dim], each rounded once as it comes in."""

    def __init__(self, shape: Shape, copies: int, rows: int, positions: int, round: Rounding) -> None:
        self.length = 0
        self._round = round
        size = (copies, rows, 2, shape.heads, positions, shape.width // shape.heads)
        self._layers = [torch.empty(size) for _ in range(shape.layers)]

    def extend(self, layer: int, fresh: Tensor) -> Tensor:
        """Store the newest keys and values of a layer; all of them up to now."""
        end = self.length + fresh.shape[4]
        kept = self._layers[layer]
        kept[..., self.length : end, :] = self._round(fresh)
        return kept[..., :end, :]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of each copy, [copies, n]."""
        copies = torch.arange(len(rows))[:, None]
        self._layers = [layer[copies, rows] for layer in self._layers]


def initial(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh weights, one copy: gains of one, matrices with a variance of 1 / inputs."""
    return {
        name: torch.ones(1, *size)
        if len(size) == 1
        else torch.randn(1, *size, generator=generator) / math.sqrt(size[-1])
        for name, size in shape.tensors.items()
    }


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's tensors, with the projections of one input in one matrix, [copies, out, in]."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights made ready to compute; gradients flow back to them."""

    shape: Shape
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @staticmethod
    def of(weights: Weights, shape: Shape) -> Decoder:
        def layer(at: str) -> Layer:
            return Layer(
                norm=weights[f"{at}.input_layernorm.weight"],
                qkv=torch.cat([weights[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv"], 1),
                out=weights[f"{at}.self_attn.o_proj.weight"],
                mlp_norm=weights[f"{at}.post_attention_layernorm.weight"],
                gate_up=torch.cat([weights[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")], 1),
                down=weights[f"{at}.mlp.down_proj.weight"],
            )

        layers = tuple(layer(f"model.layers.{number}") for number in range(shape.layers))
        return Decoder(shape, weights[EMBEDDING], layers, weights["model.norm.weight"], weights[HEAD])

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """ids [copies, n, t] -> hidden states after the last norm, [copies, n, t, width].

        Without a cache the positions are 0 .. t. With one they follow what it holds: a first call of any t, then one by one.
        """
        copies, _, count = ids.shape
        past = cache.length if cache else 0
        heads = self.shape.heads
        offsets = torch.arange(copies).view(-1, 1, 1) * self.shape.vocabulary
        x = F.embedding(ids + offsets, self.embedding.flatten(0, 1))
        turn = _rotation(past, count, self.shape.width // heads)
        for number, layer in enumerate(self.layers):
            parts = _linear(_norm(x, layer.norm), layer.qkv).view(*ids.shape, 3, heads, -1)
            query, key, value = parts.permute(3, 0, 1, 4, 2, 5)  # each [copies, n, heads, t, head_dim]
            query, key = _rotate(query, turn), _rotate(key, turn)
            if cache is not None:
                key, value = cache.extend(number, torch.stack([key, value], 2)).unbind(2)
            mixed = F.scaled_dot_product_attention(
                query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), is_causal=past == 0
            )
            x = x + _linear(mixed.transpose(1, 2).reshape(*ids.shape, -1), layer.out)
            gate, up = _linear(_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer.down)
        if cache is not None:
            cache.length += count
        return _norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[copies, n, t, width] -> [copies, n, t, vocabulary]."""
        return _linear(hidden, self.head)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [copies, n, t, in], weight [copies, out, in] -> [copies, n, t, out]."""
    return torch.bmm(x.flatten(1, 2), weight.mT).view(*x.shape[:3], -1)


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * gain[:, None, None]


def _rotation(start: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, [count, size / 2] each."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angle = torch.arange(start, start + count)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
