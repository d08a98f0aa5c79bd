"""An ablation's folder: the recipe, the first policy, and one file of rows per run.

recipe.json             what every run follows
start.safetensors       the first policy, the same for all runs
runs/FLEET-METHOD-SEED.jsonl   one row per update; complete when the last update is there
runs/FLEET-METHOD-SEED.diverged   with it the run is complete too: it diverged (NaN) after its last row
logs/                   what a run's process said
lock                    held while the ablation goes on
report.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.ablation.arms import GRID, Arm
from farflung.ablation.experiment import Experiment, experiment_of, facts
from farflung.core.errors import BadInput, Corrupt
from farflung.core.metrics import UpdateMetrics
from farflung.run.workspace import locked


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return self.arm.run_name(self.seed)

    @staticmethod
    def parse(name: str) -> Run | None:
        """None if no run is called so."""
        seed = name.rpartition("-")[2]
        if not (seed.isascii() and seed.isdigit()):
            return None
        return next((Run(arm, int(seed)) for arm in GRID if arm.run_name(int(seed)) == name), None)


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path
    experiment: Experiment

    @staticmethod
    def open(path: Path, experiment: Experiment) -> Folder:
        """A new folder, or one that holds runs of the same recipe. Raises BadInput if it is another's."""
        file = path / "recipe.json"
        if file.exists():
            there = Folder.load(path)
            if changed := _difference(facts(there.experiment), facts(experiment)):
                raise BadInput(
                    f"its runs follow another recipe: {changed}",
                    where=str(path),
                    mend="give --dir another folder, or go on with the recipe and keys that it began with",
                )
            return there
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput("there is something else", where=str(path), mend="give --dir another folder")
        for part in ("runs", "logs"):
            (path / part).mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(facts(experiment), indent=1))
        temporary.replace(file)
        return Folder(path, experiment)

    @staticmethod
    def load(path: Path) -> Folder:
        """One that is there. Raises BadInput, Corrupt."""
        file = path / "recipe.json"
        try:
            tree = json.loads(file.read_text())
        except FileNotFoundError:
            raise BadInput("no ablation is here", where=str(path)) from None
        except ValueError as error:
            raise Corrupt(f"not JSON: {error}", where=str(file)) from None
        return Folder(path, experiment_of(tree, str(file)))

    def locked(self) -> AbstractContextManager[None]:
        """Held while runs are made. Raises BadInput if another process makes some here."""
        return locked(
            self.path,
            "this ablation is going on in another process",
            "wait for it, or give --dir another folder",
        )

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def rows_file(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.name}.jsonl"

    def diverged_file(self, run: Run) -> Path:
        return self.path / "runs" / f"{run.name}.diverged"

    def log_file(self, run: Run) -> Path:
        return self.path / "logs" / f"{run.name}.log"

    def rows(self, run: Run) -> list[UpdateMetrics]:
        """The run's updates so far; a last line that was cut off is not one."""
        try:
            lines = self.rows_file(run).read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        try:
            return [UpdateMetrics.from_dict(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(
                f"line cannot be read: {error!r:.200}",
                where=str(self.rows_file(run)),
                mend="delete it; it is made anew",
            ) from None

    def count(self, run: Run) -> int:
        """How many updates the run has made."""
        try:
            return self.rows_file(run).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def diverged(self, run: Run) -> bool:
        """Whether the run ended early because loss, gradient or weights were not finite."""
        return self.diverged_file(run).exists()

    def complete(self, run: Run) -> bool:
        return self.count(run) == self.experiment.updates or self.diverged(run)

    def clear(self, run: Run) -> None:
        """Remove what the run left, for it to begin anew."""
        for file in (self.rows_file(run), self.diverged_file(run)):
            file.unlink(missing_ok=True)

    def found(self) -> Iterator[tuple[Run, list[UpdateMetrics]]]:
        """Every run that has made an update or diverged at its first, arm after arm and seed after seed."""
        parsed = (Run.parse(file.stem) for file in self._row_files())
        runs = sorted((run for run in parsed if run), key=lambda run: (GRID.index(run.arm), run.seed))
        return ((run, rows) for run in runs if (rows := self.rows(run)) or self.diverged(run))

    def strangers(self) -> list[Path]:
        """Files among the rows that are no run's."""
        return [file for file in self._row_files() if Run.parse(file.stem) is None]

    def _row_files(self) -> list[Path]:
        return sorted((self.path / "runs").glob("*.jsonl"))


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first key in which two recipes differ, with both values."""
    if old["kind"] != new["kind"]:
        return f"a {old['kind']} one there, a {new['kind']} one here"
    for section, values in new["recipe"].items():
        before = old["recipe"][section]
        if before == values:
            continue
        if not isinstance(values, dict):
            return f"{section} is {json.dumps(before)} there, {json.dumps(values)} here"
        key = next(key for key in values if values[key] != before[key])
        return f"{section}.{key} is {json.dumps(before[key])} there, {json.dumps(values[key])} here"
    return ""
