"""Proves that tasks are sound: the tests fail before the reference fix and pass after it, in the real sandbox and grader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from farflung.config.tree import SandboxConfig
from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.sandboxes.base import SandboxFactory
from farflung.tasks.grader import grade, make_patch


async def validate(
    tasks: Sequence[Task],
    factory: SandboxFactory,
    config: SandboxConfig,
    *,
    concurrency: int = 4,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Grade every task without and with its fix. Raises BadInput naming a task that is not sound, InfraError as ``grade``."""
    waiting = iter(tasks)
    done = 0

    async def work() -> None:
        nonlocal done
        for task in waiting:
            await _prove(task, factory, config)
            done += 1
            progress(done)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()


async def _prove(task: Task, factory: SandboxFactory, config: SandboxConfig) -> None:
    if not task.fix:
        raise BadInput("it has no reference fix to prove it with", where=f"task {task.id}", mend="give fix a file")
    if (await grade(task, "", factory, config)).reward:
        raise BadInput(
            "its tests pass before the fix",
            where=f"task {task.id}",
            mend="leave it out, or name tests that see the fault",
        )
    fixed = {path: text.encode() for path, text in {**task.files, **task.fix}.items()}
    after = await grade(task, make_patch(task, fixed), factory, config)
    if not after.reward:
        raise BadInput(
            f"its tests fail after the fix: {after.detail}",
            where=f"task {task.id}",
            mend="leave it out, or mend fix or tests",
        )
