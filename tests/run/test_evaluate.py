"""Evaluating a model that belongs to no run: what is left behind, and where an error points."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from farflung.cli.main import main
from farflung.config import EvalConfig, Recipe
from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.evaluation.held_out import EvalResult
from farflung.run.evaluate import evaluate_model
from farflung.run.ledger import Ledger
from farflung.run.workspace import Workspace, resolve_model
from farflung.tasks.files import load_tasks

QUIET = Console(quiet=True)
RECIPE = Recipe(eval=EvalConfig(tasks=1, samples=1))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("builtin:repair-1m"), tmp_path / "model"))


@pytest.fixture
def tasks() -> list[Task]:
    return load_tasks(RECIPE.tasks.heldout)


def test_a_good_model_leaves_nothing_behind(model: Path, tasks: list[Task], scratch: Path) -> None:
    assert evaluate_model(model, RECIPE, tasks, name="it", console=QUIET).version == 0
    assert list(scratch.iterdir()) == []


def test_a_broken_model_is_one_error_that_names_a_log_which_is_there(
    model: Path, tasks: list[Task], scratch: Path
) -> None:
    (model / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(BadInput, match="safetensors") as caught:
        evaluate_model(model, RECIPE, tasks, name="it", console=QUIET)
    named = re.search(r"see (\S+\.log)", str(caught.value))
    assert named is not None
    assert "safetensors" in Path(named[1]).read_text()
    assert [path.name for path in scratch.rglob("token")] == []


def test_a_model_without_a_template_starts_nothing(model: Path, tasks: list[Task], scratch: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match="no chat template"):
        evaluate_model(model, RECIPE, tasks, name="it", console=QUIET)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("changed", [False, True])
def test_only_what_was_measured_as_the_recipe_says_is_recorded(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farflung.run import evaluate as module

    space = Workspace.create(tmp_path / "run", RECIPE)
    Ledger(space.path).close()
    monkeypatch.setattr(module, "evaluate_policy", lambda *given, **more: EvalResult(0, {}, {}, {}, 0, 0, 0, 0))
    assert main(["eval", str(space.path), "--start", *(["--eval.tasks", "2"] if changed else [])]) == 0
    ledger = Ledger(space.path)
    assert (ledger.evaluation("before") is None) == changed
    ledger.close()
