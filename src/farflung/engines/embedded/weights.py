"""Weights on their way into the decoder: read, brought into the pool's format and out of it again, and fused.

A stream of weights holds BF16 tensors, which are quantised here, or codes and scales already (formats/checkpoint.py),
beside BF16 tensors that stay as they are. No device at hand is assumed to compute in FP8 or FP4: codes and scales are made as the format has them, and are turned
back into numbers of the compute type once, here. What the model then computes is what the format can express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.engines.embedded.architecture import Architecture
from farflung.formats.checkpoint import CODED, from_tensors
from farflung.formats.selection import Selection, is_quantised
from farflung.formats.weights import Quantised, quantise, refuse_nonfinite

NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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

    def copy(self) -> Layer:
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self.held().items()}
        return replace(self, **copies)

    def held(self) -> dict[str, Tensor]:
        """The tensors that are there, by field."""
        return {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy, ready to run. ``embedding`` and ``head`` are [vocabulary, width], one tensor if tied."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_gain: Tensor
    head: Tensor

    def copy(self) -> Weights:
        """The same numbers in memory of their own."""
        embedding = self.embedding.clone()
        head = embedding if self.head is self.embedding else self.head.clone()
        layers = tuple(layer.copy() for layer in self.layers)
        return Weights(embedding, layers, self.final_gain.clone(), head)

    @property
    def elements(self) -> int:
        """How many numbers this holds; a tied head counts once."""
        return sum(t.numel() for t in self.held())

    def held(self) -> list[Tensor]:
        """All tensors, each once."""
        head = [] if self.head is self.embedding else [self.head]
        return [self.embedding, self.final_gain, *head, *(t for layer in self.layers for t in layer.held().values())]


def let_go(weights: Weights) -> None:
    """Free the weights, of which the caller keeps no reference, a tensor at a time: no other thread runs meanwhile."""
    held = weights.held()
    del weights
    while held:
        held.pop()


def prepare(
    architecture: Architecture,
    given: Mapping[str, Tensor],
    format: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
    exclude: tuple[str, ...] = (),
) -> Weights:
    """Bring weights (Hugging Face names, [out, in]) into ``format`` and fuse them. Raises BadInput, naming the tensor.

    exclude: glob patterns of weights that stay BF16, where all of them come so.
    """
    return Intake(architecture, given, format, dtype, device, Selection(exclude)).weights()


@dataclass(frozen=True, slots=True)
class Part:
    """A projection's place in a matrix. interleaved: the order of its rows, see ``interleave``; factor: what they carry."""

    module: str
    rows: int
    interleaved: bool = False
    factor: float | None = None

    @property
    def name(self) -> str:
        return f"{self.module}.weight"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Projections one below the other, [out, columns] in all; its columns carry the gain of ``norm``, if any."""

    parts: tuple[Part, ...]
    columns: int
    norm: str | None = None


def layer_matrices(a: Architecture, at: str, dtype: torch.dtype) -> dict[str, Matrix]:
    """What the matrices of the layer ``at`` ("model.layers.0") are made of, by their fields of Layer."""
    # bfloat16 has no digits to spare for the product of a weight and a gain.
    fold = dtype == torch.float32
    input_norm, mlp_norm = (f"{at}.{n}_layernorm" if fold else None for n in ("input", "post_attention"))
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = (
        Part(f"{at}.self_attn.q_proj", queries, True, a.head_dim**-0.5 if fold and not a.qk_norm else None),
        Part(f"{at}.self_attn.k_proj", keys, True),
        Part(f"{at}.self_attn.v_proj", keys),
    )
    return {
        "qkv": Matrix(qkv, a.width, input_norm),
        "output": Matrix((Part(f"{at}.self_attn.o_proj", a.width),), queries),
        "gate_up": Matrix(tuple(Part(f"{at}.mlp.{p}_proj", a.mlp_width) for p in ("gate", "up")), a.width, mlp_norm),
        "down": Matrix((Part(f"{at}.mlp.down_proj", a.width),), a.mlp_width),
    }


def outer_matrices(a: Architecture) -> dict[str, Matrix]:
    """The same of the matrices outside the layers, by their fields of Weights."""
    modules = {"embedding": "model.embed_tokens"} | ({} if a.tied else {"head": "lm_head"})
    return {field: Matrix((Part(module, a.vocabulary),), a.width) for field, module in modules.items()}


@dataclass(frozen=True)
class Intake:
    """Takes tensors of ``given`` by name, checks them, and brings them into format, type and place."""

    architecture: Architecture
    given: Mapping[str, Tensor]
    format: WeightFormat
    dtype: torch.dtype
    device: torch.device
    selection: Selection

    def weights(self) -> Weights:
        a = self.architecture
        outer = {field: self.matrix(matrix) for field, matrix in outer_matrices(a).items()}
        layers = tuple(self._layer(f"model.layers.{i}") for i in range(a.layers))
        embedding = outer["embedding"]
        return Weights(embedding, layers, self.gain("model.norm", a.width), outer.get("head", embedding))

    def is_coded(self, name: str) -> bool:
        """Whether this weight comes as codes and scales."""
        return is_quantised(name) and name in self.given and self.given[name].dtype in CODED

    def is_quantised_here(self, name: str) -> bool:
        """Whether this weight comes in BF16 and is to be quantised. Beside codes, BF16 tensors stay as they are."""
        return self.format != "bf16" and self.selection.takes(name) and not self._has_codes

    def is_packed(self, name: str) -> bool:
        """Whether a byte of this tensor holds two codes."""
        return self.is_coded(name) and self.given[name].dtype == torch.uint8

    @cached_property
    def _has_codes(self) -> bool:
        return any(map(self.is_coded, self.given))

    def raw(self, name: str, *shape: int) -> Tensor:
        if name not in self.given:
            raise BadInput(f"the weights lack {name}", mend=f"publish all tensors of a {self.architecture.name}")
        tensor = self.given[name]
        if tensor.shape != shape:
            raise BadInput(f"{name} has shape {list(tensor.shape)}, the configuration says {list(shape)}")
        if tensor.dtype not in NUMBERS:
            raise BadInput(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be bfloat16")
        return tensor.to(torch.bfloat16)

    def coded(self, part: Part, columns: int) -> Quantised:
        return from_tensors(self.given, part.name, self.format, part.rows, columns)

    def matrix(self, matrix: Matrix) -> Tensor:
        """[out, in], in memory of its own."""
        fused = [self._part(part, matrix.columns) for part in matrix.parts]
        whole = fused[0] if len(fused) == 1 else torch.cat(fused)
        if matrix.norm is not None:
            whole.mul_(self.gain(matrix.norm, matrix.columns))
        first = 0
        for part in matrix.parts:
            if part.factor is not None:
                whole[first : first + part.rows] *= part.factor
            first += part.rows
        return whole

    def _part(self, part: Part, columns: int) -> Tensor:
        name = part.name
        if self.is_coded(name):
            values = self.coded(part, columns).dequantise(self.dtype).to(self.device).contiguous()
        elif self.is_quantised_here(name):
            quantised = quantise(self.raw(name, part.rows, columns), self.format, name=name)
            values = quantised.dequantise(self.dtype).to(self.device).contiguous()
        else:
            values = self.raw(name, part.rows, columns).to(self.device, self.dtype, copy=True)
        if is_quantised(name):
            refuse_nonfinite(torch.stack(values.aminmax()), name)
        return interleave(values, self.architecture.head_dim) if part.interleaved else values

    def gain(self, module: str, size: int) -> Tensor:
        return (self.raw(f"{module}.weight", size).float() * math.sqrt(size)).to(self.device)

    def vectors(self, at: str) -> dict[str, Tensor | None]:
        """Gains and biases of the layer ``at``, by their fields of Layer."""
        a, fold = self.architecture, self.dtype == torch.float32
        qk_gain = None
        if a.qk_norm:
            q_gain, k_gain = (interleave(self.gain(f"{at}.self_attn.{p}_norm", a.head_dim), a.head_dim) for p in "qk")
            qk_gain = torch.cat([q_gain.expand(a.heads, -1), k_gain.expand(a.kv_heads, -1)])
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        q, k, v = (
            self._bias(f"{at}.self_attn.{p}_proj", rows) for p, rows in zip("qkv", (queries, keys, keys), strict=True)
        )
        qkv_bias = None
        if q is not None and k is not None and v is not None:
            qkv_bias = torch.cat([interleave(q, a.head_dim), interleave(k, a.head_dim), v])
        if fold and qk_gain is not None:
            qk_gain[: a.heads] *= a.head_dim**-0.5
        elif fold and qkv_bias is not None:
            qkv_bias[:queries] *= a.head_dim**-0.5
        gate_up = [b for p in ("gate", "up") if (b := self._bias(f"{at}.mlp.{p}_proj", a.mlp_width)) is not None]
        return {
            "input_gain": None if fold else self.gain(f"{at}.input_layernorm", a.width),
            "qkv_bias": qkv_bias,
            "qk_gain": qk_gain,
            "output_bias": self._bias(f"{at}.self_attn.o_proj", a.width),
            "mlp_gain": None if fold else self.gain(f"{at}.post_attention_layernorm", a.width),
            "gate_up_bias": torch.cat(gate_up) if gate_up else None,
            "down_bias": self._bias(f"{at}.mlp.down_proj", a.width),
        }

    def _bias(self, module: str, rows: int) -> Tensor | None:
        name = f"{module}.bias"
        return self.raw(name, rows).to(self.device, self.dtype, copy=True) if name in self.given else None

    def _layer(self, at: str) -> Layer:
        made = {
            field: self.matrix(matrix).t()
            for field, matrix in layer_matrices(self.architecture, at, self.dtype).items()
        }
        vectors = self.vectors(at)
        return Layer(
            input_gain=vectors["input_gain"],
            qkv=made["qkv"].contiguous(),
            qkv_bias=vectors["qkv_bias"],
            qk_gain=vectors["qk_gain"],
            output=made["output"],
            output_bias=vectors["output_bias"],
            mlp_gain=vectors["mlp_gain"],
            gate_up=made["gate_up"].contiguous(),
            gate_up_bias=vectors["gate_up_bias"],
            down=made["down"],
            down_bias=vectors["down_bias"],
        )


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Put rows i and i + head_dim / 2 of every head side by side, so that a rotation is one complex product.

    Scores are sums over a head's rows of q times k, so an order that both share changes nothing.
    """
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
