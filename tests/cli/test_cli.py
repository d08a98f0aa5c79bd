"""The command line as a person meets it: every command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.cli.args import split_overrides
from farflung.cli.main import COMMANDS, main
from farflung.config import Recipe, load_recipe
from farflung.config.write import recipe_toml
from farflung.evaluation.held_out import EvalResult
from farflung.run.preflight import Checked
from farflung.run.train import Outcome


def farflung(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farflung.cli.main", *argv],
        capture_output=True, text=True, cwd=cwd, timeout=60, env=os.environ | {"COLUMNS": "140"},
    )  # fmt: skip


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom farflung.cli.main import main\nmain(['--help'])\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'numpy', 'rich', 'aiohttp'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    for command in COMMANDS:
        assert f"\n  {command}" in shown
    assert shown.endswith("[]\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_without_torch(command: str) -> None:
    code = (
        f"import sys\nfrom farflung.cli.main import main\ntry:\n    main(['{command}', '--help'])\nexcept SystemExit as end:\n"
        "    assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"usage: farflung {command}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "unknown command 'trian'\n  did you mean 'train'?"),
        (["train"], "train: either a recipe or --resume is needed"),
        (
            ["train", "builtin:quickstart", "--dri-run"],
            "train: unknown argument '--dri-run'\n  did you mean '--dry-run'?",
        ),
        (["train", "builtin:quickstar"], "no packaged recipe 'quickstar'\n  did you mean 'quickstart'?"),
        (["train", "nowhere.toml"], "nowhere.toml: no such recipe"),
        (["train", "--resume", "nowhere"], "nowhere: no run is here"),
        (["train", "--resume", "x", "--train.lr", "1"], "a run goes on with the recipe and the folder that it has"),
        (["quickstart", "--train.lrr", "1"], "--train.lrr: unknown key 'train.lrr'\n  did you mean 'lr'?"),
        (["quickstart", "--updates", "many"], '--run.updates: run.updates should be a valid integer, not "many"'),
        (["quickstart", "--summary", "no/where.json"], "--summary no/where.json: the folder no is not there"),
        (["report", "nowhere"], "nowhere: no run is here"),
        (["report"], "report: the following arguments are required: run"),
        (["eval", "./nowhere"], "model.path ./nowhere: no such folder"),
        (["doctor", "nowhere.toml"], "nowhere.toml: no such recipe"),
    ],
)
def test_what_is_asked_for_wrongly_gets_one_clear_error(argv: list[str], said: str, tmp_path: Path) -> None:
    done = farflung(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("farflung: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_init_writes_the_default_recipe_and_never_over_another(tmp_path: Path) -> None:
    done = farflung("init", "my.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "my.toml").read_text()
    assert load_recipe(tmp_path / "my.toml") == Recipe()
    assert "# AdamW learning rate, constant after warm-up." in text
    again = farflung("init", "my.toml", cwd=tmp_path)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert (tmp_path / "my.toml").read_text() == text


def test_a_dry_run_starts_nothing_and_prints_a_recipe_that_loads(tmp_path: Path) -> None:
    done = farflung("quickstart", "--dry-run", "--updates", "3", "--pools.nvfp4.replicas=2", "--sync", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "2 x sampler nvfp4" in done.stdout
    assert "as 8 processes" in done.stdout
    (tmp_path / "printed.toml").write_text(done.stdout)
    recipe = load_recipe(tmp_path / "printed.toml")
    assert (recipe.run.updates, recipe.run.sync, recipe.pools[0].replicas) == (3, True, 2)


def test_every_recipe_that_is_shipped_loads() -> None:
    root = Path(__file__).parents[2]
    found = [*root.glob("recipes/*.toml"), *root.glob("src/farflung/assets/recipes/*.toml")]
    assert {path.stem for path in found} >= {"quickstart", "smollm2-135m"}
    for path in found:
        recipe = load_recipe(path)
        assert recipe.run.name == path.stem


def test_the_quickstart_has_three_pools_in_three_precisions() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "src/farflung/assets/recipes/quickstart.toml")
    formats = {pool.name: (pool.weights, pool.kv) for pool in recipe.pools}
    assert formats == {"nvfp4": ("nvfp4", "fp8"), "fp8": ("fp8", "fp8"), "bf16": ("bf16", "bf16")}


@pytest.mark.parametrize("explain", [False, True])
def test_a_written_recipe_reads_back_to_the_same(tmp_path: Path, explain: bool) -> None:
    source = Path(__file__).parents[2] / "src/farflung/assets/recipes/quickstart.toml"
    recipe = load_recipe(source, [("run.minutes", "4.5"), ("model.path", 'a "b" \\ ü'), ("run.sync", "true")])
    (tmp_path / "r.toml").write_text(recipe_toml(recipe, explain=explain))
    assert load_recipe(tmp_path / "r.toml") == recipe


def test_doctor_looks_at_everything_and_its_exit_code_tells() -> None:
    done = farflung("doctor")
    for name in ("Python", "cores and threads", "memory", "disk", "loopback", "torch", "sandbox", "model", "tasks"):
        assert f" {name} " in done.stdout, done.stderr
    failed = done.stdout.count("\n  fail ") + done.stdout.startswith("  fail ")
    assert f"{failed} of 10 checks failed" in done.stdout
    assert done.returncode == (1 if failed else 0)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("farflung.cli.main._dispatch", interrupted)
    assert main(["quickstart"]) == 130
    assert capsys.readouterr().err == "\nfarflung: stopped\n"


@pytest.mark.parametrize("during", ["evaluate_policy", "train"])
def test_a_stopped_quickstart_says_how_to_go_on(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from farflung.run import quickstart as module

    def stopped(*given: object, **more: object) -> Outcome:
        if during == "train":
            return Outcome(3, 1.0, 1, "stopped by hand")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "preflight", lambda space, console: Checked("", (), ()))
    monkeypatch.setattr(module, "evaluate_policy", lambda *given, **more: EvalResult(0, {}, {}, {}, 0, 0, 0, 0))
    monkeypatch.setattr(module, during, stopped)
    assert main(["quickstart", "--dir", str(tmp_path / "run")]) == 130
    assert f"farflung train --resume {tmp_path / 'run'}" in capsys.readouterr().err


def test_dotted_flags_are_taken_out_wherever_they_stand() -> None:
    argv = ["--train.lr", "1e-6", "r.toml", "--run.sync", "--pools.a-b.kv=fp8", "--dir", "x", "--run.name", "-1"]
    rest, overrides = split_overrides(argv)
    assert rest == ["r.toml", "--dir", "x"]
    assert overrides == [("train.lr", "1e-6"), ("run.sync", "true"), ("pools.a-b.kv", "fp8"), ("run.name", "-1")]
