"""Generates repair tasks by seed: small packages of documented functions and tests, with one injected bug each."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from farflung.core.task import Task
from farflung.tasks.forms import ARGUMENTS, FORMS, PACKAGES, RETURN, Fault, Form

TEST_FILE = "tests/test_core.py"
MAX_CHARS = 560  # of the module with line numbers: an agent that prints it shall see all of it
RARE = 0.35  # how often a missing return is drawn against any other bug of the same form
STATEMENTS_NAMED = ("{name} in {path} is wrong.", "{name} in {path} returns wrong results.")
STATEMENTS = ("The tests of {package} fail.", "Something in {path} is wrong.")


@dataclass(frozen=True, slots=True)
class _Function:
    """One function of a module: its form with all names and constants chosen."""

    form: Form
    name: str
    words: dict[str, str]
    doc: str

    def text(self, fault: Fault | None = None) -> str:
        body = self.form.body.format_map(self.words)
        if fault is not None:
            body = body.replace(fault.good.format_map(self.words), fault.bad.format_map(self.words), 1)
        arguments = ", ".join(self.words[letter] for letter, _ in zip("abc", self.form.inputs, strict=False))
        lines = [f'"""{self.doc.format_map(self.words)}"""', *body.split("\n")]
        return f"def {self.name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)

    def build(self, fault: Fault | None = None) -> Callable[[list[Any]], Any]:
        """The function itself, to be called with a list of arguments; what it raises is returned as the exception's type."""
        space: dict[str, Any] = {}
        exec(self.text(fault), space)  # our own templates
        function = space[self.name]

        def call(arguments: list[Any]) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                return type(error)

        return call


def generate(seed: int, taken: Set[str] = frozenset()) -> Iterator[Task]:
    """Endless tasks, always the same for a seed; modules whose ``signature`` is in ``taken`` or came before are left out."""
    rng = random.Random(f"repair {seed}")
    seen = set(taken)
    number = 0
    while True:
        task = _make(rng, f"repair-{seed}-{number:05d}")
        if task is not None and (key := signature(task)) not in seen:
            seen.add(key)
            number += 1
            yield task


def signature(task: Task) -> str:
    """A hash of the faulty module without docstrings, its functions named by place: the same for modules that differ in
    nothing but words."""
    module = re.sub(r'^ *""".*"""\n', "", task.files[module_path(task)], flags=re.MULTILINE)
    for place, name in enumerate(re.findall(r"^def (\w+)", module, re.MULTILINE)):
        module = re.sub(rf"\b{name}\b", f"f{place}", module)
    return hashlib.sha256(module.encode()).hexdigest()


def module_path(task: Task) -> str:
    """The file with the bug."""
    return next(iter(task.fix))


def _make(rng: random.Random, name: str) -> Task | None:
    """One task, or none when the draw gave no test that sees the bug."""
    package = rng.choice(PACKAGES)
    path = f"{package}/core.py"
    functions: list[_Function] = []
    for form in rng.sample(FORMS, rng.choice((2, 2, 3, 3, 4))):
        free = [n for n in form.names if n not in {f.name for f in functions}]
        functions.append(_function(rng, form, rng.choice(free)))
    broken = rng.randrange(len(functions))
    faults = functions[broken].form.faults
    fault = rng.choices(faults, [RARE if f.kind == RETURN else 1.0 for f in faults])[0]
    cases = [_cases(rng, f, fault if place == broken else None) for place, f in enumerate(functions)]
    if not all(cases):
        return None
    good = "\n\n".join(f.text() for f in functions)
    bad = "\n\n".join(f.text(fault if place == broken else None) for place, f in enumerate(functions))
    if len(bad) + 7 * bad.count("\n") > MAX_CHARS:
        return None
    words = {"name": functions[broken].name, "path": path, "package": package}
    statement = rng.choice(STATEMENTS_NAMED if rng.random() < 0.7 else STATEMENTS).format_map(words)
    names = [f.name for f in functions]
    return Task(
        id=name,
        statement=statement,
        files={
            f"{package}/__init__.py": "",
            path: bad,
            "tests/__init__.py": "",
            TEST_FILE: _test_file(package, names, cases),
        },
        tests=tuple(f"tests.test_core.TestCore.test_{n}" for n in names),
        protected=("tests/__init__.py", TEST_FILE),
        fix={path: good},
        meta={"fault": fault.kind, "function": functions[broken].name, "functions": len(functions)},
    )


def _function(rng: random.Random, form: Form, name: str) -> _Function:
    words: dict[str, str] = {}
    for letter, kind in zip("abc", form.inputs, strict=False):
        words[letter] = rng.choice([w for w in ARGUMENTS[kind] if w not in words.values()])
    low = rng.randint(2, 8)
    words["k"], words["m"] = str(low), str(rng.randint(low + 1, 9))
    return _Function(form, name, words, rng.choice(form.docs))


def _cases(rng: random.Random, function: _Function, fault: Fault | None) -> list[tuple[list[Any], Any]]:
    """Two or three calls with their results; at least one tells the fault. Empty if no draw did."""
    constants = (int(function.words["k"]), int(function.words["m"]))
    good, bad = function.build(), function.build(fault)
    calls = [[_INPUTS[kind](rng, constants) for kind in function.form.inputs] for _ in range(24)]
    results = [(call, result) for call in calls if not isinstance(result := good(call), type)]
    telling = [(call, result) for call, result in results if bad(call) != result] if fault else results
    if not telling or len(results) < 3:
        return []
    chosen = [telling[0], *rng.sample(results, rng.choice((1, 2)))]
    return [case for place, case in enumerate(chosen) if case not in chosen[:place]]


def _test_file(package: str, names: list[str], cases: list[list[tuple[list[Any], Any]]]) -> str:
    text = f"import unittest\n\nfrom {package}.core import {', '.join(names)}\n\n\nclass TestCore(unittest.TestCase):\n"
    methods = []
    for name, calls in zip(names, cases, strict=True):
        lines = [f"    def test_{name}(self):\n"]
        for arguments, result in calls:
            given = ", ".join(repr(argument) for argument in arguments)
            lines.append(f"        self.assertEqual({name}({given}), {result!r})\n")
        methods.append("".join(lines))
    return text + "\n".join(methods)


def _number(rng: random.Random, constants: tuple[int, int]) -> int:
    """Often next to a constant of the function, where comparisons differ."""
    if rng.random() < 0.5:
        return rng.choice(constants) + rng.choice((-1, 0, 0, 1))
    return rng.randint(-9, 20)


_INPUTS: dict[str, Callable[[random.Random, tuple[int, int]], Any]] = {
    "i": _number,
    "p": lambda rng, _: rng.randint(2, 6),
    "l": lambda rng, constants: [_number(rng, constants) for _ in range(rng.randint(2, 11))],
    "e": lambda rng, _: [rng.randint(1, 9) for _ in range(rng.randint(0, 2))],
    "s": lambda rng, _: rng.choice(("north", "Sea", " low ", "Amber", "onion", "level", "Door", "noon")),
    "t": lambda rng, _: rng.choice(("n", "o", "A", "l", "D")),
    "b": lambda rng, _: rng.random() < 0.5,
}
