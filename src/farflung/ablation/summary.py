"""The result: every arm over its seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from farflung.ablation.arms import GRID, Arm
from farflung.ablation.folder import Folder
from farflung.ablation.signs import Signs, mean, read_signs

WIDE = 1000


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """An arm's complete runs: ``signs`` of each of ``seeds``."""

    arm: Arm
    seeds: tuple[int, ...]
    signs: tuple[Signs, ...]

    def mean(self, pick: Callable[[Signs], float]) -> float:
        return mean([pick(signs) for signs in self.signs])

    def spread(self, pick: Callable[[Signs], float]) -> float:
        """Half the range over the seeds."""
        values = [value for signs in self.signs if not math.isnan(value := pick(signs))]
        return (max(values) - min(values)) / 2 if values else math.nan

    @property
    def kl_growth(self) -> float:
        """Geometric mean over the seeds."""
        return self._geometric_mean(lambda s: s.kl_growth)

    @property
    def kl_peak_growth(self) -> float:
        """Geometric mean over the seeds."""
        return self._geometric_mean(lambda s: s.kl_peak_growth)

    def _geometric_mean(self, pick: Callable[[Signs], float]) -> float:
        return math.exp(self.mean(lambda s: math.log(pick(s)) if pick(s) > 0 else math.nan))

    @property
    def collapse_step(self) -> int | None:
        """The median over the seeds, of which those without a collapse count as never."""
        middle = median(math.inf if signs.collapse_step is None else signs.collapse_step for signs in self.signs)
        return round(middle) if middle < math.inf else None

    @property
    def diverged(self) -> int:
        """How many of the runs ended in NaN."""
        return sum(signs.diverged_step is not None for signs in self.signs)

    def plain(self) -> dict[str, Any]:
        return {
            "seeds": list(self.seeds),
            "start": _share(self.mean(lambda s: s.start)),
            "best": _share(self.mean(lambda s: s.best)),
            "final": _share(self.mean(lambda s: s.final)),
            "kl_start": _figures(self.mean(lambda s: s.kl_start)),
            "kl_final": _figures(self.mean(lambda s: s.kl_final)),
            "kl_growth": _figures(self.kl_growth),
            "kl_peak_growth": _figures(self.kl_peak_growth),
            "collapse_step": self.collapse_step,
            "diverged": self.diverged,
            "runs": [
                {
                    "seed": seed,
                    "start": _share(signs.start),
                    "best": _share(signs.best),
                    "final": _share(signs.final),
                    "kl_start": _figures(signs.kl_start),
                    "kl_final": _figures(signs.kl_final),
                    "kl_growth": _figures(signs.kl_growth),
                    "kl_peak_growth": _figures(signs.kl_peak_growth),
                    "kl_step": signs.kl_step,
                    "reward_step": signs.reward_step,
                    "gradient_step": signs.gradient_step,
                    "collapse_step": signs.collapse_step,
                    "diverged_step": signs.diverged_step,
                }
                for seed, signs in zip(self.seeds, self.signs, strict=True)
            ],
        }


def summarise(folder: Folder) -> list[ArmSummary]:
    """The arms that have complete runs, in the grid's order."""
    experiment = folder.experiment
    found: dict[Arm, list[tuple[int, Signs]]] = {}
    for run, rows in folder.found():
        if folder.complete(run):
            signs = read_signs(rows, fresh=experiment.fresh, window=experiment.window, diverged=folder.diverged(run))
            found.setdefault(run.arm, []).append((run.seed, signs))
    return [
        ArmSummary(arm, tuple(seed for seed, _ in found[arm]), tuple(signs for _, signs in found[arm]))
        for arm in GRID
        if arm in found
    ]


def write_summary(arms: Sequence[ArmSummary], path: Path) -> None:
    """JSON: the arm's name -> its result."""
    path.write_text(json.dumps({arm.arm.name: arm.plain() for arm in arms}, indent=1, allow_nan=False) + "\n")


def show(arms: Sequence[ArmSummary], console: Console) -> None:
    """On a terminal in its width; elsewhere every row is one whole line."""
    table = Table(title="reward and KL of every arm", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("arm", "seeds", "start", "best", "final", "KL", "growth", "peak", "collapse"):
        arm = name == "arm"
        table.add_column(
            name, justify="left" if arm else "right", overflow="fold", no_wrap=arm or not console.is_terminal
        )
    for summary in arms:
        table.add_row(*row(summary))
    if not console.is_terminal:
        wide = console.options.update(max_width=WIDE)
        table.width = Measurement.get(console, wide, table).maximum
    table.columns[0].min_width = max((len(summary.arm.name) for summary in arms), default=0)
    console.print(table, crop=False, overflow="ignore", no_wrap=True)


def row(arm: ArmSummary) -> list[str]:
    """The arm's line of the table."""
    spread = f" ± {arm.spread(lambda s: s.final):.2f}" if len(arm.seeds) > 1 else ""
    kl_start = arm.mean(lambda s: s.kl_start)
    ended = f" ({arm.diverged}× NaN)" if arm.diverged else ""
    return [
        arm.arm.name,
        str(len(arm.seeds)),
        f"{arm.mean(lambda s: s.start):.2f}",
        f"{arm.mean(lambda s: s.best):.2f}",
        f"{arm.mean(lambda s: s.final):.2f}{spread}",
        "–" if math.isnan(kl_start) else f"{kl_start:.2g} → {arm.mean(lambda s: s.kl_final):.2g}",
        _times(arm.kl_growth),
        _times(arm.kl_peak_growth),
        f"{'–' if arm.collapse_step is None else arm.collapse_step}{ended}",
    ]


def _times(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}×"


def _share(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _figures(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
