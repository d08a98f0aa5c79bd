"""Streams of versions of tiny random models, as a trainer publishes them, without transformers and without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from farflung.core.sampling import WeightFormat
from farflung.engines.base import Positions
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.weights import Weights
from farflung.formats.checkpoint import to_tensors
from farflung.formats.selection import Selection
from farflung.formats.weights import Quantised, quantise


def architecture(*, tied: bool = True, qk_norm: bool = False) -> Architecture:
    """Sizes that leave edges: heads that share keys, inputs that fill no block of 16 or 32, an MLP wider than a block of 128."""
    return Architecture.parse(
        {
            "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"], "hidden_size": 24, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 136, "num_hidden_layers": 2,
            "vocab_size": 40, "tie_word_embeddings": tied, "max_position_embeddings": 64,
        }
    )  # fmt: skip


@dataclass
class Trainer:
    """Holds a random model in BF16 and publishes it in a format, or in BF16 when ``coded`` is false."""

    architecture: Architecture
    format: WeightFormat
    coded: bool
    biased: bool = False
    exclude: tuple[str, ...] = ()
    seed: int = 0
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self._published: dict[str, Quantised] = {}
        a, q, k = self.architecture, self.architecture.heads * 8, self.architecture.kv_heads * 8
        self.weights = {}
        self._add("model.embed_tokens", a.vocabulary, a.width)
        if not a.tied:
            self._add("lm_head", a.vocabulary, a.width)
        for i in range(a.layers):
            at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            for part, out, inputs in (("q", q, a.width), ("k", k, a.width), ("v", k, a.width), ("o", a.width, q)):
                self._add(f"{at}.{part}_proj", out, inputs)
            for part, out, inputs in (
                ("gate", a.mlp_width, a.width), ("up", a.mlp_width, a.width), ("down", a.width, a.mlp_width),
            ):  # fmt: skip
                self._add(f"{mlp}.{part}_proj", out, inputs)
            for name in ("input_layernorm", "post_attention_layernorm"):
                self._add(f"model.layers.{i}.{name}", a.width)
            for name in ("q_norm", "k_norm") if a.qk_norm else ():
                self._add(f"{at}.{name}", a.head_dim)
        self._add("model.norm", a.width)

    def _add(self, module: str, *shape: int) -> None:
        values = torch.randn(shape, generator=self._random) * 0.2
        self.weights[f"{module}.weight"] = (values + 1 if len(shape) == 1 else values).bfloat16()
        if self.biased and module.endswith("_proj"):
            self.weights[f"{module}.bias"] = torch.randn(shape[0], generator=self._random).bfloat16()

    def pick(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._random))

    def step(self, share: float, names: list[str] | None = None, factor: float = 1.01) -> None:
        """Change this share of the weights of these tensors, or of all."""
        for name in self.weights if names is None else names:
            held = self.weights[name]
            chosen = torch.rand(held.shape, generator=self._random) < share
            self.weights[name] = torch.where(chosen, held * factor + 2**-6 * factor, held)

    def publish(self) -> dict[str, Tensor]:
        """The stream's tensors of what is held now."""
        stream: dict[str, Tensor] = {}
        for name, tensor in self.weights.items():
            if self.coded and Selection(self.exclude).takes(name):
                self._published[name] = quantise(tensor, self.format, like=self._published.get(name))
                stream |= to_tensors(name, self._published[name])
            else:
                stream[name] = tensor.clone()
        return stream


def elements(name: str, tensor: Tensor) -> Tensor:
    """A stream tensor's elements as bits, flat: one of each code."""
    if tensor.dtype == torch.uint8 and name.endswith(".weight"):
        return torch.stack([tensor & 15, tensor >> 4], -1).flatten()
    return tensor.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Positions]:
    """The positions of elements that differ; tensors without any are left out."""
    changed = {
        name: np.flatnonzero((elements(name, old[name]) != elements(name, new[name])).numpy()).astype(np.int64)
        for name in new
    }
    return {name: positions for name, positions in changed.items() if len(positions)}


def bits(weights: Weights) -> dict[str, Tensor]:
    """All numbers of prepared weights as integers, by a name."""
    held = {"embedding": weights.embedding, "head": weights.head, "final_gain": weights.final_gain}
    for index, layer in enumerate(weights.layers):
        held |= {f"{index}.{name}": tensor for name, tensor in layer.held().items()}
    return {
        name: tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        for name, tensor in held.items()
    }


def same_bits(a: Weights, b: Weights) -> bool:
    mine, other = bits(a), bits(b)
    return (
        mine.keys() == other.keys()
        and (a.head is a.embedding) == (b.head is b.embedding)
        and all(torch.equal(mine[name], other[name]) for name in mine)
    )
