"""The first policy: trained on solved examples until it is right as often as the recipe says, once for all arms."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from farflung.ablation.model import Decoder, Shape, initial
from farflung.ablation.recipe import AblationRecipe, PoolConfig
from farflung.ablation.sampler import sample, served
from farflung.ablation.task import Sorting
from farflung.core.errors import BadInput

LOOK = 5
PROBES = 1024


def make_start(recipe: AblationRecipe, told: Callable[[int, float], None]) -> dict[str, Tensor]:
    """Its weights, [1, ...]. ``told`` hears the step and the share of right answers. Raises BadInput if it never learns."""
    task = Sorting.of(recipe.task)
    shape = Shape.of(recipe.model, task.vocabulary)
    generator = torch.Generator().manual_seed(recipe.start.seed)
    weights = {name: tensor.requires_grad_() for name, tensor in initial(shape, generator).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=recipe.start.lr, weight_decay=0.0, fused=True)
    right = 0.0
    for step in range(1, recipe.start.updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.start.lr * min(1.0, step / 50)
        ids, imitated = task.demonstrations(recipe.start.batch, generator)
        decoder = Decoder.of(weights, shape)
        logits = decoder.logits(decoder.hidden(ids[None, :, :-1])[:, :, task.prompt_tokens - 1 :])
        loss = F.cross_entropy(logits[0][imitated], ids[:, task.prompt_tokens :][imitated])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % LOOK == 0:
            right = _accuracy(weights, shape, task, generator)
            told(step, right)
            if right >= recipe.start.reward:
                return {name: tensor.detach() for name, tensor in weights.items()}
    raise BadInput(
        f"after {recipe.start.updates} updates the first policy is right in {right:.0%} of its answers, "
        f"not {recipe.start.reward:.0%}",
        where="start.reward",
        mend="raise start.updates or start.lr, or make the task easier",
    )


def save_start(weights: dict[str, Tensor], path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file({name: tensor[0].contiguous() for name, tensor in weights.items()}, temporary)
    temporary.replace(path)


def load_start(path: Path) -> dict[str, Tensor]:
    return {name: tensor[None] for name, tensor in load_file(path).items()}


def _accuracy(weights: dict[str, Tensor], shape: Shape, task: Sorting, generator: torch.Generator) -> float:
    exact = (PoolConfig(name="bf16"),)
    batch = sample(
        served(weights, shape, exact), task, exact, task.prompts(PROBES, generator),
        temperature=1.0, top_p=1.0, generator=generator,
    )  # fmt: skip
    return float(batch.rewards.mean())
