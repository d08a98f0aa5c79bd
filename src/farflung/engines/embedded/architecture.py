"""Reads a Hugging Face config.json: the shapes and constants that the decoder needs, and nothing that it would ignore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.core.errors import BadInput

SUPPORTED = ("LlamaForCausalLM", "Qwen3ForCausalLM")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not change with the sequence's length."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes as in the model's configuration; ``rope`` and ``raw`` are what inverse frequencies are computed from."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    context: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    rope: Mapping[str, Any]
    raw: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> Architecture:
        """Raises BadInput for a missing or malformed file, an unsupported architecture or an unsupported option."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise BadInput(
                "there is no config.json", where=str(folder), mend="name a folder in Hugging Face format"
            ) from None
        except ValueError as error:
            raise BadInput(f"not JSON: {error}", where=str(path)) from None
        return Architecture.parse(raw, where=str(path))

    @staticmethod
    def parse(raw: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
        name = (raw.get("architectures") or ["none"])[0]
        if name not in SUPPORTED:
            raise BadInput(
                f"the architecture is {name}; the embedded engine runs {' and '.join(SUPPORTED)}",
                where=where,
                mend="serve this model with another engine",
            )
        qwen = name == "Qwen3ForCausalLM"
        try:
            heads, width = int(raw["num_attention_heads"]), int(raw["hidden_size"])
            # Qwen3 does not derive the head's width when the file leaves it out; Llama does.
            head_dim = int(raw.get("head_dim") or (128 if qwen else width // heads))
            architecture = Architecture(
                name=name,
                layers=int(raw["num_hidden_layers"]),
                width=width,
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                mlp_width=int(raw["intermediate_size"]),
                vocabulary=int(raw["vocab_size"]),
                context=int(raw.get("max_position_embeddings", 32768 if qwen else 2048)),
                norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tied=bool(raw.get("tie_word_embeddings", False)),
                qk_norm=qwen,
                rope=_rope(raw),
                raw=raw,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not the configuration of a {name}: {error!r}", where=where) from None
        architecture._refuse_unsupported(where)
        return architecture

    def _refuse_unsupported(self, where: str) -> None:
        raw = self.raw
        kind = self.rope["rope_type"]
        sliding = raw.get("use_sliding_window") or any(t != "full_attention" for t in raw.get("layer_types") or ())
        problems = (
            (raw.get("hidden_act", "silu") != "silu", f"hidden_act is {raw.get('hidden_act')}, not silu"),
            (kind not in STATIC_ROPE, f"rope_type is {kind}, none of {', '.join(STATIC_ROPE)}"),
            (sliding, "some layers attend to a sliding window, not to everything"),
            ("quantization_config" in raw, "its weights are quantised already; BF16 weights are needed"),
            (self.heads % self.kv_heads != 0, f"{self.heads} heads do not share {self.kv_heads} key-value heads"),
            (self.head_dim % 2 != 0, f"head_dim is {self.head_dim}, not even"),
        )
        for wrong, what in problems:
            if wrong:
                raise BadInput(f"the embedded engine cannot run this model: {what}", where=where)

    def rotations(self, length: int) -> Tensor:
        """exp(i * position * frequency) times the attention scaling, [length, head_dim / 2] complex64."""
        frequencies, scaling = self._inverse_frequencies()
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        return torch.polar(torch.full_like(angles, scaling), angles)

    def _inverse_frequencies(self) -> tuple[Tensor, float]:
        if self.rope["rope_type"] == "default":
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / self.rope["rope_theta"] ** exponents, 1.0
        # The scaled kinds are transformers' business; it is imported only for them, since that takes seconds.
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = AutoConfig.for_model(**{**self.raw, "model_type": "qwen3" if self.qk_norm else "llama"})
        frequencies, scaling = ROPE_INIT_FUNCTIONS[self.rope["rope_type"]](config)
        return frequencies.float(), float(scaling)


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, in the newer form (one object) or the older one (rope_theta beside rope_scaling)."""
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    given.setdefault("rope_type", given.pop("type", "default"))
    given["rope_theta"] = float(given.get("rope_theta", raw.get("rope_theta", 10000.0)))
    return given
