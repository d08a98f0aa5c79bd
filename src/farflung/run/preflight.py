"""Everything that can be known to be wrong before a process is started, found in seconds and said in one error."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from farflung.agents.dialect import Dialect
from farflung.config import Recipe
from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.evaluation.contamination import require_disjoint
from farflung.run.workspace import Workspace
from farflung.sandboxes import open_factory
from farflung.sandboxes.base import SandboxFactory
from farflung.tasks.files import BUILTIN, load_tasks
from farflung.tasks.validate import validate


@dataclass(frozen=True, slots=True)
class Checked:
    """What a run needs to know of its inputs. ``task_file`` is what the workers load."""

    task_file: str
    train_tasks: tuple[str, ...]
    heldout: tuple[Task, ...]


def preflight(space: Workspace, console: Console) -> Checked:
    """Model with chat template, tasks, their separation and soundness, sandbox. Raises BadInput or InfraError."""
    recipe = space.recipe
    dialect = Dialect.load(space.model, recipe.model.tool_format)
    train, heldout = load_tasks(recipe.tasks.train), load_tasks(recipe.tasks.heldout)
    require_disjoint(train, heldout)
    _require_room(dialect, train, recipe)
    factory = open_factory(recipe.sandbox)
    train = train[: recipe.tasks.limit]
    for name, tasks in ((recipe.tasks.train, train), (recipe.tasks.heldout, heldout[: recipe.eval.tasks])):
        if not name.startswith(BUILTIN):  # what is packaged was proven when it was made
            _prove(name, tasks, factory, recipe, console)
    return Checked(recipe.tasks.train, tuple(task.id for task in train), tuple(heldout))


def _prove(name: str, tasks: Sequence[Task], factory: SandboxFactory, recipe: Recipe, console: Console) -> None:
    """Every task's tests must fail before its fix and pass after it. Each is proven once on a machine, not in each run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farflung" / "proven"
    known: set[str] = set()
    with contextlib.suppress(OSError, UnicodeDecodeError):  # no cache, or none that can be read: prove them again
        known.update(cache.read_text().split())
    left = [task for task in tasks if _fingerprint(task) not in known]
    if not left:
        return
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(f"proving the tasks of {name}", total=len(left))
        try:
            asyncio.run(validate(left, factory, recipe.sandbox, progress=lambda done: bars.update(bar, completed=done)))
        except BadInput as error:
            raise BadInput(error.what, where=f"{name}, {error.where}", mend=error.mend) from None
    with contextlib.suppress(OSError):  # where nothing can be kept they are proven in every run
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.open("a") as file:
            file.writelines(f"{_fingerprint(task)}\n" for task in left)


def _fingerprint(task: Task) -> str:
    parts = [dict(task.files), list(task.tests), list(task.protected), dict(task.fix)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _require_room(dialect: Dialect, tasks: Sequence[Task], recipe: Recipe) -> None:
    """The longest statement must leave room for replies."""
    longest = max(tasks, key=lambda task: len(task.statement), default=None)
    if longest is None:
        raise BadInput("it holds no tasks", where=f"tasks.train {recipe.tasks.train}")
    opening = len(dialect.opening(dialect.instructions(), longest.statement))
    if opening >= recipe.agent.max_tokens:
        raise BadInput(
            f"the opening of task {longest.id} has {opening} tokens, agent.max_tokens is {recipe.agent.max_tokens}",
            where="agent.max_tokens",
            mend="raise agent.max_tokens",
        )
