"""Generated tasks: reproducible, varied, apart from each other, each with a bug that its tests see."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import islice

import pytest

from farflung.core.task import Task
from farflung.tasks.files import load_tasks
from farflung.tasks.forms import FORMS, Form
from farflung.tasks.repair import MAX_CHARS, generate, module_path, signature

TASKS = list(islice(generate(7), 150))


def assertions_hold(task: Task, module: str) -> bool:
    """Whether all assertions of the task hold for this text of its module."""
    space: dict[str, object] = {}
    exec(module, space)
    calls = re.findall(r"assertEqual\((.*)\)$", task.files["tests/test_core.py"], re.MULTILINE)
    for call in calls:
        actual, wanted = ast.parse(call, mode="eval").body.elts  # type: ignore[attr-defined]
        try:
            if eval(ast.unparse(actual), space) != ast.literal_eval(wanted):
                return False
        except Exception:
            return False
    return bool(calls)


def test_a_seed_gives_the_same_tasks_again_and_another_seed_gives_others() -> None:
    assert list(islice(generate(7), 20)) == TASKS[:20]
    assert not {signature(t) for t in islice(generate(8), 20)} & {signature(t) for t in TASKS}


@pytest.mark.parametrize("task", TASKS[:60], ids=lambda task: task.id)
def test_the_tests_fail_with_the_bug_and_pass_with_the_fix(task: Task) -> None:
    path = module_path(task)
    assert not assertions_hold(task, task.files[path])
    assert assertions_hold(task, task.fix[path])


def test_a_bug_is_one_changed_line_and_small_enough_to_be_seen() -> None:
    for task in TASKS:
        bad, good = task.files[module_path(task)].splitlines(), task.fix[module_path(task)].splitlines()
        assert len(bad) == len(good)
        assert sum(a != b for a, b in zip(bad, good, strict=True)) == 1
        assert sum(len(line) + 8 for line in bad) <= MAX_CHARS + 8 * 2


def test_every_kind_of_bug_and_every_form_occurs() -> None:
    kinds = {fault.kind for form in FORMS for fault in form.faults}
    assert {task.meta["fault"] for task in islice(generate(1), 1500)} == kinds


def test_modules_that_are_taken_do_not_come_again() -> None:
    taken = {signature(task) for task in TASKS[:50]}
    assert not taken & {signature(task) for task in islice(generate(7, taken), 100)}


def test_the_signature_sees_through_names_and_docstrings_but_not_through_code() -> None:
    task = TASKS[0]
    path, text = module_path(task), task.files[module_path(task)]
    name = task.meta["function"]
    renamed = replace(task, files={**task.files, path: re.sub(rf"\b{name}\b", "another", text)})
    reworded = replace(task, files={**task.files, path: re.sub(r'"""[^"]*"""', '"""Other words."""', text)})
    mended = replace(task, files={**task.files, path: task.fix[path]})
    assert signature(renamed) == signature(task) == signature(reworded) != signature(mended)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.names[0])
def test_a_form_holds_its_faults_exactly_once_on_one_line(form: Form) -> None:
    for fault in form.faults:
        assert form.body.count(fault.good) == 1
        assert fault.good.strip("\n").count("\n") == fault.bad.strip("\n").count("\n") == 0
        assert fault.good != fault.bad


def test_the_packaged_tasks_are_enough_and_apart() -> None:
    train, heldout = load_tasks("builtin:repair/train"), load_tasks("builtin:repair/heldout")
    assert len(train) >= 400
    assert len(heldout) >= 100
    modules = {signature(task) for task in train}
    assert len(modules) == len(train)
    assert not modules & {signature(task) for task in heldout}
    assert not {t.files[module_path(t)] for t in train} & {t.files[module_path(t)] for t in heldout}
