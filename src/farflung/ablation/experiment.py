"""What an ablation can be made of: the small task of this package, or whole training runs by any training recipe."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from farflung.ablation.arms import Arm, Fleet
from farflung.ablation.small import Small
from farflung.ablation.whole import Whole
from farflung.config.tree import Section
from farflung.core.errors import BadInput, Corrupt
from farflung.core.metrics import UpdateMetrics


class Pool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def kv(self) -> str: ...


class Experiment(Protocol):
    """``updates`` of each run; ``fresh``: how many of the first ones train on batches that the first policy sampled, besides
    the very first; ``window``: updates over which starts and ends are averaged."""

    @property
    def recipe(self) -> Section: ...
    @property
    def name(self) -> str: ...
    @property
    def updates(self) -> int: ...
    @property
    def fresh(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def std(self) -> bool: ...
    @property
    def cores(self) -> int:
        """How many a run keeps busy."""
        ...

    def pools(self, fleet: Fleet) -> Sequence[Pool]: ...

    def prepare(self, folder: Path, console: Console) -> None:
        """Make what all runs start from, unless it is there."""
        ...

    def rows(self, folder: Path, arm: Arm, seed: int) -> Iterator[UpdateMetrics]:
        """Make one run, from its first update on."""
        ...


def read_experiment(path: Path, overrides: Sequence[tuple[str, str]]) -> Experiment:
    """From a recipe of either kind: with [run] or [[pools]] in it, it is one for training. Raises BadInput."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        tree = {}  # the loader says it better
    return Whole.load(path, overrides) if {"run", "pools"} & tree.keys() else Small.load(path, overrides)


def check_fleets(experiment: Experiment, arms: Sequence[Arm], place: str) -> None:
    """Raises BadInput if the arms compare two fleets that serve the same formats in the same proportions."""
    if len({arm.fleet for arm in arms}) == 2 and _shares(experiment, "mixed") == _shares(experiment, "homogeneous"):
        raise BadInput(
            "the mixed and the homogeneous fleet serve the same formats: every arm would be measured twice",
            where=place,
            mend="give the mixed fleet's pools other weights and kv, or run one fleet: --arms homogeneous",
        )


def _shares(experiment: Experiment, fleet: Fleet) -> dict[tuple[str, str], float]:
    pools = [(pool.weights, pool.kv) for pool in experiment.pools(fleet)]
    return {formats: count / len(pools) for formats, count in Counter(pools).items()}


def experiment_of(facts: Any, place: str) -> Experiment:
    """From what ``facts`` gave. Raises BadInput, Corrupt."""
    kinds: dict[str, Callable[[Any, str], Experiment]] = {"small": Small.of, "whole": Whole.of}
    if not isinstance(facts, dict) or facts.get("kind") not in kinds:
        raise Corrupt("not an ablation's recipe", where=place)
    return kinds[facts["kind"]](facts.get("recipe"), place)


def facts(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain data."""
    return {
        "kind": "small" if isinstance(experiment, Small) else "whole",
        "recipe": experiment.recipe.model_dump(mode="json"),
    }
