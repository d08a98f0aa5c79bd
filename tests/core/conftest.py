"""Made-up supports, trajectories and episodes that are valid by construction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from farflung.core.episode import EndReason, Episode, Trajectory
from farflung.core.sampling import Source
from farflung.core.supports import Supports

SOURCES = (Source("nvfp4", "nvfp4-0", "nvfp4", "fp8"), Source("bf16", "bf16-0", "bf16", "bf16"))


def make_supports(sizes: list[int], seed: int) -> tuple[Supports, np.ndarray, np.ndarray]:
    """Rows of these sizes with random candidates; also what was sampled from them and its log-probabilities."""
    random = np.random.default_rng(seed)
    ids, logprobs, sampled, sampled_logprobs = [], [], [], []
    for size in sizes:
        row = random.choice(1000, size, replace=False).astype(np.int32)
        weights = np.log(random.dirichlet(np.ones(size)) + 1e-9)
        weights = (weights - np.log(np.exp(weights).sum())).astype(np.float32)
        pick = int(random.integers(size))
        ids.append(row)
        logprobs.append(weights)
        sampled.append(row[pick])
        sampled_logprobs.append(weights[pick])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    empty = (np.zeros(0, np.int32), np.zeros(0, np.float32))
    supports = Supports(np.concatenate([empty[0], *ids]), np.concatenate([empty[1], *logprobs]), offsets)
    return supports, np.array(sampled, np.int32), np.array(sampled_logprobs, np.float32)


def make_episode(sizes: list[int], seed: int, *, supported: bool = True) -> Episode:
    random = np.random.default_rng(seed + 1)
    supports, sampled, logprobs = make_supports(sizes, seed)
    action = np.concatenate([[False], random.permutation(np.repeat([True, False], [len(sizes), 5]))])
    ids = random.integers(0, 1000, len(action)).astype(np.int32)
    ids[action] = sampled
    trajectory = Trajectory(
        ids, action, logprobs, random.integers(0, 9, len(sizes)).astype(np.int32),
        random.integers(0, 2, len(sizes)).astype(np.int16), SOURCES, supports if supported else None, 0.7,
    )  # fmt: skip
    return Episode(
        group=seed, index=3, task="täsk/1", end=EndReason.TURN_LIMIT, reward=1.0, turns=2, trajectory=trajectory,
        patch="--- a\n+++ b\n", detail="ok", seconds={"total": 1.25}, format_errors=1, attempt=2,
    )  # fmt: skip


@pytest.fixture(name="make_supports", scope="session")
def _make_supports() -> Callable[..., tuple[Supports, np.ndarray, np.ndarray]]:
    return make_supports


@pytest.fixture(name="make_episode", scope="session")
def _make_episode() -> Callable[..., Episode]:
    return make_episode
