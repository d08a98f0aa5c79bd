"""An episode comes back from its frame unchanged, and one that does not fit together is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farflung.core import frame
from farflung.core.episode import Episode
from farflung.core.errors import Corrupt
from farflung.core.metrics import TokenStats, UpdateMetrics

Make = Callable[..., Episode]


@given(sizes=st.lists(st.integers(1, 8), max_size=12), seed=st.integers(0, 2**31), supported=st.booleans())
def test_an_episode_comes_back(make_episode: Make, sizes: list[int], seed: int, supported: bool) -> None:
    sent = make_episode(sizes, seed, supported=supported)
    got = Episode.decode(sent.encode())
    plain = [f for f in Episode.__slots__ if f != "trajectory"]
    assert {f: getattr(got, f) for f in plain} == {f: getattr(sent, f) for f in plain}
    for name in ("ids", "action", "logprobs", "versions", "source"):
        np.testing.assert_array_equal(getattr(got.trajectory, name), getattr(sent.trajectory, name))
    assert (got.trajectory.sources, got.trajectory.temperature) == (
        sent.trajectory.sources,
        sent.trajectory.temperature,
    )
    assert (got.trajectory.supports is None) == (not supported)
    assert got.encode() == sent.encode()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: {"logprobs": t.logprobs[1:]},
        lambda t: {"versions": t.versions[1:]},
        lambda t: {"action": np.concatenate([[True], t.action[1:]])},
        lambda t: {"action": t.action[1:]},
        lambda t: {"source": t.source + 2},
        lambda t: {"source": t.source - 2},
        lambda t: {"ids": t.ids + 1000},
        lambda t: {"supports": t.supports.rows(0, 2)},
    ],
)
def test_a_trajectory_that_does_not_fit_is_refused(make_episode: Make, spoil: Callable[[Any], dict[str, Any]]) -> None:
    episode = make_episode([3, 1, 4, 2], 5)
    trajectory = replace(episode.trajectory, **spoil(episode.trajectory))
    with pytest.raises(Corrupt):
        Episode.decode(replace(episode, trajectory=trajectory).encode())


@given(
    name=st.sampled_from(
        ["ids", "action", "logprobs", "versions", "source", "support_ids", "support_logprobs", "support_offsets"]
    ),
    dtype=st.sampled_from(sorted(frame.DTYPES)),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
)
def test_no_array_of_another_kind_gets_past(make_episode: Make, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    data, arrays = frame.decode(make_episode([3, 1, 4, 2], 5).encode())
    assume((dtype, shape) != (arrays[name].dtype.name, arrays[name].shape))
    with pytest.raises(Corrupt):
        Episode.decode(frame.encode(data, arrays | {name: np.full(shape, 1, dtype)}))


@pytest.mark.parametrize(
    "change",
    [
        {"end": "bored"}, {"sources": [{"pool": "p"}]}, {"surprise": 1}, {"group": "0"}, {"group": []}, {"index": 1.0},
        {"task": None}, {"reward": "much"}, {"reward": 2}, {"turns": None}, {"temperature": "warm"}, {"sources": 3},
    ],
)  # fmt: skip
def test_an_episode_with_other_fields_is_refused(make_episode: Make, change: dict[str, Any]) -> None:
    data, arrays = frame.decode(make_episode([2, 2], 1).encode())
    with pytest.raises(Corrupt, match="not an episode"):
        Episode.decode(frame.encode(data | change, arrays))


def test_a_frame_without_arrays_is_no_episode() -> None:
    with pytest.raises(Corrupt):
        Episode.decode(frame.encode({}))


@given(
    reward=st.floats(0, 1), tokens=st.integers(0, 10**6), pools=st.lists(st.sampled_from(["a", "b", "c"]), unique=True)
)
def test_metrics_come_back_from_plain_data(reward: float, tokens: int, pools: list[str]) -> None:
    stats = TokenStats(samples=3, tokens=tokens, reward=reward)
    sent = UpdateMetrics(update=7, all=stats, pools=dict.fromkeys(pools, stats), seconds={"step": 1.0})
    assert UpdateMetrics.from_dict(sent.to_dict()) == sent
    assert UpdateMetrics.from_dict(sent.to_dict() | {"of_a_later_release": 1}) == sent
