"""Repeated steps make a policy better at a task whose reward hangs on what it samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from farflung.config import TrainConfig
from farflung.core.episode import Episode, Trajectory
from farflung.core.supports import Supports
from farflung.trainer import Trainer
from tests.trainer.episodes import BF16, episode, load

PROMPT, SIZE, TOP = 6, 8, 20


@torch.no_grad()
def sample(model: transformers.PreTrainedModel, group: int, seed: int) -> list[Episode]:
    """One token after a random prompt, from the 20 best candidates of disturbed logits; a multiple of four wins."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 48, (1, PROMPT), generator=generator)
    logits = model(input_ids=prompt).logits[0, -1]
    best = (logits + 0.2 * torch.randn(len(logits), generator=generator)).topk(TOP)
    log_q = best.values.log_softmax(-1)
    support = Supports(best.indices.numpy().astype(np.int32), log_q.numpy(), np.array([0, TOP]))
    found = []
    for index, slot in enumerate(torch.multinomial(log_q.exp(), SIZE, True, generator=generator).tolist()):
        ids = np.append(prompt[0].numpy(), support.ids[slot]).astype(np.int32)
        one, zero = np.array([log_q[slot]], np.float32), np.zeros(1, np.int32)
        made = Trajectory(ids, np.arange(len(ids)) == PROMPT, one, zero, zero.astype(np.int16), (BF16,), support)
        found.append(episode(made, float(support.ids[slot] % 4 == 0), group=group, index=index))
    return found


@pytest.mark.parametrize("weight", ["mis", "none"])
def test_a_policy_learns(weight: str, model_folder: Callable[[str], Path]) -> None:
    trainer, sampler = Trainer(model_folder("llama"), TrainConfig(lr=1e-2, weight=weight)), load(model_folder("llama"))
    rewards = []
    for step in range(16):
        sampler.load_state_dict(trainer.weights(), strict=False)
        rewards.append(trainer.step([sample(sampler, g, 1000 * step + g) for g in range(8)]).all.reward)
    early, late = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert early < 0.4
    assert late > 0.8
