"""A scripted agent that knows the fix: it writes the solved episodes that a policy is warm-started on.

It has several ways of looking and editing, and a bad habit: often it edits blindly, since it knows the fix without looking; a
policy that copies that guesses. It can also be careless: it tries a wrong repair, sees the tests fail, looks again and
repairs again. Such a repair is marked as a mistake: what follows from it is worth learning, it itself is not. What a
policy learns here is a skill to keep and a habit to lose.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator
from dataclasses import dataclass

from farflung.core.task import Task

SUBMIT = "submit"
TEST = "python3 -m unittest 2>&1 | tail -n 1"
TEST_NAMES = "python3 -m unittest 2>&1 | grep FAIL"
KIN: tuple[tuple[str, ...], ...] = (
    ("+", "-", "*", "//", "%", "/"),
    ("+=", "-=", "*="),
    ("<", ">", "<=", ">=", "==", "!="),
    ("min", "max", "sum"),
    ("upper", "lower", "strip"),
    ("startswith", "endswith"),
    ("and", "or"),
    tuple("0123456789"),
)


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the solver does."""

    blind: float = 0.65
    """It edits without having looked at the file, and submits that untested."""
    careless: float = 0.3
    """Where it has looked, its first repair is a wrong one."""
    again: float = 0.15
    """After a wrong repair the next one is wrong too."""
    verify: float = 0.5
    """It runs the tests before it submits, though it has no doubt."""
    tests_first: float = 0.7
    """It asks the tests for the function's name where the statement does not tell it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command; ``mistake`` if it is one that a policy should see but not learn to give."""

    command: str
    mistake: bool = False


@dataclass(frozen=True, slots=True)
class _Bug:
    """The one line that differs: its number from 1, its wrong and its right text."""

    path: str
    number: int
    bad: str
    good: str
    function: str


def solve(task: Task, rng: random.Random, habits: Habits = Habits()) -> Generator[Step, str, None]:
    """Yields steps, is sent what each printed, and ends with ``submit``. Needs ``task.fix`` to change one line."""
    bug = _find(task)
    if rng.random() < habits.blind:
        yield Step(_edit(bug, bug.bad, bug.good, rng))
        yield Step(SUBMIT)
        return
    yield from _look(bug, bug.function in task.statement, rng, habits)
    line, chance = bug.bad, habits.careless
    while rng.random() < chance and (wrong := near_misses(line, bug)):
        attempt = rng.choice(wrong)
        yield Step(_edit(bug, line, attempt, rng), mistake=True)
        line, chance = attempt, habits.again
        if (yield Step(TEST)).strip() == "OK":
            yield Step(SUBMIT)
            return
        yield from _look(bug, True, rng, habits)
    yield Step(_edit(bug, line, bug.good, rng))
    if rng.random() < habits.verify:
        yield Step(TEST)
    yield Step(SUBMIT)


def near_misses(line: str, bug: _Bug) -> list[str]:
    """Wrong repairs of ``line``: one word exchanged for one of its kin, where the right repair is if it is such a word."""
    words, right = _words(line), _words(bug.good)
    places = [at for at, word in enumerate(words) if any(word in kin for kin in KIN)]
    if len(words) == len(right):
        places = [at for at in places if words[at] != right[at]] or places
    found = []
    for at in places:
        for kin in KIN:
            for other in kin if words[at] in kin else ():
                changed = "".join((*words[:at], other, *words[at + 1 :]))
                if changed not in (line, bug.good, bug.bad):
                    found.append(changed)
    return found


def _find(task: Task) -> _Bug:
    ((path, fixed),) = task.fix.items()
    pairs = list(zip(task.files[path].splitlines(), fixed.splitlines(), strict=True))
    ((number, (bad, good)),) = [(n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1]]
    above = "\n".join(text for text, _ in pairs[:number])
    return _Bug(path, number, bad, good, re.findall(r"def (\w+)", above)[-1])


def _look(bug: _Bug, named: bool, rng: random.Random, habits: Habits) -> Generator[Step, str, None]:
    if not named and rng.random() < habits.tests_first:
        yield Step(TEST_NAMES)
        named = True
    draw = rng.random()
    if named and draw < 0.7:
        yield Step(f"grep -n -A 6 'def {bug.function}' {bug.path}")
    elif draw < 0.85:
        yield Step(f"grep -n '' {bug.path}")
    else:
        yield Step(f"cat -n {bug.path}")


def _edit(bug: _Bug, line: str, wanted: str, rng: random.Random) -> str:
    """A sed command that turns ``line``, the bug's line as it is now, into ``wanted``."""
    draw = rng.random()
    if draw < 0.05:
        program = f"{bug.number}c\\{wanted}"
    else:
        old, new = _fragment(line, wanted, wide=draw < 0.2)
        pattern = re.sub(r"([][.*^$/\\])", r"\\\1", old)
        replacement = re.sub(r"([&/\\])", r"\\\1", new)
        program = f"{bug.number}s/{pattern}/{replacement}/"
    quote = '"' if "'" in program else "'"
    return f"sed -i {quote}{program}{quote} {bug.path}"


def _fragment(line: str, wanted: str, *, wide: bool) -> tuple[str, str]:
    """The words that differ, with so many neighbours that replacing the first occurrence gives ``wanted``."""
    old, new = _words(line), _words(wanted)
    start = next(
        (at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
    )
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    margin = 2 if wide else 0
    while True:
        left, right = max(start - margin, 0), max(end - margin, 0)
        a, b = "".join(old[left : len(old) - right]), "".join(new[left : len(new) - right])
        if a.strip() and line.replace(a.strip(), b.strip(), 1) == wanted:
            return a.strip(), b.strip()
        margin += 1


def _words(line: str) -> list[str]:
    return re.findall(r"\w+|//|[-+*<>=!]=|\s+|[^\w\s]", line)
