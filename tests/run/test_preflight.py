"""What is wrong with a run's inputs is said before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from farflung.config import EvalConfig, ModelConfig, Recipe, TasksConfig
from farflung.core.errors import BadInput
from farflung.run.preflight import preflight
from farflung.run.workspace import Workspace, resolve_model
from farflung.tasks.files import load_tasks, save_tasks

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def space(folder: Path, *, model: str = "builtin:repair-1m", tasks: TasksConfig | None = None) -> Workspace:
    recipe = Recipe(model=ModelConfig(path=model), tasks=tasks or TasksConfig(), eval=EvalConfig(tasks=1))
    return Workspace.create(folder / "run", recipe)


def own_tasks(folder: Path, *, sound: bool) -> TasksConfig:
    task = load_tasks("builtin:repair/train")[0]
    if not sound:
        task = replace(task, files={**task.files, **task.fix})
    save_tasks(folder / "train.jsonl", [task])
    return TasksConfig(train=str(folder / "train.jsonl"))


def test_packaged_inputs_pass(tmp_path: Path) -> None:
    checked = preflight(space(tmp_path), QUIET)
    assert len(checked.train_tasks) >= 400
    assert len(checked.heldout) >= 100


def test_a_sound_task_is_proven_once(tmp_path: Path) -> None:
    here = space(tmp_path, tasks=own_tasks(tmp_path, sound=True))
    preflight(here, QUIET)
    proven = (tmp_path / "cache" / "farflung" / "proven").read_text()
    assert len(proven.split()) == 1
    preflight(here, QUIET)
    assert (tmp_path / "cache" / "farflung" / "proven").read_text() == proven


def test_a_task_whose_tests_pass_before_the_fix_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"train.jsonl, task repair-\S+: its tests pass before the fix"):
        preflight(space(tmp_path, tasks=own_tasks(tmp_path, sound=False)), QUIET)
    assert not (tmp_path / "cache" / "farflung" / "proven").exists()


def test_a_cache_that_cannot_be_written_costs_only_another_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert preflight(space(tmp_path, tasks=own_tasks(tmp_path, sound=True)), QUIET).train_tasks


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin:repair-1m"), model)
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    with pytest.raises(BadInput, match="no chat template"):
        preflight(space(tmp_path, model=str(model)), QUIET)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("builtin:nothing", "no packaged policy"),
        ("just-a-name", "no such folder"),
    ],
)
def test_a_model_that_is_not_there_is_named(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        space(tmp_path, model=name)
    assert name in str(caught.value)
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_heldout_task_in_training_is_named(tmp_path: Path) -> None:
    shared = load_tasks("builtin:repair/heldout")[0]
    save_tasks(tmp_path / "train.jsonl", [shared])
    with pytest.raises(BadInput, match=shared.id):
        preflight(space(tmp_path, tasks=TasksConfig(train=str(tmp_path / "train.jsonl"))), QUIET)
