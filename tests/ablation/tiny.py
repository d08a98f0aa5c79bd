"""An ablation that takes a second: the smallest model, a task of three symbols, an untrained start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.ablation.arms import Arm
from farflung.ablation.model import Shape, initial
from farflung.ablation.recipe import AblationRecipe
from farflung.ablation.small import Small
from farflung.ablation.task import Sorting
from farflung.ablation.trial import run_arm
from farflung.core.metrics import UpdateMetrics

TREE: dict[str, Any] = {
    "ablation": {"name": "tiny", "updates": 6, "window": 2},
    "task": {"symbols": 3, "length": 2, "attempts": 3},
    "model": {"width": 16, "layers": 2, "heads": 2, "mlp": 32},
    "start": {"updates": 150, "batch": 64, "lr": 1e-2},
    "train": {"groups": 8, "group_size": 4, "lag": 2, "lr": 1e-3, "warmup": 0},
    "mixed": [
        {"name": "nvfp4", "weights": "nvfp4", "kv": "fp8"},
        {"name": "mxfp4", "weights": "mxfp4", "kv": "fp8"},
        {"name": "fp8", "weights": "fp8", "kv": "bf16"},
        {"name": "bf16"},
    ],
    "homogeneous": [{"name": "one"}, {"name": "two"}],
}


def recipe(**changes: dict[str, Any]) -> AblationRecipe:
    """TREE with some keys of some sections changed."""
    tree = TREE | {section: TREE.get(section, {}) | keys for section, keys in changes.items()}
    return AblationRecipe.model_validate(tree)


def rows(made: AblationRecipe, arm: Arm, seed: int = 0) -> list[UpdateMetrics]:
    """A whole run from the untrained policy."""
    return list(run_arm(made, arm, Small(made).pools(arm.fleet), seed, start(made)))


def start(made: AblationRecipe) -> dict[str, Tensor]:
    """An untrained first policy."""
    shape = Shape.of(made.model, Sorting.of(made.task).vocabulary)
    return initial(shape, torch.Generator().manual_seed(0))
