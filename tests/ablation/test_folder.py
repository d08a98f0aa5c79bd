"""An ablation's folder: going on, refusing, reading what a killed run left."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from farflung.ablation.arms import GRID, Arm, choose
from farflung.ablation.experiment import read_experiment
from farflung.ablation.folder import Folder, Run
from farflung.ablation.page import draw_page
from farflung.ablation.small import Small
from farflung.ablation.summary import row, summarise, write_summary
from farflung.core.errors import BadInput, Corrupt
from tests.ablation.tiny import recipe, rows

TINY = Small(recipe())


def fill(folder: Folder, run: Run, updates: int | None = None) -> None:
    made = rows(TINY.recipe, run.arm, run.seed)[:updates]
    folder.rows_file(run).write_text("".join(json.dumps(row.to_dict()) + "\n" for row in made))


@pytest.mark.parametrize("arm", GRID, ids=lambda arm: arm.name)
def test_a_runs_name_says_which_it_is(arm: Arm) -> None:
    assert Run.parse(Run(arm, 12).name) == Run(arm, 12)


@pytest.mark.parametrize("name", ["foo", "mixed-GRPO", "mixed-GRPO-x", "mixed-GRPO-01", "mixed-PPO-0", "mixed-GRPO--1"])
def test_another_name_is_no_runs(name: str) -> None:
    assert Run.parse(name) is None


def test_a_folder_goes_on_with_its_recipe_and_refuses_another(tmp_path: Path) -> None:
    path = tmp_path / "a"
    Folder.open(path, TINY)
    assert Folder.open(path, TINY).experiment == TINY
    with pytest.raises(BadInput, match=r"train.std is false there, true here"):
        Folder.open(path, Small(recipe(train={"std": True})))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").touch()
    with pytest.raises(BadInput, match="there is something else"):
        Folder.open(tmp_path / "b", TINY)
    with pytest.raises(BadInput, match="no ablation is here"):
        Folder.load(tmp_path / "c")


def test_a_second_ablation_in_a_folder_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "a", TINY)
    with folder.locked():
        again = Folder.open(tmp_path / "a", TINY)
        with (
            pytest.raises(BadInput, match=r"a: this ablation is going on in another process\n  wait for it"),
            again.locked(),
        ):
            pass
    with folder.locked():
        assert Folder.open(tmp_path / "a", TINY) == folder


def test_a_row_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    folder, run = Folder.open(tmp_path / "a", TINY), Run(GRID[0], 0)
    assert folder.rows(run) == []
    fill(folder, run)
    assert folder.complete(run)
    file = folder.rows_file(run)
    file.write_text(file.read_text()[:-20])
    assert not folder.complete(run)
    assert len(folder.rows(run)) == TINY.updates - 1
    file.write_text("{}\n")
    with pytest.raises(Corrupt, match="delete it"):
        folder.rows(run)


def test_the_summary_holds_complete_runs_and_the_page_all_of_them(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "a", TINY)
    for seed in (0, 1):
        fill(folder, Run(Arm("mixed", sc=True, mis=True), seed))
    fill(folder, Run(Arm("homogeneous"), 0), updates=3)
    found = summarise(folder)
    assert [arm.arm.name for arm in found] == ["mixed/SC+MIS"]
    write_summary(found, tmp_path / "s.json")
    plain = json.loads((tmp_path / "s.json").read_text())["mixed/SC+MIS"]
    assert plain["seeds"] == [0, 1]
    assert {"start", "best", "final", "kl_growth", "collapse_step"} <= set(plain)
    assert plain["final"] == pytest.approx(sum(run["final"] for run in plain["runs"]) / 2, abs=1e-3)
    page = draw_page(folder).read_text()
    assert page.count("<svg") == 2 * 8 + 2 * 3
    assert 'class="band c4"' in page
    assert "homogeneous/GRPO" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_run_that_diverged_is_complete_and_marked_in_summary_and_page(tmp_path: Path) -> None:
    folder, arm = Folder.open(tmp_path / "a", TINY), Arm("mixed", mis=True)
    fill(folder, Run(arm, 0))
    for seed, updates in ((1, 4), (2, 0)):
        run = Run(arm, seed)
        fill(folder, run, updates)
        assert not folder.complete(run)
        folder.diverged_file(run).write_text("weights are not finite\n")
        assert folder.complete(run)
    found = summarise(folder)
    write_summary(found, tmp_path / "s.json")
    plain = json.loads((tmp_path / "s.json").read_text())["mixed/MIS"]
    assert (plain["seeds"], plain["diverged"]) == ([0, 1, 2], 2)
    assert [run["diverged_step"] for run in plain["runs"]] == [None, 5, 1]
    assert [run["collapse_step"] is None for run in plain["runs"][1:]] == [False, False]
    assert plain["runs"][2]["final"] is None
    assert plain["final"] == pytest.approx(sum(run["final"] for run in plain["runs"][:2]) / 2, abs=1e-3)
    assert "(2× NaN)" in row(found[0])[-1]
    page = draw_page(folder).read_text()
    assert "(2× NaN)" in page
    folder.clear(Run(arm, 1))
    assert not folder.complete(Run(arm, 1))


def test_a_pool_may_feed_nothing_to_an_update(tmp_path: Path) -> None:
    """The trainer's rows name only the pools that fed them, and not in the recipe's order."""
    folder, run = Folder.open(tmp_path / "a", TINY), Run(Arm("mixed"), 0)
    names = [pool.name for pool in TINY.pools("mixed")]
    fed = [names[1:], names[:1], names[::-1], [], names[2:3], names[:2]]
    made = [
        replace(row, pools={name: row.pools[name] for name in there})
        for row, there in zip(rows(TINY.recipe, run.arm), fed, strict=True)
    ]
    folder.rows_file(run).write_text("".join(json.dumps(row.to_dict()) + "\n" for row in made))
    page = draw_page(folder).read_text()
    assert all(f"&quot;n&quot;:&quot;{name}&quot;" in page for name in names)


def test_a_page_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    page = draw_page(Folder.open(tmp_path / "a", TINY)).read_text()
    assert "no run is complete yet" in page
    assert "<svg" not in page


def test_a_fleet_without_runs_has_no_charts_and_curves_reach_as_far_as_the_longest_run(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "a", TINY)
    fill(folder, Run(Arm("mixed"), 0))
    fill(folder, Run(Arm("mixed"), 1), updates=2)
    page = draw_page(folder).read_text()
    assert page.count("<svg") == 8 + 3
    assert "homogeneous fleet" not in page.lower()
    assert "Not complete: 1; the curves show those as far as they came, the table leaves them out." in page
    reward = json.loads(unescape(page.split('aria-label="Reward"')[1].split('data-points="')[1].split('"')[0]))
    assert [point[2] for point in reward["s"][0]["p"]] == ["1", "2", "3", "4", "5", "6"]


def test_arms_are_chosen_by_fleet_method_or_both() -> None:
    assert choose([]) == GRID
    assert [arm.name for arm in choose(["sc+mis", "homogeneous/GRPO"])] == [
        "mixed/SC+MIS", "homogeneous/GRPO", "homogeneous/SC+MIS",
    ]  # fmt: skip
    assert len(choose(["mixed"])) == 8
    with pytest.raises(BadInput) as caught:
        choose(["SC+MSI"])
    assert "did you mean 'SC+MIS'?" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nlagg = 3\n", "r.toml:2: unknown key 'train.lagg'\n  did you mean 'lag'?"),
        ("lag = 3\n", "did you mean 'train.lag'?"),
        ('[[mixed]]\nname = "a"\nkv = "int3"\n', "r.toml:3: mixed.a.kv should be 'bf16' or 'fp8'"),
        ("[model]\nwidth = 20\n", "model.width is 20; it needs to be a multiple of 2 x model.heads"),
        ("[train]\ngroups = 3\ngroup_size = 3\n", "do not divide"),
        ("[sampling]\ntop_p = 1.0\n", "sampling.top_p should be less than 1"),
        ("[train]\nlr = inf\n", "r.toml:2: train.lr should be a finite number"),
        ("[sampling]\ntemperature = inf\n", "r.toml:2: sampling.temperature should be a finite number"),
        ("[start]\nslip = nan\n", "r.toml:2: start.slip should be a finite number"),
    ],
)
def test_a_wrong_recipe_gets_one_error_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.toml").write_text(text + ('[[homogeneous]]\nname = "a"\n[[homogeneous]]\nname = "b"\n'))
    with pytest.raises(BadInput) as caught:
        read_experiment(tmp_path / "r.toml", [])
    assert said in str(caught.value)
