"""A run's folder: made whole, opened only if it is one, and never a traceback for what is wrong with it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.config import PoolConfig, Recipe, TasksConfig
from farflung.core.errors import BadInput
from farflung.run.ledger import Ledger
from farflung.run.workspace import Workspace


def test_what_was_made_opens_again(tmp_path: Path) -> None:
    made = Workspace.create(tmp_path / "a run", Recipe())
    assert Workspace.open(tmp_path / "a run") == made
    assert stat.S_IMODE(made.token_file.stat().st_mode) == 0o600
    assert len(made.token) >= 32
    assert sorted(path.name for path in made.path.iterdir()) == ["recipe.json", "token"]
    Ledger(made.path).close()
    with pytest.raises(BadInput, match="a run is here already"):
        Workspace.create(tmp_path / "a run", Recipe())
    assert Workspace.open(tmp_path / "a run") == made


def test_a_run_that_never_began_is_made_anew_with_another_recipe(tmp_path: Path) -> None:
    """Its input was wrong: the mended recipe may take the same folder."""
    Workspace.create(tmp_path, Recipe(tasks=TasksConfig(train="/wrong.jsonl")))
    Workspace.create(tmp_path, Recipe(tasks=TasksConfig(train="/right.jsonl")))
    assert Workspace.open(tmp_path).recipe.tasks.train == "/right.jsonl"


def test_a_run_that_was_killed_while_it_was_made_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    (tmp_path / ".recipe.json.1.tmp").write_text("{")
    assert len(Workspace.create(tmp_path, Recipe()).token) >= 32


def test_the_store_has_one_name_wherever_the_run_is_called_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Workspace.create(Path("a:b"), Recipe()).store == str(tmp_path / "a:b" / "store")


def test_the_files_of_a_recipe_are_found_wherever_the_run_is_gone_on_with_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolConfig(name="a", weights="bf16", engine="paced", tokens_per_second=10, replay="old/episodes")
    recipe = Recipe(tasks=TasksConfig(train="mine.jsonl"), pools=(pool,))
    monkeypatch.chdir(tmp_path)
    Workspace.create(Path("run"), recipe)
    kept = Workspace.open(tmp_path / "run").recipe
    assert kept.tasks.train == str(tmp_path / "mine.jsonl")
    assert kept.tasks.heldout == Recipe().tasks.heldout
    assert kept.pools[0].replay == str(tmp_path / "old" / "episodes")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a run's recipe"),
        ("[]", "not a run's recipe"),
        ("null", "not a run's recipe"),
        ('{"recipe": 3, "model": "m", "run_id": "i"}', "a recipe is a table"),
        ('{"recipe": {}, "model": 3, "run_id": "i"}', "not a run's recipe"),
        ('{"recipe": {"run": {"updates": "x"}}, "model": "m", "run_id": "i"}', "run.updates should be a valid integer"),
        ('{"recipe": {"trian": {}}, "model": "m", "run_id": "i"}', "did you mean 'train'"),
    ],
)
@pytest.mark.parametrize("argv", [["train", "--resume"], ["report"], ["eval", "--start"]])
def test_a_damaged_recipe_is_one_clear_error(
    tmp_path: Path, text: str, says: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path).close()
    (tmp_path / "recipe.json").write_text(text)
    assert main([*argv, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"farflung: {tmp_path / 'recipe.json'}: ")
    assert says in said
    assert len(said.splitlines()) <= 2


@pytest.mark.parametrize("argv", [["train", "--resume"], ["report"], ["eval", "--start"]])
def test_a_damaged_ledger_is_one_clear_error_and_stays_as_it_is(
    tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Workspace.create(tmp_path, Recipe())
    (tmp_path / "ledger.sqlite").write_bytes(b"nothing like a ledger" * 500)
    assert main([*argv, str(tmp_path)]) == 2
    assert f"{tmp_path / 'ledger.sqlite'}: not a ledger" in capsys.readouterr().err
    assert (tmp_path / "ledger.sqlite").read_bytes() == b"nothing like a ledger" * 500


def test_a_ledger_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(BadInput, match="the ledger cannot be opened"):
        Ledger(tmp_path)


@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_a_run_without_its_token_says_so(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    space = Workspace.create(tmp_path, Recipe())
    space.token_file.unlink()
    if damage == "empty":
        space.token_file.touch()
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert f"farflung: {space.token_file}: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        assert main(["train", "builtin:quickstart", "--dir", str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"farflung: {folder}: no run can be made here: ")
        assert "--dir" in said


def test_a_folder_is_no_recipe_and_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path)]) == 2
    assert "it is a folder; a recipe is a TOML file" in capsys.readouterr().err
    Workspace.create(tmp_path / "run", Recipe())
    Ledger(tmp_path / "run").close()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_what_the_system_refuses_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(argv: Any) -> int:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("farflung.cli.main._dispatch", refused)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "farflung: somewhere: Permission denied\n"


def test_a_run_that_has_not_begun_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = Workspace.create(tmp_path, Recipe())
    assert json.loads((tmp_path / "recipe.json").read_text())["run_id"] == space.run_id
    assert main(["eval", str(tmp_path)]) == 2
    assert "the run has made no policy yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "none that has begun" in capsys.readouterr().err
