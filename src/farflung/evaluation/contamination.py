"""No held-out task may have been trained on: neither its id nor its faulty module."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence

from farflung.core.errors import BadInput
from farflung.core.task import Task

SHOWN = 3


def require_disjoint(train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Raises BadInput naming the held-out tasks that share an id or a faulty module with training."""
    ids = {task.id for task in train}
    modules = {fingerprint(task): task.id for task in train}
    clashes = [f"{task.id} is a training task" for task in heldout if task.id in ids]
    clashes += [
        f"{task.id} has the faulty code of {modules[print_]}"
        for task in heldout
        if (print_ := fingerprint(task)) in modules and task.id not in ids
    ]
    if clashes:
        more = f", and {len(clashes) - SHOWN} more" if len(clashes) > SHOWN else ""
        raise BadInput(
            f"{len(clashes)} held-out tasks occur in training: {'; '.join(clashes[:SHOWN])}{more}",
            where="tasks.heldout",
            mend="leave them out of one of the two files",
        )


def fingerprint(task: Task) -> str:
    """A hash of the code that has the fault: the files that the reference fix touches, without layout or comments.

    Where no fix is known, of every file that the agent may change. File names do not count.
    """
    paths = task.fix or [path for path in task.files if path not in task.protected]
    texts = sorted(_normalised(path, task.files.get(path, "")) for path in paths)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _normalised(path: str, text: str) -> str:
    """Python code without comments, docstrings and layout; other text without blanks at the ends of lines and empty lines."""
    if path.endswith(".py"):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            pass
        else:
            return ast.dump(_Undocumented().visit(tree))
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


class _Undocumented(ast.NodeTransformer):
    """Drops statements that are only a string."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
