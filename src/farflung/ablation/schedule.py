"""Carry an ablation out: what all runs start from, then run after run, several side by side."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from farflung.ablation.folder import Folder, Run
from farflung.core.errors import InfraError
from farflung.run.processes import child_environment

POLL_SECONDS = 0.5
LINE_SECONDS = 60.0
LOG_TAIL = 1500


@dataclass(frozen=True, slots=True)
class _Job:
    """A run in a process of its own."""

    run: Run
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def start(folder: Folder, run: Run) -> _Job:
        folder.clear(run)
        with folder.log_file(run).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "farflung.ablation.job", str(folder.path), run.name],
                env=child_environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return _Job(run, process)

    def check(self, folder: Folder) -> None:
        """Raises InfraError if it ended before its run was complete."""
        if self.process.returncode or not folder.complete(self.run):
            raise InfraError(
                f"the run's process ended with {self.process.returncode}",
                where=self.run.name,
                mend=f"it said: {_tail(folder.log_file(self.run))}",
            )


def carry_out(folder: Folder, runs: Sequence[Run], jobs: int, console: Console) -> None:
    """Make every run that is not complete; one that was cut off begins anew.

    When one dies the others go on; at the end InfraError is raised, which tells of those that died.
    """
    for stranger in folder.strangers():
        console.print(f"{stranger} is left out: no run is called so", highlight=False, soft_wrap=True)
    waiting = [run for run in runs if not folder.complete(run)]
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are there already", highlight=False)
    if not waiting:
        return
    folder.experiment.prepare(folder.path, console)
    running: list[_Job] = []
    failed: list[InfraError] = []
    with _Show(folder, len(runs), len(waiting), console) as show:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Job.start(folder, waiting.pop(0)))
                time.sleep(POLL_SECONDS)
                show.now(running)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    try:
                        job.check(folder)
                    except InfraError as error:
                        failed.append(error)
                        show.failed(job)
                    else:
                        show.done(job)
        finally:
            for job in running:
                job.process.kill()
                job.process.wait()
    if failed:
        others = f"; so did {', '.join(error.where for error in failed[1:])}" if failed[1:] else ""
        raise InfraError(f"{failed[0].what}{others}", where=failed[0].where, mend=failed[0].mend)


class _Show:
    """Bars on a terminal, a line now and then elsewhere, and a line for every run that is done."""

    def __init__(self, folder: Folder, runs: int, waiting: int, console: Console) -> None:
        self._folder = folder
        self._runs, self._done = runs, runs - waiting
        self._console = console
        self._updates = folder.experiment.updates
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._whole = self._progress.add_task("all", total=waiting * self._updates)
        self._before = 0
        self._bars: dict[Run, TaskID] = {}
        self._told = time.monotonic()

    def __enter__(self) -> _Show:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def now(self, running: Sequence[_Job]) -> None:
        counts = {job.run: self._folder.count(job.run) for job in running}
        for run, count in counts.items():
            if run not in self._bars:
                self._bars[run] = self._progress.add_task(run.name, total=self._updates)
            self._progress.update(self._bars[run], completed=count)
        self._progress.update(self._whole, completed=self._before + sum(counts.values()))
        if not self._console.is_terminal and time.monotonic() - self._told > LINE_SECONDS:
            self._told = time.monotonic()
            self._print(", ".join(f"{run.name} {count}/{self._updates}" for run, count in counts.items()))

    def done(self, job: _Job) -> None:
        rows = self._folder.rows(job.run)
        what = f"diverged after {len(rows)} of {self._updates} updates; " if self._folder.diverged(job.run) else ""
        if rows:
            first, last = rows[0].all, rows[-1].all
            what += f"reward {first.reward:.2f} → {last.reward:.2f}, KL {first.kl:.4f} → {last.kl:.4f}, "
        self._done += 1
        self._over(job, f"{what}{time.monotonic() - job.began:.0f} s ({self._done} of {self._runs})")

    def failed(self, job: _Job) -> None:
        self._over(job, "failed; the others go on")

    def _over(self, job: _Job, what: str) -> None:
        self._before += self._updates
        self._progress.remove_task(self._bars.pop(job.run))
        self._told = time.monotonic()
        self._print(f"{job.run.arm.name} seed {job.run.seed}: {what}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text[-LOG_TAIL:] or "nothing"
