"""A run: the arms differ in what they are meant to differ in, and in nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from farflung.ablation.arms import FLEETS, GRID, Arm, Fleet
from farflung.ablation.model import Shape
from farflung.ablation.recipe import AblationRecipe
from farflung.ablation.sampler import sample, served
from farflung.ablation.small import Small
from farflung.ablation.start import make_start
from farflung.ablation.task import Sorting
from farflung.ablation.trial import Trainer, run_arm
from farflung.core.errors import Diverged
from farflung.core.metrics import UpdateMetrics
from tests.ablation.tiny import recipe, rows, start

RECIPE = recipe()


def test_a_run_is_its_seeds_and_no_other() -> None:
    arm = Arm("mixed", sc=True, mis=True)
    first = rows(RECIPE, arm, 1)
    assert len(first) == RECIPE.ablation.updates
    assert first == rows(RECIPE, arm, 1)
    assert first != rows(RECIPE, arm, 2)


@pytest.mark.parametrize("arm", GRID, ids=lambda arm: arm.name)
def test_every_arm_runs_and_reports_what_its_pools_did(arm: Arm) -> None:
    made = rows(RECIPE, arm)
    pools = RECIPE.mixed if arm.fleet == "mixed" else RECIPE.homogeneous
    for row in made:
        assert list(row.pools) == [pool.name for pool in pools]
        assert sum(pool.samples for pool in row.pools.values()) == row.all.samples == 32
        assert sum(pool.tokens for pool in row.pools.values()) == row.all.tokens
        assert row.trained_groups + row.skipped_groups == 8
        assert 3 <= row.length <= 9
    assert [row.all.staleness for row in made] == [0, 1, 2, 2, 2, 2]
    assert sum(row.grad_norm for row in made) > 0


def test_all_arms_begin_with_the_same_batches() -> None:
    first = [rows(RECIPE, arm)[0] for arm in GRID if arm.fleet == "mixed" and not arm.top_p]
    assert len({row.all.reward for row in first}) == 1
    assert len({row.all.kl for row in first}) == 1
    assert len({row.grad_norm for row in first}) > 1


def test_weights_of_one_make_centering_exact_and_idle() -> None:
    """When trainer and sampler agree, masking masks nothing and the expected score is zero: all updates are alike."""
    exact = recipe(train={"lag": 0}).model_copy(update={"mixed": RECIPE.homogeneous})
    task = Sorting.of(exact.task)
    shape = Shape.of(exact.model, task.vocabulary)
    weights = {name: tensor.bfloat16().float() for name, tensor in start(exact).items()}
    prompts = task.prompts(8, torch.Generator().manual_seed(0)).repeat_interleave(4, 0)
    batch = sample(
        served(weights, shape, exact.mixed), task, exact.mixed, prompts, temperature=1.0, top_p=1.0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    norms = []
    for arm in (Arm("mixed"), Arm("mixed", mis=True), Arm("mixed", sc=True, mis=True)):
        row = Trainer(exact, arm, shape, task, weights).step(batch, ["one", "two"])
        assert row.all.kl < 1e-4
        norms.append(row.grad_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=0.02)


def test_a_batch_without_variance_changes_nothing() -> None:
    hard = recipe(task={"symbols": 40, "length": 12, "attempts": 1})
    for row in rows(hard, Arm("mixed")):
        assert (row.grad_norm, row.trained_groups, row.trained_tokens) == (0, 0, 0)
        assert row.all.tokens == 32 * 13  # measured all the same


def test_sgd_and_warm_up_are_followed() -> None:
    slow = recipe(train={"optimizer": "sgd", "warmup": 3, "lr": 0.1})
    assert [row.lr for row in rows(slow, Arm("mixed"))] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("lr", [1e38, 1e30])
def test_a_policy_that_is_not_finite_ends_the_run_after_its_last_row(fleet: Fleet, lr: float) -> None:
    wild = recipe(train={"optimizer": "sgd", "lr": lr, "clip": 1e30}, ablation={"updates": 30})
    made = run_arm(wild, Arm(fleet), Small(wild).pools(fleet), 0, start(wild))
    told: list[UpdateMetrics] = []
    with pytest.raises(Diverged, match="not finite"):
        told.extend(made)
    assert 1 <= len(told) < 30
    assert math.isfinite(told[-1].all.reward)


def test_the_first_policy_learns_what_it_is_shown_with_its_mistakes() -> None:
    def solved(made: AblationRecipe) -> float:
        """The first batch's reward of a run from a first policy."""
        weights = make_start(made, lambda step: None)
        assert all(tensor.shape[0] == 1 and not tensor.requires_grad for tensor in weights.values())
        return next(run_arm(made, Arm("homogeneous"), made.homogeneous, 0, weights)).all.reward

    clean = recipe(task={"attempts": 1}, start={"slip": 0.0}, train={"groups": 32})
    assert solved(clean) > 0.9
    assert 0.1 < solved(recipe(task={"attempts": 1}, start={"slip": 0.5}, train={"groups": 32})) < 0.8
