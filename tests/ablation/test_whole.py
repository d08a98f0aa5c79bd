"""Training recipes as ablations: what differs between the arms becomes keys of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.ablation.arms import GRID, Arm
from farflung.ablation.experiment import experiment_of, facts, read_experiment
from farflung.ablation.whole import Whole
from farflung.config import dump_recipe
from farflung.core.errors import BadInput

TEXT = """
[run]
name = "mine"
updates = 30
minutes = 4.0
[[pools]]
name = "nvfp4"
weights = "nvfp4"
kv = "fp8"
[[pools]]
name = "bf16"
"""


@pytest.fixture
def whole(tmp_path: Path) -> Whole:
    (tmp_path / "mine.toml").write_text(TEXT)
    read = read_experiment(tmp_path / "mine.toml", [("sampling.top_p", "0.9")])
    assert isinstance(read, Whole)
    return read


def test_a_training_recipe_is_known_as_one_and_survives_its_folder(whole: Whole) -> None:
    assert (whole.name, whole.updates, whole.fresh, whole.window) == ("ablation-mine", 30, 2, 6)
    assert whole.recipe.run.minutes is None
    assert experiment_of(facts(whole), "here") == whole


@pytest.mark.parametrize("arm", GRID, ids=lambda arm: arm.name)
def test_an_arm_changes_its_own_keys_and_no_other(whole: Whole, arm: Arm) -> None:
    made = whole.arm_recipe(arm, seed=7)
    assert (made.train.weight, made.train.centering) == ("mis" if arm.mis else "none", arm.sc)
    assert made.sampling.top_p == (0.9 if arm.top_p else 1.0)
    formats = ("bf16", "bf16") if arm.fleet == "homogeneous" else ("nvfp4", "fp8")
    assert (made.pools[0].weights, made.pools[0].kv) == formats
    plain, base = dump_recipe(made), dump_recipe(whole.recipe)
    for section, keys in (("train", ("weight", "centering")), ("sampling", ("top_p",)), ("run", ("seed",))):
        for key in keys:
            del plain[section][key], base[section][key]
    del plain["pools"], base["pools"]
    assert plain == base


def test_a_recipe_in_which_top_p_could_not_differ_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TEXT)
    with pytest.raises(BadInput, match=r"sampling.top_p is 1"):
        read_experiment(tmp_path / "mine.toml", [("sampling.top_p", "1.0")])
