"""The first policy: trained on solved examples with mistakes in them, once for all arms."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from farflung.ablation.model import Decoder, Shape, initial
from farflung.ablation.recipe import AblationRecipe
from farflung.ablation.task import Sorting
from farflung.core.errors import Corrupt

WARMUP = 30


def make_start(recipe: AblationRecipe, told: Callable[[int], None]) -> dict[str, Tensor]:
    """Its weights, [1, ...]. ``told`` hears the step."""
    task = Sorting.of(recipe.task)
    shape = Shape.of(recipe.model, task.vocabulary)
    start = recipe.start
    generator = torch.Generator().manual_seed(start.seed)
    weights = {name: tensor.requires_grad_() for name, tensor in initial(shape, generator).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=start.lr, weight_decay=0.0, fused=True)
    for step in range(start.updates):
        for group in optimizer.param_groups:
            group["lr"] = start.lr * min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / start.updates)) / 2
        ids, imitated = task.demonstrations(start.batch, start.slip, generator)
        decoder = Decoder.of(weights, shape)
        logits = decoder.logits(decoder.hidden(ids[None, :, :-1])[:, :, task.prompt_tokens - 1 :])
        loss = F.cross_entropy(logits[0][imitated], ids[:, task.prompt_tokens :][imitated])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        told(step + 1)
    return {name: tensor.detach() for name, tensor in weights.items()}


def save_start(weights: dict[str, Tensor], path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file({name: tensor[0].contiguous() for name, tensor in weights.items()}, temporary)
    temporary.replace(path)


def load_start(recipe: AblationRecipe, path: Path) -> dict[str, Tensor]:
    """The weights that ``make_start`` gave. Raises Corrupt."""
    mend = "delete it and the folder's runs, and all is made anew"
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Corrupt(f"the first policy cannot be read: {error}", where=str(path), mend=mend) from None
    wanted = Shape.of(recipe.model, Sorting.of(recipe.task).vocabulary).tensors
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != wanted:
        raise Corrupt("the first policy's tensors are not those of the recipe's model", where=str(path), mend=mend)
    return {name: tensor[None] for name, tensor in weights.items()}
