"""Validation proves tasks in the real sandbox and names the one that is not sound."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from farflung.config import SandboxConfig
from farflung.core.errors import BadInput
from farflung.sandboxes import open_factory, probe
from farflung.tasks.repair import generate, module_path
from farflung.tasks.validate import validate

pytestmark = pytest.mark.skipif(probe("bubblewrap") is not None, reason=str(probe("bubblewrap")))
CONFIG = SandboxConfig()
TASKS = list(islice(generate(11), 3))


async def test_sound_tasks_pass_and_progress_is_told() -> None:
    heard: list[int] = []
    await validate(TASKS, open_factory(CONFIG), CONFIG, progress=heard.append)
    assert heard == [1, 2, 3]


async def test_a_task_whose_tests_pass_before_the_fix_is_an_error_that_names_it() -> None:
    path = module_path(TASKS[1])
    mended = replace(TASKS[1], files={**TASKS[1].files, path: TASKS[1].fix[path]})
    with pytest.raises(BadInput, match="pass before the fix") as caught:
        await validate([TASKS[0], mended], open_factory(CONFIG), CONFIG)
    assert caught.value.where == f"task {mended.id}"


async def test_a_fix_that_does_not_help_is_an_error() -> None:
    path = module_path(TASKS[0])
    useless = replace(TASKS[0], fix={path: TASKS[0].files[path] + "\n# looked at\n"})
    with pytest.raises(BadInput, match="fail after the fix"):
        await validate([useless], open_factory(CONFIG), CONFIG)


async def test_a_task_without_a_fix_cannot_be_proved() -> None:
    with pytest.raises(BadInput, match="no reference fix"):
        await validate([replace(TASKS[0], fix={})], open_factory(CONFIG), CONFIG)
