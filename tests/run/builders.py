"""Small real episodes for the tests of the run."""

from __future__ import annotations

import numpy as np

from farflung.config import PoolConfig, Recipe, RunConfig, SandboxConfig, TrainConfig
from farflung.core.episode import EndReason, Episode, Trajectory
from farflung.core.sampling import Source
from farflung.core.supports import Supports


def recipe(
    groups: int = 2,
    group_size: int = 2,
    updates: int = 3,
    *,
    sync: bool = False,
    max_staleness: int | None = None,
    buffer_batches: float = 2.0,
    retries: int = 1,
) -> Recipe:
    return Recipe(
        run=RunConfig(updates=updates, sync=sync, max_staleness=max_staleness, buffer_batches=buffer_batches),
        train=TrainConfig(groups=groups, group_size=group_size),
        sandbox=SandboxConfig(retries=retries),
        pools=(PoolConfig(name="a"), PoolConfig(name="b")),
    )


def episode(group: int, index: int, task: str, *, version: int = 0, reward: float = 0.0, pool: str = "a") -> Episode:
    """Two prompt tokens, two sampled ones with two candidates each."""
    half = np.float32(np.log(0.5))
    trajectory = Trajectory(
        ids=np.array([5, 6, 1, 2], np.int32),
        action=np.array([False, False, True, True]),
        logprobs=np.array([half, half]),
        versions=np.array([version, version], np.int32),
        source=np.zeros(2, np.int16),
        sources=(Source(pool, f"{pool}-0", "bf16", "bf16"),),
        supports=Supports(np.array([1, 9, 2, 9], np.int32), np.full(4, half), np.array([0, 2, 4], np.int64)),
    )
    return Episode(group, index, task, EndReason.SUBMITTED, reward, 1, trajectory, patch="", seconds={"total": 0.1})
