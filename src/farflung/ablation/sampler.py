"""The samplers: every pool serves the policy in its own weight and cache format, and all of them draw side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.ablation.model import Cache, Decoder, Rounding, Shape, Weights
from farflung.ablation.recipe import PoolConfig
from farflung.ablation.task import Sorting
from farflung.formats.kv import rounding
from farflung.formats.selection import is_quantised
from farflung.formats.weights import quantise


@dataclass(frozen=True, slots=True)
class Batch:
    """Sampled trajectories, [n] of them, members of a group beside each other.

    ids [n, prompt + answer]; acted [n, answer] bool: the policy's own tokens up to the end; log_q [n, answer, vocabulary]:
    the whole distribution that each was drawn from, -inf outside its candidates; attempts [n]: how many were made; rewards
    [n]; malformed [n] bool: the last attempt was; pools [n]; version of the policy.
    """

    ids: Tensor
    acted: Tensor
    log_q: Tensor
    attempts: Tensor
    rewards: Tensor
    malformed: Tensor
    pools: Tensor
    version: int


@torch.no_grad()
def served(weights: Weights, shape: Shape, pools: Sequence[PoolConfig]) -> Decoder:
    """The policy [1, ...] as each pool has it, [pools, ...]: through its codes and scales and back; the rest as BF16."""
    formats = {pool.weights for pool in pools}
    policy = {}
    for name, tensor in weights.items():
        if is_quantised(name):
            each = {format: quantise(tensor[0], format, name=name).dequantise() for format in formats}
            policy[name] = torch.stack([each[pool.weights] for pool in pools])
        else:
            policy[name] = tensor.bfloat16().float().repeat(len(pools), *[1] * (tensor.dim() - 1))
    return Decoder.of(policy, shape)


def cache_rounding(pools: Sequence[PoolConfig]) -> Rounding:
    """The rounding of keys and values [pools, ...], each pool by its own format."""
    formats = {pool.kv for pool in pools}
    if len(formats) == 1:
        return rounding(formats.pop())
    members = {format: [at for at, pool in enumerate(pools) if pool.kv == format] for format in formats}

    def each(values: Tensor) -> Tensor:
        rounded = torch.empty_like(values)
        for format, places in members.items():
            rounded[places] = rounding(format)(values[places])
        return rounded

    return each


@torch.no_grad()
def sample(
    policy: Decoder,
    task: Sorting,
    pools: Sequence[PoolConfig],
    prompts: Tensor,
    *,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    version: int = 0,
) -> Batch:
    """One trajectory for each row of ``prompts``; rows are dealt to the pools in turn. ``policy`` as ``served`` gave it."""
    total, count = len(prompts), len(pools)
    deal = torch.arange(total).view(-1, count).T  # the rows that each pool works on, [pools, rows]
    cache = Cache(policy.shape, count, deal.shape[1], task.prompt_tokens + task.answer_tokens, cache_rounding(pools))
    answer = torch.full((total, task.answer_tokens), task.again)
    log_q = torch.zeros(total, task.answer_tokens, policy.shape.vocabulary)
    attempts, rewards = torch.zeros(total, dtype=torch.int64), torch.zeros(total)
    malformed, going = torch.zeros(total, dtype=torch.bool), torch.ones(total, dtype=torch.bool)
    solution = task.solution(prompts)
    fresh = prompts[deal]
    for attempt in range(task.attempts):
        if attempt:  # the last token goes into the cache, and the environment says AGAIN
            deal = _going_on(deal, going, cache)
            policy.hidden(answer[deal, task.places(attempt - 1)[-1]][..., None], cache)
            fresh = torch.full((*deal.shape, 1), task.again)
        places = task.places(attempt)
        for place in places:
            logits = policy.logits(policy.hidden(fresh, cache)[:, :, -1:]).squeeze(2)
            log_q[deal, place] = candidates(logits / temperature, top_p)
            answer[deal, place] = draw(log_q[deal, place], torch.rand(deal.shape, generator=generator))
            fresh = answer[deal, place][..., None]
        made = answer[:, places.start : places.stop]
        attempts += going
        rewards[going & (made == solution).all(-1)] = 1.0
        malformed = torch.where(going, task.malformed(made), malformed)
        going &= rewards == 0
        if not going.any():
            break
    return Batch(
        ids=torch.cat([prompts, answer], 1),
        acted=task.acted(attempts),
        log_q=log_q,
        attempts=attempts,
        rewards=rewards,
        malformed=malformed,
        pools=torch.arange(total) % count,
        version=version,
    )


def _going_on(deal: Tensor, going: Tensor, cache: Cache) -> Tensor:
    """The rows that still need an attempt; a pool that has fewer of them than another goes on with some that do not."""
    mine = going[deal]
    order = mine.int().argsort(dim=1, descending=True, stable=True)[:, : int(mine.sum(1).max())]
    cache.keep(order)
    return deal.gather(1, order)


def candidates(logits: Tensor, top_p: float) -> Tensor:
    """Log-probabilities over the shortest list of likeliest tokens whose mass reaches ``top_p``, -inf elsewhere."""
    log_q = logits.log_softmax(-1)
    if top_p == 1:
        return log_q
    mass, order = log_q.exp().sort(-1, descending=True)
    late = mass.cumsum(-1) - mass >= top_p
    late[..., 0] = False
    log_q = log_q.masked_fill(torch.zeros_like(late).scatter(-1, order, late), -torch.inf)
    return log_q - log_q.logsumexp(-1, keepdim=True)


def draw(log_q: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform: uniforms [...] in [0, 1) -> ids [...]; a token without mass is never drawn."""
    mass = log_q.exp()
    total = mass.cumsum(-1)
    drawn = (total <= (uniforms * total[..., -1])[..., None]).sum(-1).clamp_(max=log_q.shape[-1] - 1)
    return torch.where(mass.gather(-1, drawn[..., None]).squeeze(-1) > 0, drawn, mass.argmax(-1))
