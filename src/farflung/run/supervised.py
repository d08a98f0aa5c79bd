"""Supervised training of a small Llama on solved episodes, in float32: its own tokens but for mistakes, and a little of what it reads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from farflung.core.supports import Int32
from farflung.run.demonstrations import Role

Sample = tuple[Int32, npt.NDArray[np.int8]]  # ids and the Role of each, both [T]
READING = 0.3  # weight of the tokens that the policy reads: repeated words in files are most of what teaches it to copy
POOL = 16  # batches that are drawn together and sorted by length, so that little padding is computed


@dataclass(frozen=True, slots=True)
class Shape:
    """Width, depth and vocabulary of the model. Widths are multiples of 128, so that every weight format has whole blocks."""

    vocabulary: int = 1024
    width: int = 128
    hidden: int = 384
    layers: int = 5
    heads: int = 4


def new_model(shape: Shape, seed: int, *, end_id: int, pad_id: int) -> Any:
    """A Llama for causal language modelling with fresh weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.width // shape.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_id,
            pad_token_id=pad_id,
        )
    )


def fit(
    model: Any,
    samples: Sequence[Sample],
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    progress: Callable[[int, float], None],
) -> None:
    """Train in place. ``progress`` hears (step, loss of the policy's own tokens). Hidden matrices are stepped by Muon, the rest by AdamW: Muon needs
    half as many steps to learn to copy out of the transcript, which is most of the task."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = (
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    )
    batches = _batches(samples, batch, random.Random(seed))
    # Batches are sorted by length: a mean over each one's own tokens would count those of short episodes more.
    own_tokens, read_tokens = (
        sum(np.count_nonzero(roles == role) for _, roles in samples) / len(samples) for role in (Role.OWN, Role.READ)
    )
    model.train()
    for step in range(1, steps + 1):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * _schedule(step, steps)
            optimiser.zero_grad()
        own, read = _loss(model, next(batches))
        own, read = own / (batch * own_tokens), read / (batch * read_tokens)
        (own + READING * read).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()  # type: ignore[no-untyped-call]
        progress(step, own.item())
    model.eval()


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over the first 4 %, then a cosine to 2 %."""
    warmup = max(steps // 25, 1)
    return min(step / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _loss(model: Any, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the policy's own tokens, and that of what it reads. Rows are padded on the right, where
    causal attention never looks."""
    length = max(len(ids) for ids, _ in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    roles = torch.full((len(samples), length), Role.MISTAKE, dtype=torch.int8)  # so padding counts for nothing either
    for row, (tokens, each) in enumerate(samples):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        roles[row, : len(tokens)] = torch.from_numpy(each)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    learnt = roles[:, 1:] != Role.MISTAKE
    losses = functional.cross_entropy(model.lm_head(hidden[:, :-1][learnt]), ids[:, 1:][learnt], reduction="none")
    own = roles[:, 1:][learnt] == Role.OWN
    return losses[own].sum(), losses[~own].sum()


def _batches(samples: Sequence[Sample], size: int, rng: random.Random) -> Iterator[list[Sample]]:
    """Endless epochs, each in a new order."""
    while True:
        order = rng.sample(samples, len(samples))
        for at in range(0, len(order), size * POOL):
            pool = sorted(order[at : at + size * POOL], key=lambda sample: len(sample[0]))
            batches = [pool[i : i + size] for i in range(0, len(pool), size)]
            yield from rng.sample(batches, len(batches))
