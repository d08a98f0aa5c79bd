"""Tiny random models in Hugging Face folders, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from farflung.core.sampling import GenerateRequest, SamplingParams, Source

VOCABULARY = 300
SOURCE = Source("pool", "pool-0", "bf16", "bf16")
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen3": {"head_dim": 24, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}  # fmt: skip


def save(kind: str, folder: Path, *, seed: int = 0, spread: float = 0.2, **more: Any) -> Path:
    """A random model of the kind, in BF16, whose every tensor (norms and biases too) says something."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": spread, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    options = {**sizes, **KINDS[kind], **more}
    model: PreTrainedModel = (
        Qwen3ForCausalLM(Qwen3Config(**options)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**options))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """transformers' model of the folder, float32."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def prompt(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def request(
    length: int = 10, *, session: str = "s", seed: int = 0, ids: np.ndarray[Any, Any] | None = None, **params: Any
) -> GenerateRequest:
    given = {"max_tokens": 12, "top_k": 8, "top_p": 0.9, **params}
    asked = prompt(length, seed) if ids is None else ids.astype(np.int32)
    return GenerateRequest(session, asked, SamplingParams(seed=seed, **given))
