"""Records solved episodes: the scripted solver's commands with what the real sandbox printed, as token ids."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from farflung.agents.dialect import Dialect
from farflung.agents.harness import observe
from farflung.agents.solver import SUBMIT, Habits, Step, solve
from farflung.config import AgentConfig
from farflung.core.supports import Int32
from farflung.core.task import Task
from farflung.sandboxes.base import SandboxFactory
from farflung.tasks.batch import Batch

BATCH = 200


class Role(IntEnum):
    """What a token is to the policy."""

    READ = 0
    OWN = 1
    MISTAKE = 2  # its own, but not to be learnt


@dataclass(frozen=True, slots=True)
class Shown:
    """A command and what the policy saw of its output."""

    command: str
    output: str
    mistake: bool = False


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A solved episode; ``submit`` comes last and prints nothing."""

    statement: str
    turns: tuple[Shown, ...]


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
    steps = {number: next(solver) for number, solver in enumerate(solvers)}
    turns: list[list[Shown]] = [[] for _ in tasks]
    batch = await Batch.open(factory, [task.files for task in tasks])
    try:
        while steps:
            results = await batch.run([(number, step.command) for number, step in steps.items()])
            following: dict[int, Step] = {}
            for (number, step), result in zip(steps.items(), results, strict=True):
                output = observe(result, agent)
                turns[number].append(Shown(step.command, output, step.mistake))
                if (wanted := solvers[number].send(output)).command != SUBMIT:
                    following[number] = wanted
            steps = following
        trees = await batch.trees()
    finally:
        await batch.close()
    return [
        Demonstration(task.statement, (*done, Shown(SUBMIT, "")))
        for task, done, tree in zip(tasks, turns, trees, strict=True)
        if all(tree[path] == text for path, text in task.fix.items())
    ]


def encode(demonstration: Demonstration, dialect: Dialect) -> tuple[Int32, npt.NDArray[np.int8]]:
    """ids [T] exactly as the harness would build them, and the Role of each [T]."""
    parts = [dialect.opening(dialect.instructions(), demonstration.statement)]
    roles = [Role.READ]
    for turn in demonstration.turns:
        parts.append(dialect.reply(turn.command))
        roles.append(Role.MISTAKE if turn.mistake else Role.OWN)
        if turn.command != SUBMIT:
            parts.append(dialect.observation(turn.output, parts[-1]))
            roles.append(Role.READ)
    return np.concatenate(parts), np.repeat(np.array(roles, np.int8), [len(part) for part in parts])
