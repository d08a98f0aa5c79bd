"""Tiny random models in Hugging Face folders, and episodes that they could have sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

VOCABULARY = 48


def _save(model: transformers.PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a random model of the named kind; the same name gives the same folder."""
    made: dict[str, Path] = {}
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip

    def build(kind: str) -> transformers.PreTrainedModel:
        match kind:
            case "llama":
                return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=True))
            case "llama-untied":
                return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, attention_dropout=0.1))
            case "qwen3":
                return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
            case "sliding":
                config = transformers.MistralConfig(**shape, sliding_window=6)
                return transformers.MistralForCausalLM(config)
            case "gemma2":
                return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, final_logit_softcapping=None))
            case "gemma2-capped":
                return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, final_logit_softcapping=2.0))
            case "granite":
                return transformers.GraniteForCausalLM(transformers.GraniteConfig(**shape, logits_scaling=4.0))
        raise AssertionError(kind)

    def folder(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(sum(map(ord, kind)))
            made[kind] = _save(build(kind), tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)
