"""Evaluate a policy: serve it in BF16 by one sampler of its own, and let agents try the held-out tasks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from farflung.agents.dialect import Dialect
from farflung.config import Recipe
from farflung.core.errors import FarflungError, InfraError
from farflung.core.task import Task
from farflung.evaluation.held_out import EvalResult, evaluate
from farflung.fleet import wire
from farflung.fleet.client import FleetClient
from farflung.run.processes import Meter, Processes, Program, free_port
from farflung.sandboxes import open_factory

READY_SECONDS = 180.0


def evaluate_policy(
    model: Path,
    recipe: Recipe,
    tasks: Sequence[Task],
    *,
    token_file: Path,
    logs: Path,
    name: str,
    console: Console,
    meter: Meter | None = None,
) -> EvalResult:
    """pass@k of the model in ``model`` on the first ``recipe.eval.tasks`` of ``tasks``; ``name`` is for the progress bar.

    Sampled from the whole vocabulary at temperature 1, weights and cache in BF16, whatever the recipe's pools serve.
    """
    return asyncio.run(_evaluate(model, recipe, tasks, token_file, logs, name, console, meter or Meter()))


def evaluate_model(model: Path, recipe: Recipe, tasks: Sequence[Task], *, name: str, console: Console) -> EvalResult:
    """The same for a model that belongs to no run. If it fails, the sampler's log stays, and the error says where."""
    logs = Path(tempfile.mkdtemp(prefix="farflung-eval-logs-"))
    kept = False
    try:
        with tempfile.TemporaryDirectory(prefix="farflung-eval-") as folder:
            token = Path(folder) / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_urlsafe(24))
            return evaluate_policy(model, recipe, tasks, token_file=token, logs=logs, name=name, console=console)
    except FarflungError as error:
        kept = any(logs.iterdir())
        if kept and str(logs) not in str(error):
            error.mend = f"{error.mend}\n  the sampler's log is in {logs}".strip()
        raise
    finally:
        if not kept:
            shutil.rmtree(logs)


async def _evaluate(
    model: Path, recipe: Recipe, tasks: Sequence[Task], token_file: Path, logs: Path, name: str, console: Console,
    meter: Meter,
) -> EvalResult:  # fmt: skip
    dialect = Dialect.load(model, recipe.model.tool_format)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    token = wire.read_token(token_file)
    processes = Processes(logs, lambda kind, detail: console.print(f"  {kind.replace('_', ' ')}: {detail}"))
    capacity = min(recipe.eval.concurrency, recipe.eval.tasks * recipe.eval.samples)
    await processes.start(
        Program(
            f"eval-{name}",
            ("farflung.fleet.serve", "--model", str(model), "--pool", "eval", "--replica", "eval-0", "--weights", "bf16",
             "--kv", "bf16", "--capacity", str(capacity), "--port", str(port), "--token-file", str(token_file)),
        )
    )  # fmt: skip
    watch = asyncio.create_task(_watch(meter))
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
        disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    try:
        await _ready(url, token, processes, f"eval-{name}")
        with bars:
            bar = bars.add_task(f"evaluating {name}", total=None)
            async with FleetClient(url, token, deadline_seconds=recipe.router.retry_seconds) as sampler:
                return await evaluate(
                    tasks,
                    sampler=sampler,
                    factory=open_factory(recipe.sandbox),
                    dialect=dialect,
                    agent=recipe.agent,
                    sandbox=recipe.sandbox,
                    config=recipe.eval,
                    seed=recipe.run.seed,
                    progress=lambda done, total: bars.update(bar, completed=done, total=total),
                )
    finally:
        watch.cancel()
        await processes.stop()


async def _ready(url: str, token: str, processes: Processes, name: str) -> None:
    """Wait until the sampler answers. Raises InfraError with its last words if it does not."""
    until = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession(headers=wire.bearer(token)) as http:
        while time.monotonic() < until and processes.failed is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(f"{url}/v1/status", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise processes.failed or InfraError(
        f"the sampler was not ready after {READY_SECONDS:.0f} s:\n{processes.log_tail(name)}", where="evaluation"
    )


async def _watch(meter: Meter) -> None:
    while True:
        meter.look()
        await asyncio.sleep(1.0)
