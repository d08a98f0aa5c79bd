"""Everything that can be known to be wrong before a process is started, found in seconds and said in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.agents.dialect import Dialect
from farflung.config import Recipe
from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.evaluation.contamination import require_disjoint
from farflung.run.workspace import Workspace
from farflung.sandboxes import open_factory
from farflung.tasks.files import load_tasks


@dataclass(frozen=True, slots=True)
class Checked:
    """What a run needs to know of its inputs. ``task_file`` is what the workers load."""

    task_file: str
    train_tasks: tuple[str, ...]
    heldout: tuple[Task, ...]


def preflight(space: Workspace) -> Checked:
    """Model with chat template, tasks, their separation, sandbox. Raises BadInput or InfraError."""
    recipe = space.recipe
    dialect = Dialect.load(space.model, recipe.model.tool_format)
    train, heldout = load_tasks(recipe.tasks.train), load_tasks(recipe.tasks.heldout)
    require_disjoint(train, heldout)
    _require_room(dialect, train, recipe)
    open_factory(recipe.sandbox)
    limit = recipe.tasks.limit or len(train)
    return Checked(recipe.tasks.train, tuple(task.id for task in train[:limit]), tuple(heldout))


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
