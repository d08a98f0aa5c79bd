"""The scripted solver: its commands are legal, its habits are as asked, and it ends with the bug mended."""

from __future__ import annotations

import random
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from farflung.agents.solver import SUBMIT, TEST, Habits, Step, solve
from farflung.core.task import Task
from farflung.tasks.repair import generate, module_path

TASKS = list(islice(generate(13), 120))
SURE = Habits(blind=0.0, careless=0.0, verify=0.0, tests_first=0.0)


def commands(task: Task, habits: Habits, said: str = "FAILED (failures=1)", seed: int = 0) -> list[str]:
    """All commands when every command prints ``said``."""
    return [step.command for step in steps(task, habits, said, seed)]


def steps(task: Task, habits: Habits, said: str = "FAILED (failures=1)", seed: int = 0) -> list[Step]:
    solver = solve(task, random.Random(f"{seed} {task.id}"), habits)
    found = [next(solver)]
    while found[-1].command != SUBMIT:
        found.append(solver.send(said))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_its_edits_mend_the_bug_whatever_it_tried_before(tmp_path: Path, seed: int) -> None:
    for task in TASKS[seed::3]:
        path = module_path(task)
        module = tmp_path / task.id / path
        module.parent.mkdir(parents=True)
        module.write_text(task.files[path])
        for command in commands(task, Habits(blind=0.2, careless=0.8, again=0.5), seed=seed):
            if command.startswith("sed"):
                subprocess.run(["bash", "-c", command], cwd=tmp_path / task.id, check=True)
        assert module.read_text() == task.fix[path]


def test_without_careless_habits_it_looks_edits_and_submits() -> None:
    for task in TASKS:
        look, edit, end = commands(task, SURE)
        assert look.startswith(("cat -n", "grep -n"))
        assert edit.startswith("sed -i")
        assert end == SUBMIT


def test_a_careless_solver_runs_the_tests_looks_again_and_repairs_again() -> None:
    tries = [steps(task, Habits(blind=0.0, careless=1.0, again=0.0, verify=0.0, tests_first=0.0)) for task in TASKS]
    for found in tries:
        edits = [at for at, step in enumerate(found) if step.command.startswith("sed")]
        assert len(edits) in (1, 2)  # one where no near miss exists
        assert [at for at, step in enumerate(found) if step.mistake] == edits[:-1]
        assert all(found[at + 1].command == TEST for at in edits[:-1])
        assert all(found[at + 2].command.startswith(("cat", "grep")) for at in edits[:-1])
    assert sum(len(found) == 6 for found in tries) > 90


def test_it_stops_when_the_tests_pass_by_luck() -> None:
    for task in TASKS[:20]:
        found = commands(task, Habits(blind=0.0, careless=1.0, again=0.0, tests_first=0.0), said="OK")
        assert sum(command.startswith("sed") for command in found) == 1


def test_the_same_random_numbers_give_the_same_commands() -> None:
    assert [commands(t, Habits()) for t in TASKS[:20]] == [commands(t, Habits()) for t in TASKS[:20]]


def test_a_blind_solver_edits_without_having_looked_and_submits() -> None:
    for task in TASKS[:20]:
        edit, end = steps(task, Habits(blind=1.0))
        assert edit.command.startswith("sed -i")
        assert not edit.mistake
        assert end.command == SUBMIT
