"""Weights on their way into the decoder: read, brought into the pool's format and out of it again, and fused.

No device at hand is assumed to compute in FP8 or FP4: codes and scales are made as the format has them, and are turned
back into numbers of the compute type once, here. What the model then computes is what the format can express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
    """One decoder layer. Projections are [in, out] in the compute type. Rows of ``output`` are ordered by
    (head within its group, group): the order in which attention over grouped heads leaves its result in memory.

    Gains are norm weights times sqrt(width), float32; where the compute type is float32, ``qkv`` and ``gate_up`` carry
    them in their columns instead, and the gain is None. ``qk_gain`` is [heads + kv_heads, head_dim].
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

    def raw(name: str, *shape: int) -> Tensor:
        if name not in given:
            raise BadInput(f"the weights lack {name}", mend=f"publish all tensors of a {a.name}")
        if given[name].shape != shape:
            raise BadInput(f"{name} has shape {list(given[name].shape)}, the configuration says {list(shape)}")
        return given[name].to(torch.bfloat16)

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        tensor = raw(name, rows, columns)
        if is_quantised(name):
            return quantise(tensor, format, name=name).dequantise(dtype)
        return tensor.to(dtype, copy=True)

    def fused(
        names: tuple[str, ...], rows: tuple[int, ...], gain: Tensor | None, turn: Callable[[Tensor, int], Tensor] | None
    ) -> Tensor:
        parts = [matrix(f"{name}.weight", r, a.width) for name, r in zip(names, rows, strict=True)]
        stacked = _stack(parts, turn).to(device)
        return (stacked if gain is None else stacked.mul_(gain)).t().contiguous()

    def bias(
        names: tuple[str, ...], rows: tuple[int, ...], turn: Callable[[Tensor, int], Tensor] | None
    ) -> Tensor | None:
        if f"{names[0]}.bias" not in given:
            return None
        parts = [raw(f"{name}.bias", r).to(dtype) for name, r in zip(names, rows, strict=True)]
        return _stack(parts, turn).to(device)

    def gain(name: str, size: int) -> Tensor:
        return (raw(name, size).float() * math.sqrt(size)).to(device)

    def interleave(tensor: Tensor, part: int) -> Tensor:
        return tensor if part == 2 else _interleave(tensor, a.head_dim)

    q_rows, kv_rows = a.heads * a.head_dim, a.kv_heads * a.head_dim
    layers = []
    for i in range(a.layers):
        at = f"model.layers.{i}"
        qkv = tuple(f"{at}.self_attn.{p}_proj" for p in "qkv")
        gate_up = (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
        out, down = f"{at}.self_attn.o_proj", f"{at}.mlp.down_proj"
        qk_gain = None
        if a.qk_norm:
            q_gain = _interleave(gain(f"{at}.self_attn.q_norm.weight", a.head_dim), a.head_dim)
            k_gain = _interleave(gain(f"{at}.self_attn.k_norm.weight", a.head_dim), a.head_dim)
            qk_gain = torch.cat([q_gain.expand(a.heads, -1), k_gain.expand(a.kv_heads, -1)])
        input_gain = gain(f"{at}.input_layernorm.weight", a.width)
        mlp_gain = gain(f"{at}.post_attention_layernorm.weight", a.width)
        # bfloat16 has no digits to spare for the product of a weight and a gain.
        fold = dtype == torch.float32
        layers.append(
            Layer(
                input_gain=None if fold else input_gain,
                qkv=fused(qkv, (q_rows, kv_rows, kv_rows), input_gain if fold else None, interleave),
                qkv_bias=bias(qkv, (q_rows, kv_rows, kv_rows), interleave),
                qk_gain=qk_gain,
                output=_group_last(matrix(f"{out}.weight", a.width, q_rows), a).to(device).t(),
                output_bias=bias((out,), (a.width,), None),
                mlp_gain=None if fold else mlp_gain,
                gate_up=fused(gate_up, (a.mlp_width, a.mlp_width), mlp_gain if fold else None, None),
                gate_up_bias=bias(gate_up, (a.mlp_width, a.mlp_width), None),
                down=matrix(f"{down}.weight", a.width, a.mlp_width).to(device).t(),
                down_bias=bias((down,), (a.width,), None),
            )
        )
    embedding = matrix("model.embed_tokens.weight", a.vocabulary, a.width).to(device)
    head = embedding if a.tied else matrix("lm_head.weight", a.vocabulary, a.width).to(device)
    return Weights(embedding, tuple(layers), gain("model.norm.weight", a.width), head)


def _stack(parts: list[Tensor], turn: Callable[[Tensor, int], Tensor] | None) -> Tensor:
    return torch.cat([turn(part, i) for i, part in enumerate(parts)] if turn else parts)


def _group_last(output: Tensor, a: Architecture) -> Tensor:
    """Columns from (group, head within it) to (head within its group, group); a group shares one key-value head."""
    return output.view(a.width, a.kv_heads, -1, a.head_dim).transpose(1, 2).flatten(1).contiguous()


def _interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Put rows i and i + head_dim / 2 of every head side by side, so that a rotation is one complex product.

    Scores are sums over a head's rows of q times k, so an order that both share changes nothing.
    """
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
