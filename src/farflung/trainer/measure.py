"""UpdateMetrics from what the forward passes found, over all tokens and for each pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.core.episode import EndReason, Episode
from farflung.core.metrics import TokenStats
from farflung.corrections import TokenDiagnostics
from farflung.trainer.batch import Batch, Targets

MEANS = ("kl", "k3", "out_of_band", "masked", "entropy")


class Measurement:
    """Collects the tokens' diagnostics pack by pack."""

    def __init__(self, batch: Batch, version: int) -> None:
        self._batch = batch
        self._version = version
        self._values: list[npt.NDArray[np.float64]] = []
        self._pools: list[npt.NDArray[Any]] = []

    def add(self, targets: Targets, found: TokenDiagnostics) -> None:
        columns = [getattr(found, name).double().cpu().numpy() for name in MEANS]
        self._values.append(np.stack(columns, 1)[found.measured.cpu().numpy()])
        pools = np.concatenate([_token_pools(self._batch.items[i].episode) for i in targets.items])
        self._pools.append(pools[found.measured.cpu().numpy()])

    def stats(self) -> tuple[TokenStats, dict[str, TokenStats]]:
        """(all, pools). Staleness is over all action tokens taken; the other means over those with a forward pass."""
        episodes = self._batch.episodes
        values = np.concatenate([np.zeros((0, len(MEANS))), *self._values])
        measured = np.concatenate([np.zeros(0, object), *self._pools])
        taken = np.concatenate([np.zeros(0, object), *map(_token_pools, episodes)])
        versions = np.concatenate([np.zeros(0, np.int64), *(e.trajectory.versions for e in episodes)])
        home = np.array([_home(e) for e in episodes], object)
        rewards = np.array([e.reward for e in episodes], np.float64)
        age = self._version - versions
        every = _stats(values, age, rewards)
        names = sorted({*taken.tolist(), *home.tolist()} - {None})
        return every, {n: _stats(values[measured == n], age[taken == n], rewards[home == n]) for n in names}


def _token_pools(episode: Episode) -> npt.NDArray[Any]:
    """The pool that sampled each action token, [A] of str."""
    t = episode.trajectory
    return np.array([s.pool for s in t.sources], object)[t.source.astype(np.int64)]


def _home(episode: Episode) -> str | None:
    """The pool that sampled most of the episode's tokens: the one that the trajectory counts for."""
    pools, counts = np.unique(_token_pools(episode).astype(str), return_counts=True)
    return str(pools[counts.argmax()]) if len(pools) else None


def _stats(values: npt.NDArray[np.float64], age: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> TokenStats:
    means = dict(zip(MEANS, values.mean(0).tolist(), strict=True)) if len(values) else {}
    return TokenStats(
        samples=len(rewards),
        tokens=len(values),
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
