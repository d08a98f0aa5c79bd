"""Weights on their way into the decoder: read, brought into the pool's format and out of it again, and fused.

No device at hand is assumed to compute in FP8 or FP4: codes and scales are made as the format has them, and are turned
back into numbers of the compute type once, here. What the model then computes is what the format can express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.engines.embedded.architecture import Architecture
from farflung.formats.selection import is_quantised
from farflung.formats.weights import quantise


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder's safetensors, by name, as BF16. Raises BadInput when files are missing."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        raise BadInput(
            "there is neither model.safetensors nor model.safetensors.index.json",
            where=str(folder),
            mend="save the model with save_pretrained",
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        except FileNotFoundError:
            raise BadInput("the index names this file, but it is missing", where=str(file)) from None
        except SafetensorError as error:
            raise BadInput(f"not a safetensors file: {error}", where=str(file)) from None
    return weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Projections are [in, out] in the compute type.

    Gains are norm weights times sqrt(width), float32; ``qk_gain`` is [heads + kv_heads, head_dim]. Where the compute type
    is float32, ``qkv`` and ``gate_up`` carry the gains (which are None then), and queries the 1 / sqrt(head_dim) of
    their scores.
    """

    input_gain: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_gain: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_gain: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy, ready to run. ``embedding`` and ``head`` are [vocabulary, width], one tensor if tied."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_gain: Tensor
    head: Tensor


def prepare(
    architecture: Architecture,
    given: Mapping[str, Tensor],
    format: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """Bring weights (Hugging Face names, [out, in]) into ``format`` and fuse them. Raises BadInput, naming the tensor."""
    a = architecture
    take = _Take(a, given, format, dtype, device)
    embedding = take.matrix("model.embed_tokens", a.vocabulary, a.width)
    head = embedding if a.tied else take.matrix("lm_head", a.vocabulary, a.width)
    layers = tuple(_layer(take, f"model.layers.{i}") for i in range(a.layers))
    return Weights(embedding, layers, take.gain("model.norm", a.width), head)


@dataclass(frozen=True, slots=True)
class _Take:
    """Takes tensors of ``given`` by name, checks their shape, and brings them into format, type and place."""

    architecture: Architecture
    given: Mapping[str, Tensor]
    format: WeightFormat
    dtype: torch.dtype
    device: torch.device

    def raw(self, name: str, *shape: int) -> Tensor:
        if name not in self.given:
            raise BadInput(f"the weights lack {name}", mend=f"publish all tensors of a {self.architecture.name}")
        tensor = self.given[name]
        if tensor.shape != shape:
            raise BadInput(f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}")
        return tensor.to(torch.bfloat16)

    def matrix(self, module: str, rows: int, columns: int) -> Tensor:
        name = f"{module}.weight"
        tensor = self.raw(name, rows, columns)
        if is_quantised(name):
            return quantise(tensor, self.format, name=name).dequantise(self.dtype).to(self.device)
        return tensor.to(self.device, self.dtype, copy=True)

    def bias(self, module: str, rows: int) -> Tensor | None:
        name = f"{module}.bias"
        return self.raw(name, rows).to(self.device, self.dtype, copy=True) if name in self.given else None

    def gain(self, module: str, size: int) -> Tensor:
        return (self.raw(f"{module}.weight", size).float() * math.sqrt(size)).to(self.device)


def _layer(take: _Take, at: str) -> Layer:
    a = take.architecture
    # bfloat16 has no digits to spare for the product of a weight and a gain.
    fold = take.dtype == torch.float32
    input_gain, mlp_gain = (take.gain(f"{at}.{n}_layernorm", a.width) for n in ("input", "post_attention"))
    qk_gain = None
    if a.qk_norm:
        q_gain, k_gain = (_interleave(take.gain(f"{at}.self_attn.{p}_norm", a.head_dim), a.head_dim) for p in "qk")
        qk_gain = torch.cat([q_gain.expand(a.heads, -1), k_gain.expand(a.kv_heads, -1)])
    modules = [f"{at}.self_attn.{p}_proj" for p in "qkv"]
    rows = [h * a.head_dim for h in (a.heads, a.kv_heads, a.kv_heads)]
    q, k, v = (take.matrix(m, n, a.width) for m, n in zip(modules, rows, strict=True))
    biases = [take.bias(m, n) for m, n in zip(modules, rows, strict=True)]
    qkv, qkv_bias = torch.cat([_interleave(q, a.head_dim), _interleave(k, a.head_dim), v]), None
    if biases[0] is not None and biases[1] is not None and biases[2] is not None:
        qkv_bias = torch.cat([_interleave(biases[0], a.head_dim), _interleave(biases[1], a.head_dim), biases[2]])
    gate_up = torch.cat([take.matrix(f"{at}.mlp.{p}_proj", a.mlp_width, a.width) for p in ("gate", "up")])
    gate_up_biases = [b for p in ("gate", "up") if (b := take.bias(f"{at}.mlp.{p}_proj", a.mlp_width)) is not None]
    if fold:
        qkv.mul_(input_gain)
        gate_up.mul_(mlp_gain)
        for scaled in (qkv, qkv_bias) if qk_gain is None else (qk_gain,):
            if scaled is not None:
                scaled[: rows[0] if qk_gain is None else a.heads] *= a.head_dim**-0.5
    return Layer(
        input_gain=None if fold else input_gain,
        qkv=qkv.t().contiguous(),
        qkv_bias=qkv_bias,
        qk_gain=qk_gain,
        output=take.matrix(f"{at}.self_attn.o_proj", a.width, rows[0]).t(),
        output_bias=take.bias(f"{at}.self_attn.o_proj", a.width),
        mlp_gain=None if fold else mlp_gain,
        gate_up=gate_up.t().contiguous(),
        gate_up_bias=torch.cat(gate_up_biases) if gate_up_biases else None,
        down=take.matrix(f"{at}.mlp.down_proj", a.width, a.mlp_width).t(),
        down_bias=take.bias(f"{at}.mlp.down_proj", a.width),
    )


def _interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Put rows i and i + head_dim / 2 of every head side by side, so that a rotation is one complex product.

    Scores are sums over a head's rows of q times k, so an order that both share changes nothing.
    """
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
