"""The small experiment: every run is one process of one thread, and starts from the same quickly made policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from farflung.ablation.arms import Arm, Fleet
from farflung.ablation.recipe import AblationRecipe, PoolConfig
from farflung.config.load import load_tree, tree_of
from farflung.core.metrics import UpdateMetrics


@dataclass(frozen=True, slots=True)
class Small:
    recipe: AblationRecipe

    @staticmethod
    def load(path: Path, overrides: Sequence[tuple[str, str]]) -> Small:
        return Small(load_tree(AblationRecipe, path, overrides))

    @staticmethod
    def of(tree: Any, place: str) -> Small:
        return Small(tree_of(AblationRecipe, tree, place))

    @property
    def name(self) -> str:
        return self.recipe.ablation.name

    @property
    def updates(self) -> int:
        return self.recipe.ablation.updates

    @property
    def fresh(self) -> int:
        return self.recipe.train.lag

    @property
    def window(self) -> int:
        return self.recipe.ablation.window

    @property
    def std(self) -> bool:
        return self.recipe.train.std

    @property
    def cores(self) -> int:
        return 1

    def pools(self, fleet: Fleet) -> Sequence[PoolConfig]:
        return self.recipe.mixed if fleet == "mixed" else self.recipe.homogeneous

    def prepare(self, folder: Path, console: Console) -> None:
        """Make the first policy, or see that the one there can be read. Raises Corrupt."""
        import torch

        from farflung.ablation.start import load_start, make_start, save_start

        path = folder / "start.safetensors"
        if path.exists():
            load_start(self.recipe, path)
            return
        torch.set_num_threads(1)
        steps = self.recipe.start.updates
        with console.status("the first policy learns") as status:
            weights = make_start(
                self.recipe, lambda step: status.update(f"the first policy learns: {step} of {steps} steps")
            )
        save_start(weights, path)
        console.print("the first policy is made", highlight=False)

    def rows(self, folder: Path, arm: Arm, seed: int) -> Iterator[UpdateMetrics]:
        import torch

        from farflung.ablation.start import load_start
        from farflung.ablation.trial import run_arm

        torch.set_num_threads(1)
        return run_arm(
            self.recipe, arm, self.pools(arm.fleet), seed, load_start(self.recipe, folder / "start.safetensors")
        )
