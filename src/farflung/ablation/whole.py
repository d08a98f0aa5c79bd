"""Whole training runs as an ablation's runs: what differs between the arms becomes keys of a training recipe.

A run lives in FOLDER/whole/NAME as any other, with its ledger and its report, and goes on where it stopped.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from farflung.ablation.arms import Arm, Fleet
from farflung.config import PoolConfig, Recipe, load_recipe, override_recipe, recipe_of
from farflung.core.errors import DIVERGED_CODE, BadInput, Diverged, InfraError
from farflung.core.metrics import UpdateMetrics
from farflung.report.data import read_run
from farflung.run.workspace import Workspace

POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Whole:
    recipe: Recipe

    @staticmethod
    def load(path: Path, overrides: Sequence[tuple[str, str]]) -> Whole:
        return Whole.checked(load_recipe(path, overrides), str(path))

    @staticmethod
    def of(tree: Any, place: str) -> Whole:
        return Whole.checked(recipe_of(tree, place), place)

    @staticmethod
    def checked(recipe: Recipe, place: str) -> Whole:
        """Raises BadInput where the arms could not differ as they should."""
        if recipe.sampling.top_p == 1:
            raise BadInput(
                "sampling.top_p is 1, which is what the arms without top-p get",
                where=place,
                mend="give the value for the arms with top-p, such as 0.97",
            )
        return Whole(override_recipe(recipe, [("run.minutes", "none")]))

    @property
    def name(self) -> str:
        return f"ablation-{self.recipe.run.name}"

    @property
    def updates(self) -> int:
        return self.recipe.run.updates

    @property
    def fresh(self) -> int:
        return min(math.ceil(self.recipe.run.buffer_batches), self.updates - 1)

    @property
    def window(self) -> int:
        return max(1, min(20, self.updates // 5))

    @property
    def std(self) -> bool:
        return self.recipe.train.std

    @property
    def cores(self) -> int:
        """All: a run is many processes."""
        return os.cpu_count() or 1

    def pools(self, fleet: Fleet) -> Sequence[PoolConfig]:
        if fleet == "mixed":
            return self.recipe.pools
        return [pool.model_copy(update={"weights": "bf16", "kv": "bf16"}) for pool in self.recipe.pools]

    def prepare(self, folder: Path, console: Console) -> None:
        """Every run starts from the recipe's model."""

    def arm_recipe(self, arm: Arm, seed: int) -> Recipe:
        """The run's own recipe."""
        keys = {
            "run.seed": str(seed),
            "train.weight": "mis" if arm.mis else "none",
            "train.centering": "true" if arm.sc else "false",
        }
        if not arm.top_p:
            keys["sampling.top_p"] = "1.0"
        for pool in self.pools(arm.fleet):
            keys |= {f"pools.{pool.name}.weights": pool.weights, f"pools.{pool.name}.kv": pool.kv}
        return override_recipe(self.recipe, list(keys.items()))

    def rows(self, folder: Path, arm: Arm, seed: int) -> Iterator[UpdateMetrics]:
        """Train, and read the updates off the run's ledger as they come."""
        space = folder / "whole" / arm.run_name(seed)
        if not (space / "recipe.json").exists():
            Workspace.create(space, self.arm_recipe(arm, seed))
        process = subprocess.Popen(
            [sys.executable, "-m", "farflung.ablation.train", str(space)],
            env=os.environ | {"FARFLUNG_PARENT": str(os.getpid())},
        )
        told = 0
        while told < self.updates:
            ended = process.poll() is not None
            found = read_run(space).updates if (space / "ledger.sqlite").exists() else ()
            yield from found[told:]
            told = len(found)
            if process.returncode == DIVERGED_CODE:
                raise Diverged("training diverged", where=str(space))
            if ended and told < self.updates:
                raise InfraError(f"training ended with {process.returncode}", where=str(space))
            time.sleep(0 if told == self.updates else POLL_SECONDS)
        process.wait()
