"""UpdateMetrics from what the forward passes found, over all tokens and for each pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farflung.core.episode import EndReason, Episode
from farflung.core.metrics import TokenStats
from farflung.corrections import TokenDiagnostics
from farflung.trainer.batch import Batch, Targets


class Measurement:
    """Collects the tokens' diagnostics pack by pack."""

    def __init__(self, batch: Batch, version: int) -> None:
        self._batch = batch
        self._version = version
        self._found: list[TokenDiagnostics] = []
        self._pools: list[npt.NDArray[Any]] = []

    def add(self, targets: Targets, found: TokenDiagnostics) -> None:
        pools = np.concatenate([_token_pools(self._batch.items[i].episode) for i in targets.items])
        self._found.append(found.select(found.measured))
        self._pools.append(pools[found.measured.cpu().numpy()])

    def stats(self) -> tuple[TokenStats, dict[str, TokenStats]]:
        """(all, pools). Staleness is over all action tokens taken; the other means over those with a forward pass."""
        episodes = self._batch.episodes
        found = TokenDiagnostics.cat(self._found) if self._found else None
        measured = np.concatenate([np.zeros(0, object), *self._pools])
        taken = np.concatenate([np.zeros(0, object), *map(_token_pools, episodes)])
        versions = np.concatenate([np.zeros(0, np.int64), *(e.trajectory.versions for e in episodes)])
        home = np.array([_home(e) for e in episodes], object)
        rewards = np.array([e.reward for e in episodes], np.float64)
        age = self._version - versions
        every = _stats(found, age, rewards)
        pools = {}
        for name in sorted({*taken.tolist(), *home.tolist()} - {None}):
            own = None if found is None else found.select(torch.from_numpy(measured == name))
            pools[name] = _stats(own, age[taken == name], rewards[home == name])
        return every, pools


def _token_pools(episode: Episode) -> npt.NDArray[Any]:
    """The pool that sampled each action token, [A] of str."""
    t = episode.trajectory
    return np.array([s.pool for s in t.sources], object)[t.source.astype(np.int64)]


def _home(episode: Episode) -> str | None:
    """The pool that sampled most of the episode's tokens: the one that the trajectory counts for."""
    pools, counts = np.unique(_token_pools(episode).astype(str), return_counts=True)
    return str(pools[counts.argmax()]) if len(pools) else None


def _stats(found: TokenDiagnostics | None, age: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> TokenStats:
    means: dict[str, Any] = {} if found is None else found.summary()
    return TokenStats(
        samples=len(rewards),
        tokens=0 if found is None else len(found.measured),
        reward=float(rewards.mean()) if len(rewards) else 0.0,
        staleness=float(age.mean()) if len(age) else 0.0,
        staleness_max=int(age.max()) if len(age) else 0,
        **means,
    )


def episode_means(batch: Batch) -> Mapping[str, float]:
    """length, turns and format_errors as UpdateMetrics has them, over every episode taken."""
    episodes = batch.episodes
    if not episodes:
        return {}
    return {
        "length": float(np.mean([len(e.trajectory.ids) for e in episodes])),
        "turns": float(np.mean([e.turns for e in episodes])),
        "format_errors": float(np.mean([e.end is EndReason.FORMAT_ERROR for e in episodes])),
    }
