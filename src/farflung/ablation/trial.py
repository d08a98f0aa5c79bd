"""One run of one arm: sample, wait out the lag, update, record."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.ablation.arms import Arm
from farflung.ablation.model import Decoder, Shape
from farflung.ablation.recipe import AblationRecipe, PoolConfig, TrainConfig
from farflung.ablation.sampler import Batch, sample, served
from farflung.ablation.task import Sorting
from farflung.core.errors import Diverged
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.corrections import Supports, TokenDiagnostics, candidate_loss, group_advantages, make_weight


def run_arm(
    recipe: AblationRecipe, arm: Arm, pools: Sequence[PoolConfig], seed: int, start: dict[str, Tensor]
) -> Iterator[UpdateMetrics]:
    """The run's updates, one by one. The seed fixes the prompts, which are the same for every arm, and the draws.

    Raises Diverged after the update that left the policy with weights, or a sampler with logits, that are not finite.
    """
    task = Sorting.of(recipe.task)
    shape = Shape.of(recipe.model, task.vocabulary)
    names = [pool.name for pool in pools]
    top_p = recipe.sampling.top_p if arm.top_p else 1.0
    asked, drawn = (torch.Generator().manual_seed(2 * seed + part) for part in range(2))
    trainer = Trainer(recipe, arm, shape, task, start)
    waiting: deque[Batch] = deque()
    while trainer.version < recipe.ablation.updates:
        policy = served(trainer.weights, shape, pools)
        while len(waiting) <= recipe.train.lag:
            prompts = task.prompts(recipe.train.groups, asked).repeat_interleave(recipe.train.group_size, 0)
            batch = sample(
                policy, task, pools, prompts, temperature=recipe.sampling.temperature, top_p=top_p, generator=drawn,
                version=trainer.version,
            )  # fmt: skip
            if batch.log_q[batch.acted].isnan().any():
                raise Diverged("logits of a sampler are not finite", where=f"update {trainer.version}")
            waiting.append(batch)
        yield trainer.step(waiting.popleft(), names)
        if not trainer.finite:
            raise Diverged("weights are not finite", where=f"update {trainer.version}")


class Trainer:
    """The policy and its optimiser. ``version`` counts updates."""

    def __init__(self, recipe: AblationRecipe, arm: Arm, shape: Shape, task: Sorting, start: dict[str, Tensor]) -> None:
        self.weights = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        self.version = 0
        self._shape = shape
        self._task = task
        self._train = recipe.train
        self._temperature = recipe.sampling.temperature
        self._weight = make_weight("mis" if arm.mis else "none", recipe.train.band)
        self._centering = arm.sc
        self._optimizer = _optimizer(recipe.train, list(self.weights.values()))

    @property
    def finite(self) -> bool:
        """Whether every weight is."""
        return all(bool(tensor.isfinite().all()) for tensor in self.weights.values())

    def step(self, batch: Batch, names: list[str]) -> UpdateMetrics:
        """One update; groups whose rewards are all alike teach nothing, but they are measured."""
        size = self._train.group_size
        rewards = batch.rewards.view(-1, size).tolist()
        advantages = torch.tensor([group_advantages(row, std=self._train.std) for row in rewards])
        taught = (advantages != 0).any(-1)
        self._optimizer.zero_grad()
        found, origins = [], []
        for attempts in range(1, self._task.attempts + 1):  # trajectories of one length at a time: nothing is padded
            for teach in (True, False):
                rows = (taught.repeat_interleave(size) == teach) & (batch.attempts == attempts)
                if not rows.any():
                    continue
                with torch.set_grad_enabled(teach):
                    loss, measured = self._loss(batch, rows, advantages.flatten() if teach else None, attempts)
                if teach:
                    loss.backward()  # type: ignore[no-untyped-call]
                acted = batch.acted[rows]
                found.append(measured)
                origins.append(batch.pools[rows][:, None].expand_as(acted)[acted])
        lr = self._train.lr * min(1.0, (self.version + 1) / (self._train.warmup + 1))
        norm = self._move(lr) if taught.any() else 0.0
        staleness = self.version - batch.version
        self.version += 1
        every, origin = TokenDiagnostics.cat(found), torch.cat(origins)
        return UpdateMetrics(
            update=self.version,
            all=_stats(every, batch.rewards, staleness),
            pools={
                name: _stats(every.select(origin == pool), batch.rewards[batch.pools == pool], staleness)
                for pool, name in enumerate(names)
            },
            trained_groups=int(taught.sum()),
            skipped_groups=int((~taught).sum()),
            grad_norm=norm,
            lr=lr,
            length=float(batch.acted.sum(-1).float().mean()),
            turns=float(batch.attempts.float().mean()),
            format_errors=float(batch.malformed.float().mean()),
            trained_tokens=int(batch.acted[taught.repeat_interleave(size)].sum()),
        )

    def _move(self, lr: float) -> float:
        """The optimiser's step; returns the gradient's norm before it is clipped."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), self._train.clip))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm

    def _loss(
        self, batch: Batch, rows: Tensor, advantages: Tensor | None, attempts: int
    ) -> tuple[Tensor, TokenDiagnostics]:
        """The trainer's loss over the recorded candidates of the given trajectories, which have so many attempts.

        ``advantages`` of the whole batch; without them only the measurement means something.
        """
        answer = attempts * self._task.turn_tokens - 1
        prompt = self._task.prompt_tokens
        ids, acted = batch.ids[rows, : prompt + answer], batch.acted[rows, :answer]
        decoder = Decoder.of(self.weights, self._shape)
        hidden = decoder.hidden(ids[None, :, :-1])[0, :, prompt - 1 :][acted]
        return candidate_loss(
            hidden,
            decoder.head[0],
            None,
            _supports(batch.log_q[rows, :answer][acted]),
            ids[:, prompt:][acted],
            (torch.ones(len(acted)) if advantages is None else advantages[rows])[:, None].expand_as(acted)[acted],
            weight=self._weight,
            centering=self._centering,
            temperature=self._temperature,
            denominator=float(batch.acted.sum()),
        )


def _supports(log_q: Tensor) -> Supports:
    """[rows, vocabulary] with -inf outside each row's candidates."""
    kept = log_q > -torch.inf
    offsets = torch.zeros(len(log_q) + 1, dtype=torch.int64)
    torch.cumsum(kept.sum(-1), 0, out=offsets[1:])
    return Supports(kept.nonzero()[:, 1], log_q[kept], offsets)


def _stats(found: TokenDiagnostics, rewards: Tensor, staleness: int) -> TokenStats:
    means: dict[str, Any] = found.summary()
    return TokenStats(
        samples=len(rewards),
        tokens=int(found.measured.sum()),
        reward=float(rewards.mean()),
        staleness=float(staleness),
        staleness_max=staleness,
        **means,
    )


def _optimizer(train: TrainConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr)
    return torch.optim.AdamW(parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True)
