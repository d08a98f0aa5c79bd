"""From groups of episodes to what a forward pass needs: who is trained, with which advantage, on which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farflung.config import TrainConfig
from farflung.core.episode import Episode
from farflung.core.errors import BadInput, Corrupt
from farflung.core.supports import Int32, Int64
from farflung.core.supports import Supports as HostSupports
from farflung.corrections import Supports, denominators, group_advantages
from farflung.trainer.packing import Pack


@dataclass(frozen=True, slots=True)
class Item:
    """An episode that is trained. ``at`` [A] int64: where its actions stand; ``inputs``: the tokens that predict them.

    ``denominator``: what the terms of its tokens are divided by.
    """

    episode: Episode
    group: int
    advantage: float
    at: Int64
    denominator: float

    @property
    def inputs(self) -> Int32:
        """All tokens before the last action: what follows is predicted by nobody and predicts nothing."""
        ids: Int32 = self.episode.trajectory.ids[: int(self.at[-1])]
        return ids


@dataclass(frozen=True, slots=True)
class Batch:
    """All episodes taken, and those of them that are trained."""

    episodes: tuple[Episode, ...]
    items: tuple[Item, ...]
    trained_groups: int
    skipped_groups: int

    @staticmethod
    def of(groups: Sequence[Sequence[Episode]], train: TrainConfig, *, temperature: float, vocabulary: int) -> Batch:
        """Raises BadInput or Corrupt, naming the episode, for what this trainer cannot have sampled."""
        episodes = tuple(e for group in groups for e in group)
        for episode in episodes:
            _check(episode, temperature, vocabulary)
        items: list[Item] = []
        divisors = iter(_denominators([len(e.trajectory.logprobs) for e in episodes], train))
        trained = skipped = 0
        for number, group in enumerate(groups):
            own = [next(divisors) for _ in group]
            advantages = group_advantages([e.reward for e in group], std=train.std, baseline=train.baseline)
            if not any(advantages):
                skipped += 1
                continue
            trained += 1
            for episode, advantage, denominator in zip(group, advantages, own, strict=True):
                at = np.flatnonzero(episode.trajectory.action)
                if advantage and len(at):
                    items.append(Item(episode, number, advantage, at, denominator))
        if len({item.episode.trajectory.supports is None for item in items}) > 1:
            raise BadInput("some episodes of the batch have recorded candidates and some have none", where="batch")
        return Batch(episodes, tuple(items), trained, skipped)


@dataclass(frozen=True, slots=True)
class Targets:
    """The action tokens of one pack, in order of its items: row [n] of the pack that predicts each, what was sampled, q.

    sequences [n]: which of the pack's items each belongs to; versions [n]: which policy sampled it.
    """

    items: tuple[int, ...]
    rows: torch.Tensor
    sampled: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    denominators: torch.Tensor
    sequences: torch.Tensor
    versions: torch.Tensor
    supports: Supports | None

    @staticmethod
    def of(batch: Batch, pack: Pack, device: torch.device) -> Targets:
        order = tuple(pack.paths)
        chosen = [batch.items[i] for i in order]
        trajectories = [item.episode.trajectory for item in chosen]

        def gather(parts: list[npt.NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

        recorded = [t.supports for t in trajectories if t.supports is not None]
        return Targets(
            order,
            gather([pack.paths[i][item.at - 1] for i, item in zip(order, chosen, strict=True)], torch.int64),
            gather([t.ids[item.at] for t, item in zip(trajectories, chosen, strict=True)], torch.int64),
            gather([t.logprobs for t in trajectories], torch.float32),
            gather([np.full(len(item.at), item.advantage) for item in chosen], torch.float32),
            gather([np.full(len(item.at), item.denominator) for item in chosen], torch.float32),
            gather([np.full(len(item.at), place) for place, item in enumerate(chosen)], torch.int64),
            gather([t.versions for t in trajectories], torch.int64),
            _to_device(HostSupports.concat(recorded), device) if recorded else None,
        )


def name(episode: Episode) -> str:
    return f"episode {episode.group}.{episode.index} ({episode.task})"


def _denominators(lengths: list[int], train: TrainConfig) -> Sequence[float]:
    if not any(lengths):
        return lengths  # no token to train on, and nothing to divide
    return denominators(lengths, train.aggregation, fixed_length=train.fixed_length)


def _to_device(supports: HostSupports, device: torch.device) -> Supports:
    return Supports(
        torch.from_numpy(supports.ids).to(device),
        torch.from_numpy(supports.logprobs).to(device),
        torch.from_numpy(supports.offsets).to(device),
    )


def _check(episode: Episode, temperature: float, vocabulary: int) -> None:
    t = episode.trajectory
    t.check(name(episode))
    if t.temperature != temperature:
        raise BadInput(
            f"sampled at temperature {t.temperature}, trained at {temperature}",
            where=name(episode),
            mend="samplers and trainer need the same sampling.temperature",
        )
    tokens = [t.ids] if t.supports is None else [t.ids, t.supports.ids]
    for ids in tokens:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise Corrupt(
                f"token ids {ids.min()}..{ids.max()} do not fit a vocabulary of {vocabulary}", where=name(episode)
            )
    if not np.isfinite(t.logprobs).all():
        raise Corrupt("a sampled token has no finite log-probability", where=name(episode))
