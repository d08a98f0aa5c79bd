"""Samplers: what they record is what they drew from, and every pool's formats are its own."""

from __future__ import annotations

import pytest
import torch

from farflung.ablation.model import Shape
from farflung.ablation.recipe import PoolConfig
from farflung.ablation.sampler import Batch, candidates, draw, sample, served
from farflung.ablation.task import Sorting
from farflung.formats.weights import quantise
from tests.ablation.tiny import recipe, start

RECIPE = recipe(task={"symbols": 6, "length": 4})
TASK = Sorting.of(RECIPE.task)
SHAPE = Shape.of(RECIPE.model, TASK.vocabulary)
EXACT = (PoolConfig(name="bf16"),)


def drawn(pools: tuple[PoolConfig, ...], *, top_p: float = 1.0, prompts: int = 40) -> Batch:
    asked = TASK.prompts(prompts, torch.Generator().manual_seed(1))
    policy = served(start(RECIPE), SHAPE, pools)
    generator = torch.Generator().manual_seed(2)
    return sample(policy, TASK, pools, asked, temperature=0.7, top_p=top_p, generator=generator, version=3)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_recorded_candidates_are_what_one_pass_over_the_whole_trajectory_gives(top_p: float) -> None:
    batch = drawn(EXACT, top_p=top_p)
    policy = served(start(RECIPE), SHAPE, EXACT)
    logits = policy.logits(policy.hidden(batch.ids[None, :, :-1])[:, :, TASK.prompt_tokens - 1 :])[0]
    again = candidates(logits / 0.7, top_p)[batch.acted].exp()
    recorded = batch.log_q[batch.acted].exp()
    alike = ((recorded > 0) == (again > 0)).all(
        -1
    )  # the cache is rounded to bfloat16: a token at the edge may fall out
    assert alike.double().mean() > 0.9
    assert torch.allclose(recorded[alike], again[alike], atol=0.02)


def test_each_pool_serves_its_own_format_and_keeps_its_own_cache() -> None:
    pools = RECIPE.mixed
    policy, weights = served(start(RECIPE), SHAPE, pools), start(RECIPE)
    down = weights["model.layers.1.mlp.down_proj.weight"][0]
    for place, pool in enumerate(pools):
        assert torch.equal(policy.layers[1].down[place], quantise(down, pool.weights).dequantise())
        assert torch.equal(policy.head[place], weights["lm_head.weight"][0].bfloat16().float())
    mixed = drawn(pools)
    for place, pool in enumerate(pools):
        mine = mixed.pools == place
        alone = drawn(tuple(pool.model_copy(update={"name": str(number)}) for number in range(4)))
        assert torch.allclose(mixed.log_q[mine, 0], alone.log_q[mine, 0], atol=1e-5)


def test_trajectories_end_at_the_first_right_attempt_or_after_the_last() -> None:
    batch = drawn(EXACT, prompts=400)
    solution = TASK.solution(batch.ids[:, : TASK.prompt_tokens])
    answer = batch.ids[:, TASK.prompt_tokens :]
    for row in range(400):
        made = int(batch.attempts[row])
        right = [bool((answer[row, list(TASK.places(a))] == solution[row]).all()) for a in range(made)]
        assert not any(right[:-1])
        assert right[-1] == bool(batch.rewards[row])
        assert right[-1] or made == TASK.attempts
    last = torch.stack([answer[row, list(TASK.places(int(batch.attempts[row]) - 1))] for row in range(400)])
    assert torch.equal(TASK.malformed(last), batch.malformed)
    assert batch.version == 3


def test_every_sampled_token_is_among_its_candidates() -> None:
    batch = drawn(RECIPE.mixed, top_p=0.6)
    sampled = batch.ids[:, TASK.prompt_tokens :][batch.acted]
    log_q = batch.log_q[batch.acted]
    assert (log_q.gather(1, sampled[:, None]) > -torch.inf).all()
    assert torch.allclose(log_q.exp().sum(-1), torch.ones(len(log_q)), atol=1e-5)
    assert (log_q == -torch.inf).any()


def test_top_p_keeps_the_shortest_list_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.97, 0.02, 0.01]]).log()
    kept = candidates(logits, 0.85)
    assert torch.allclose(kept[0].exp(), torch.tensor([0.0, 2 / 3, 1 / 3]))
    assert kept[1].exp().tolist() == [1.0, 0.0, 0.0]


def test_draws_follow_the_recorded_probabilities() -> None:
    log_q = torch.tensor([0.5, 0.0, 0.2, 0.3]).log().expand(40_000, 4)
    ids = draw(log_q, torch.rand(40_000, generator=torch.Generator().manual_seed(0)))
    shares = torch.bincount(ids, minlength=4) / 40_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.0, 0.2, 0.3]), atol=0.01)
    edge = draw(log_q[:2], torch.tensor([0.0, 1 - 2**-24]))
    assert edge.tolist() == [0, 3]
