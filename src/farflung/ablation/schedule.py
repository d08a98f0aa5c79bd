"""Carry an ablation out: the first policy, then run after run, as many side by side as there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from farflung.ablation.folder import Folder, Run
from farflung.core.errors import InfraError
from farflung.core.metrics import UpdateMetrics

POLL_SECONDS = 0.5
LINE_SECONDS = 60.0
LOG_TAIL = 1500


@dataclass(slots=True)
class _Job:
    """A run in a process of its own, and how many rows it has made."""

    run: Run
    process: subprocess.Popen[bytes]
    bar: TaskID
    began: float = field(default_factory=time.monotonic)
    seen: int = 0


def ensure_start(folder: Folder, console: Console) -> None:
    """Make the first policy unless it is there."""
    if folder.start.exists():
        return
    import torch

    from farflung.ablation.start import make_start, save_start

    torch.set_num_threads(1)
    wanted = folder.recipe.start.reward
    with console.status("the first policy learns from solved examples") as status:
        weights = make_start(
            folder.recipe,
            lambda step, right: status.update(f"the first policy: step {step}, right {right:.0%} of {wanted:.0%}"),
        )
    save_start(weights, folder.start)
    console.print("the first policy is made", highlight=False)


def carry_out(folder: Folder, runs: Sequence[Run], jobs: int, console: Console) -> None:
    """Make every run that is not complete; one that was cut off begins anew. Raises InfraError if one dies."""
    done = [run for run in runs if folder.complete(run)]
    waiting = [run for run in runs if run not in done]
    if done:
        console.print(f"{len(done)} of {len(runs)} runs are there already", highlight=False)
    if not waiting:
        return
    ensure_start(folder, console)
    updates = folder.recipe.ablation.updates
    with _progress(console) as progress:
        whole = progress.add_task("all", total=len(waiting) * updates)
        running: list[_Job] = []
        finished, told = len(done), time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running.append(_Job(run, _spawn(folder, run), progress.add_task(run.name, total=updates)))
                time.sleep(POLL_SECONDS)
                for job in list(running):
                    rows = folder.count(job.run)
                    progress.update(job.bar, completed=rows)
                    progress.advance(whole, rows - job.seen)
                    job.seen = rows
                    if job.process.poll() is None:
                        continue
                    if job.process.returncode or not folder.complete(job.run):
                        raise InfraError(
                            f"the run's process ended with {job.process.returncode}",
                            where=job.run.name,
                            mend=f"it said: {_tail(folder.log_file(job.run))}",
                        )
                    finished += 1
                    running.remove(job)
                    progress.remove_task(job.bar)
                    console.print(_line(job, folder.rows(job.run), f"{finished} of {len(runs)}"), highlight=False)
                    told = time.monotonic()
                if not console.is_terminal and time.monotonic() - told > LINE_SECONDS:
                    told = time.monotonic()
                    console.print(", ".join(f"{job.run.name} {job.seen}/{updates}" for job in running), highlight=False)
        finally:
            for job in running:
                job.process.kill()
                job.process.wait()


def _spawn(folder: Folder, run: Run) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "FARFLUNG_PARENT": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": "1",
    }
    with folder.log_file(run).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "farflung.ablation.job", str(folder.path), run.name],
            env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Bars on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _line(job: _Job, rows: Sequence[UpdateMetrics], count: str) -> str:
    first, last = rows[0].all, rows[-1].all
    return (
        f"{job.run.arm.name} seed {job.run.seed}: reward {first.reward:.2f} → {last.reward:.2f}, "
        f"KL {first.kl:.4f} → {last.kl:.4f}, {time.monotonic() - job.began:.0f} s ({count})"
    )


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text[-LOG_TAIL:] or "nothing"
