"""farflung weights: one clear error for each thing that is asked for wrongly, and where runs and keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.cli.weights import ACTIONS
from farflung.config import load_recipe
from farflung.run.workspace import Workspace
from farflung.weights import FolderStore
from tests.cli.weights.kit import RECIPE, Run, write
from tests.weights.published import TOKEN, publish


def test_every_action_explains_itself(weights: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ACTIONS:
        with pytest.raises(SystemExit) as end:
            main(["weights", action, "--help"])
        assert not end.value.code
        shown = capsys.readouterr().out
        assert f"usage: farflung weights {action}" in shown
        assert f"\nexamples:\n  farflung weights {action}" in shown
        assert action in weights()[1]


@pytest.mark.parametrize("action", ["ls", "verify", "gc --keep 1", "compact", "materialize --out x", "serve --cache x"])
@pytest.mark.parametrize("where", ["{} {}", "--store {} {}"])
def test_a_store_that_is_not_there(weights: Run, token: Path, tmp_path: Path, action: str, where: str) -> None:
    name, *rest = action.split()
    given = where.format(tmp_path / "nowhere", 0 if name == "materialize" else "").split()
    code, _, said = weights(name, *given, *rest, "--token-file", token)
    assert code == 2
    assert f"{tmp_path / 'nowhere'}: no such folder\n  give a store's folder or URL" in said
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["lss"], "weights: unknown action 'lss'\n  did you mean 'ls'?"),
        (["ls"], "weights ls: a store is needed\n  farflung weights ls STORE"),
        (["ls", "a", "--store", "b"], "weights ls: two stores are given: a and b"),
        (["ls", "{store}", "--last", "-1"], "--last: -1 is out of range\n  at least 0"),
        (["ls", "{store}", "--lst", "1"], "unknown argument '--lst'\n  did you mean '--last'?"),
        (["ls", "ftp://x"], "no store can be opened at 'ftp://x'"),
        (["ls", "{store}"], "run r1: the run is signed, and there is no key to check it with\n  give --key-file FILE"),
        (["ls", "{store}", "--key-file", "{none}"], "cannot read the token: No such file"),
        (["ls", "{store}", "--key-file", "{empty}"], "no token"),
        (["ls", "{store}", "--key-file", "{other}"], "signed with another key"),
        (["ls", "{store}", "--key-file", "{other}", "--no-key"], "--key-file and --no-key are given"),
        (["ls", "{store}", "--run-id", "r2"], "no run 'r2' has published here\n  did you mean 'r1'? runs here: r1"),
        (["ls", "{store}", "--run-id", "a/b"], "'a/b' is not the name of a run"),
        (["ls", "{other}"], "the store is not a folder"),
        (["ls", "{empty_folder}"], "no run has published here"),
        (["verify", "{store}", "--last", "0"], "--last: 0 is out of range"),
        (["verify", "{store}"], "there is no key to check it with"),
        (["gc", "{store}"], "the following arguments are required: --keep"),
        (["gc", "{store}", "--keep", "0", "--no-key"], "--keep: 0 is out of range"),
        (["gc", "{store}", "--keep", "1"], "there is no key to check it with"),
        (["gc", "{store}", "--keep", "1", "--live-seconds", "nan"], "--live-seconds: nan is out of range"),
        (["gc", "{store}", "--keep", "1", "--key-file", "{other}"], "signed with another key"),
        (["compact", "{store}", "--no-key"], "there is no key to check it with\n  give --key-file FILE"),
        (["compact", "{store}", "--key-file", "{other}"], "signed with another key"),
        (["compact", "{store}", "--key-file", "{token}", "--levels", "0"], "0 levels; 1 to 30 make sense"),
        (["compact", "{store}", "--interval", "0"], "--interval: 0 is out of range"),
        (["materialize", "{store}", "--out", "x"], "a version is needed\n  farflung weights materialize STORE VERSION"),
        (["materialize", "{store}", "newest", "--out", "x"], "'newest' is not a version"),
        (["materialize", "{store}", "-1", "--out", "x"], "'-1' is not a version"),
        (["materialize", "{store}", "0"], "the following arguments are required: --out"),
        (["materialize", "{store}", "0", "--out", "{out}"], "there is no key to check it with"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--format", "int4"], "invalid choice: 'int4'"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--format", "mxfp4"], "not published as 'mxfp4'"),
        (["materialize", "{store}", "7", "--out", "{out}", "--no-key"], "version 7 does not exist; the newest is 6"),
        (["materialize", "{store}", "0", "--out", "{full}", "--no-key"], "the folder is not empty; nothing was written"),
        (["materialize", "{store}", "0", "--out", "{other}", "--no-key"], "it is a file"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--model", "{full}"], "no config.json"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--shard-gb", "inf"], "--shard-gb: inf is out"),
        (["serve", "{store}", "--token-file", "{token}"], "the following arguments are required: --cache"),
        (["serve", "{store}", "--cache", "{out}"], "no token"),
        (["serve", "{store}", "--cache", "{out}", "--token-file", "{token}", "--limit-gb", "0"], "--limit-gb: 0 is out"),
        (["serve", "{store}", "--cache", "{other}", "--token-file", "{token}"], "{other}"),
        (["serve", "{store}", "--cache", "{out}", "--token-file", "{token}", "--port", "99999"], "cannot listen"),
    ],
)  # fmt: skip
def test_what_is_asked_for_wrongly_gets_one_clear_error(
    weights: Run, store: FolderStore, token: Path, tmp_path: Path, argv: list[str], said: str
) -> None:
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "mine", "precious")
    (tmp_path / "empty_folder").mkdir()
    names = {
        "store": store.root, "token": token, "other": write(tmp_path / "other", "another-word"),
        "empty": write(tmp_path / "empty", ""), "empty_folder": tmp_path / "empty_folder", "none": tmp_path / "none",
        "out": tmp_path / "out", "full": tmp_path / "full",
    }  # fmt: skip
    code, _, error = weights(*(word.format(**names) for word in argv))
    assert code == 2
    assert error.startswith("farflung: ")
    assert said.format(**names) in error
    assert "Traceback" not in error
    assert TOKEN not in error
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_store_of_several_runs_wants_one_named(weights: Run, store: FolderStore, token: Path) -> None:
    publish(store, 1, run="r2", key=None)
    (store.root / "notes").mkdir()
    code, _, said = weights("ls", store.root)
    assert code == 2
    assert "the store holds 2 runs\n  --run-id says which: r1, r2" in said
    assert weights("ls", store.root, "--run-id", "r2")[0] == 0
    code, _, said = weights("ls", store.root, "--run-id", "r2", "--key-file", token)
    assert code == 2
    assert "it is not signed" in said


def test_the_key_may_come_from_the_environment(
    weights: Run, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARFLUNG_TOKEN", TOKEN)
    assert weights("ls", store.root)[0] == 0
    monkeypatch.setenv("FARFLUNG_TOKEN", "another-word")
    assert weights("ls", store.root)[0] == 2


def test_the_folder_of_a_run_knows_its_store_its_run_and_its_key(
    weights: Run, own_run: Workspace, tmp_path: Path
) -> None:
    publish(FolderStore(own_run.store), 1, run="another", key=None)
    for place in (own_run.path, own_run.path / "store"):
        code, shown, _ = weights("ls", place)
        assert code == 0
        assert f"run {own_run.run_id}, newest version 2, signed" in shown
    assert weights("verify", own_run.path)[0] == 0
    assert weights("ls", own_run.path, "--run-id", "another")[0] == 2  # which is not signed with the run's key
    code, shown, _ = weights("materialize", own_run.path, "latest", "--out", tmp_path / "out")
    assert code == 0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_a_run_that_has_published_nothing_says_so(weights: Run, tmp_path: Path) -> None:
    Workspace.create(tmp_path / "run", load_recipe(RECIPE))
    code, _, said = weights("verify", tmp_path / "run")
    assert code == 2
    assert "the run has published nothing yet" in said
