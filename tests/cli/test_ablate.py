"""farflung ablate as a person meets it: two arms, stopped, gone on with, asked for wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.ablation.arms import Arm
from farflung.ablation.folder import Folder, Run
from farflung.ablation.recipe import AblationRecipe
from farflung.ablation.small import Small
from farflung.config.load import load_tree

TINY = """
[ablation]
name = "tiny"
updates = 6
window = 2

[task]
symbols = 3
length = 2
attempts = 2

[model]
width = 16
heads = 2
mlp = 32

[start]
updates = 50
lr = 1e-2

[train]
groups = 8
group_size = 4

[[mixed]]
name = "nvfp4"
weights = "nvfp4"
kv = "fp8"

[[mixed]]
name = "bf16"
"""


def ablate(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farflung.cli.main", "ablate", *argv],
        capture_output=True, text=True, cwd=cwd, timeout=110, env=os.environ | {"COLUMNS": "140"},
    )  # fmt: skip


def test_two_arms_run_and_a_run_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ["tiny.toml", "--arms", "mixed/GRPO", "mixed/SC+MIS+top-p", "--summary", "s.json"]
    done = ablate(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    folder = tmp_path / "runs" / "tiny"
    first = json.loads((tmp_path / "s.json").read_text())
    assert list(first) == ["mixed/GRPO", "mixed/SC+MIS+top-p"]
    assert (folder / "report.html").is_file()
    cut, whole = (folder / "runs" / f"mixed-{method}-0.jsonl" for method in ("GRPO", "SC+MIS+top-p"))
    text, kept = cut.read_text(), whole.stat().st_mtime_ns
    cut.write_text(text[: len(text) // 2])
    again = ablate(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "1 of 2 runs are there already" in again.stdout
    assert cut.read_text() == text
    assert whole.stat().st_mtime_ns == kept
    assert json.loads((tmp_path / "s.json").read_text()) == first


def test_runs_that_diverge_are_results(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ["tiny.toml", "--arms", "GRPO", "--train.lr", "1e38", "--summary", "s.json"]
    done = ablate(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("diverged after") == 2
    found = json.loads((tmp_path / "s.json").read_text())
    assert [arm["diverged"] for arm in found.values()] == [1, 1]
    assert "(1× NaN)" in done.stdout
    assert "2 of 2 runs are there already" in ablate(*command, cwd=tmp_path).stdout


def test_damage_in_the_folder_gets_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    folder = Folder.open(tmp_path / "runs" / "tiny", Small.load(tmp_path / "tiny.toml", []))
    (folder.path / "runs" / "foo.jsonl").write_text("{}\n")
    (folder.path / "start.safetensors").write_bytes(b"short")
    done = ablate("tiny.toml", "--arms", "mixed/GRPO", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs/tiny/runs/foo.jsonl is left out: no run is called so" in done.stdout
    assert "start.safetensors: the first policy cannot be read" in done.stderr
    assert "delete it" in done.stderr
    assert "Traceback" not in done.stderr
    assert folder.report.is_file()


def test_a_second_ablation_in_the_folder_leaves_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    folder = Folder.open(tmp_path / "runs" / "tiny", Small.load(tmp_path / "tiny.toml", []))
    run = Run(Arm("mixed"), 0)
    folder.rows_file(run).write_text("half a row")
    with folder.locked():
        done = ablate("tiny.toml", "--arms", "mixed/GRPO", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs/tiny: this ablation is going on in another process" in done.stderr
    assert folder.rows_file(run).read_text() == "half a row"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--arms", "GPRO"], "--arms: no arm 'GPRO'\n  did you mean 'GRPO'?"),
        (["--train.lrr", "1"], "--train.lrr: unknown key 'train.lrr'\n  did you mean 'lr'?"),
        (["builtin:ablatoin"], "no packaged recipe 'ablatoin'\n  did you mean 'ablation'?"),
        (["nowhere.toml"], "nowhere.toml: no such recipe\n  farflung ablate --dry-run prints one to start from"),
        (["--seeds", "0"], "--seeds: 0 is too few"),
        (["--summary", "no/where.json"], "the folder no is not there"),
        (["--sed", "1"], "ablate: unknown argument '--sed'\n  did you mean '--seeds'?"),
    ],
)
def test_what_is_asked_for_wrongly_gets_one_clear_error(argv: list[str], said: str, tmp_path: Path) -> None:
    done = ablate(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_fleets_that_are_the_same_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.split("[[mixed]]")[0])
    (tmp_path / "whole.toml").write_text('[run]\nupdates = 3\n[[pools]]\nname = "bf16"\n')
    for recipe in ("tiny.toml", "whole.toml"):
        done = ablate(recipe, "--dry-run", cwd=tmp_path)
        assert done.returncode == 2
        assert f"{recipe}: the mixed and the homogeneous fleet serve the same formats" in done.stderr
        assert ablate(recipe, "--dry-run", "--arms", "homogeneous", cwd=tmp_path).returncode == 0


def test_a_dry_run_prints_the_runs_and_a_recipe_that_loads(tmp_path: Path) -> None:
    done = ablate("--dry-run", "--seeds", "2", "--train.std", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "32 runs in runs/ablation" in done.stdout
    (tmp_path / "printed.toml").write_text(done.stdout)
    assert load_tree(AblationRecipe, tmp_path / "printed.toml").train.std
