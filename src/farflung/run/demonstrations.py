"""Records solved episodes: the scripted solver's commands with what the real sandbox printed, as token ids."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from farflung.agents.dialect import Dialect
from farflung.agents.harness import observe
from farflung.agents.solver import SUBMIT, Habits, solve
from farflung.config import AgentConfig
from farflung.core.supports import Int32
from farflung.core.task import Task
from farflung.sandboxes.base import SandboxFactory
from farflung.tasks.batch import Batch

BATCH = 200


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A solved episode: the statement, then every command with what it printed; ``submit`` comes last and prints nothing."""

    statement: str
    turns: tuple[tuple[str, str], ...]


async def record(
    tasks: Iterable[Task], factory: SandboxFactory, agent: AgentConfig, *, seed: int, habits: Habits
) -> AsyncIterator[Demonstration]:
    """Let the solver work on each task once; episodes that it did not solve are left out. Raises SandboxError."""
    waiting = iter(tasks)
    while batch := tuple(islice(waiting, BATCH)):
        for demonstration in await _record(batch, factory, agent, seed, habits):
            yield demonstration


async def _record(
    tasks: tuple[Task, ...], factory: SandboxFactory, agent: AgentConfig, seed: int, habits: Habits
) -> list[Demonstration]:
    solvers = [solve(task, random.Random(f"{seed} {task.id}"), habits) for task in tasks]
    commands = {number: next(solver) for number, solver in enumerate(solvers)}
    turns: list[list[tuple[str, str]]] = [[] for _ in tasks]
    batch = await Batch.open(factory, [task.files for task in tasks])
    try:
        while commands:
            results = await batch.run(list(commands.items()))
            following = {}
            for (number, command), result in zip(commands.items(), results, strict=True):
                shown = observe(result, agent)
                turns[number].append((command, shown))
                if (wanted := solvers[number].send(shown)) != SUBMIT:
                    following[number] = wanted
            commands = following
        trees = await batch.trees()
    finally:
        await batch.close()
    return [
        Demonstration(task.statement, (*done, (SUBMIT, "")))
        for task, done, tree in zip(tasks, turns, trees, strict=True)
        if all(tree[path] == text for path, text in task.fix.items())
    ]


def encode(demonstration: Demonstration, dialect: Dialect) -> tuple[Int32, npt.NDArray[np.bool_]]:
    """ids [T] exactly as the harness would build them, and action [T], true where the policy speaks."""
    parts = [dialect.opening(dialect.instructions(), demonstration.statement)]
    speaks = [False]
    for command, shown in demonstration.turns:
        parts.append(dialect.reply(command))
        speaks.append(True)
        if command != SUBMIT:
            parts.append(dialect.observation(shown, parts[-1]))
            speaks.append(False)
    return np.concatenate(parts), np.repeat(speaks, [len(part) for part in parts])
