"""Episodes with honest log-probabilities and candidates: what a sampler with the given model would have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from farflung.core.episode import EndReason, Episode, Trajectory
from farflung.core.sampling import Source
from farflung.core.supports import Supports

BF16 = Source("bf16", "bf16-0", "bf16", "bf16")
FP4 = Source("nvfp4", "nvfp4-0", "nvfp4", "fp8")


def load(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def trajectory(
    model: transformers.PreTrainedModel,
    ids: Sequence[int],
    action: Sequence[bool],
    *,
    top: int | None = 5,
    temperature: float = 1.0,
    noise: float = 0.0,
    version: int = 0,
    sources: Sequence[Source] = (BF16,),
    seed: int = 0,
) -> Trajectory:
    """Record q for given tokens: the model's logits plus ``noise``, over the ``top`` best candidates and the token.

    ``top`` None records no candidates; tokens' sources go round ``sources``.
    """
    tokens, mask = np.array(ids, np.int32), np.array(action, bool)
    logits = model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0].double() / temperature
    generator = torch.Generator().manual_seed(seed)
    logits = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    rows: list[Supports] = []
    logprobs: list[float] = []
    for at in np.flatnonzero(mask):
        row, token = logits[at - 1], int(tokens[at])
        kept = torch.arange(len(row)) if top is None else row.topk(top).indices
        if token not in kept:
            kept = torch.cat([kept[:-1], torch.tensor([token])])
        log_q = row[kept].log_softmax(-1)
        logprobs.append(float(log_q[kept.tolist().index(token)]))
        rows.append(Supports(kept.numpy().astype(np.int32), log_q.numpy().astype(np.float32), np.array([0, len(kept)])))
    n = len(logprobs)
    return Trajectory(
        tokens, mask, np.array(logprobs, np.float32), np.full(n, version, np.int32),
        (np.arange(n) % len(sources)).astype(np.int16), tuple(sources),
        None if top is None else Supports.concat(rows), temperature,
    )  # fmt: skip


def episode(trajectory: Trajectory, reward: float, *, group: int = 0, index: int = 0) -> Episode:
    return Episode(group, index, f"task-{group}", EndReason.SUBMITTED, reward, 2, trajectory)


def random_group(
    model: transformers.PreTrainedModel,
    rng: np.random.Generator,
    *,
    size: int = 4,
    group: int = 0,
    prompt: int = 18,
    rewards: Sequence[float] | None = None,
    **recorded: object,
) -> list[Episode]:
    """``size`` episodes with one prompt, then turns of random tokens: actions, observations, actions."""
    vocabulary = model.config.vocab_size
    start = rng.integers(0, vocabulary, prompt).tolist()
    found = []
    for index in range(size):
        turns = [int(n) for n in rng.integers(1, 9, 3)]
        ids = start + rng.integers(0, vocabulary, sum(turns)).tolist()
        action = [False] * prompt + [True] * turns[0] + [False] * turns[1] + [True] * turns[2]
        reward = float(rewards[index]) if rewards is not None else float(index % 2)
        kept = trajectory(model, ids, action, seed=100 * group + index, **recorded)  # type: ignore[arg-type]
        found.append(episode(kept, reward, group=group, index=index))
    return found
