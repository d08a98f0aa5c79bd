"""A signed run, its token, and the command to try on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.config import load_recipe
from farflung.run.workspace import Workspace
from farflung.weights import FolderStore
from farflung.weights.manifest import derive_key
from tests.cli.weights.kit import RECIPE, Run
from tests.weights.published import TOKEN, in_folder, publish


@pytest.fixture
def weights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``farflung weights ...`` here: exit code, stdout, stderr."""
    monkeypatch.delenv("FARFLUNG_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["weights", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A run of seven versions, signed."""
    return in_folder(tmp_path / "store")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def own_run(tmp_path: Path) -> Workspace:
    """A run's folder whose trainer has published."""
    Workspace.create(tmp_path / "run", load_recipe(RECIPE))
    space = Workspace.open(tmp_path / "run")
    publish(FolderStore(space.store), 3, run=space.run_id, key=derive_key(space.token))
    return space
