"""The paced engine: valid completions at a set rate, and recorded episodes said again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from farflung.core.episode import Trajectory
from farflung.core.errors import BadInput
from farflung.core.sampling import Completion, GenerateRequest, SamplingParams, Source
from farflung.core.supports import Supports
from farflung.engines.base import EngineError, TooLong
from farflung.engines.paced import PacedEngine, Recording

SOURCE = Source("a", "a-0", "bf16", "bf16")


def request(
    ids: list[int], *, stop: tuple[int, ...] = (9,), max_tokens: int = 32, top_k: int = 8, seed: int = 1
) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, top_k=top_k, stop_ids=stop, seed=seed)
    return GenerateRequest("s", np.array(ids, np.int32), params)


def quick(**more: object) -> PacedEngine:
    return PacedEngine(SOURCE, tokens_per_second=1e6, capacity=4, **more)  # type: ignore[arg-type]


def trajectory(turns: list[tuple[list[int], list[int]]], sure: float) -> Trajectory:
    """(context, reply) pairs; each reply's token has probability ``sure`` among two candidates."""
    ids = [i for context, reply in turns for i in context + reply]
    action = [flag for context, reply in turns for flag in [False] * len(context) + [True] * len(reply)]
    sampled = np.array(ids, np.int32)[np.array(action)]
    n = len(sampled)
    rows = np.stack([sampled, sampled + 1], axis=1).reshape(-1)
    logs = np.tile(np.log([sure, 1 - sure]), n).astype(np.float32)
    supports = Supports(rows, logs, 2 * np.arange(n + 1, dtype=np.int64))
    return Trajectory(
        np.array(ids, np.int32), np.array(action), logs[::2], np.zeros(n, np.int32), np.zeros(n, np.int16), (SOURCE,), supports
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [0, 1, 3, 64])
@pytest.mark.parametrize("stop", [(), (9,), (0, 1)])
async def test_random_completions_are_valid_and_reproducible(top_k: int, stop: tuple[int, ...]) -> None:
    for seed in range(20):
        asked = request([1, 2, 3], stop=stop, top_k=top_k, seed=seed)
        completion = await quick(vocabulary=16).generate(asked)
        assert Completion.decode(completion.encode()).ids.tolist() == completion.ids.tolist()
        assert (completion.supports is None) == (top_k == 0)
        assert not np.isin(completion.ids[:-1], stop).any()
        assert completion.finish == ("stop" if stop else "length")
        assert len(completion.ids) <= 32 if stop else len(completion.ids) == 32
        assert (await quick(vocabulary=16).generate(asked)).ids.tolist() == completion.ids.tolist()


async def test_recorded_episodes_go_as_recorded() -> None:
    first = trajectory([([1, 2], [5, 9]), ([3], [6, 7, 9])], 0.75)
    second = trajectory([([1, 2], [8, 9]), ([4], [6, 9])], 0.5)
    for t in (first, second):
        t.check()
    engine = quick(recording=Recording.of([first, second]))
    replies = {}
    for seed in range(30):
        completion = await engine.generate(request([1, 2], seed=seed))
        replies[tuple(completion.ids.tolist())] = float(completion.logprobs[0])
        Completion.decode(completion.encode())
    assert replies == pytest.approx({(5, 9): np.log(0.75), (8, 9): np.log(0.5)})
    assert (await engine.generate(request([1, 2, 5, 9, 3]))).ids.tolist() == [6, 7, 9]
    assert (await engine.generate(request([1, 2, 8, 9, 4]))).ids.tolist() == [6, 9]
    assert (await engine.generate(request([1, 2, 5, 9, 3], max_tokens=2))).finish == "length"
    known = {(5, 9), (6, 7, 9), (8, 9), (6, 9)}
    assert tuple((await engine.generate(request([77]))).ids.tolist()) in known


async def test_a_recording_without_supports_still_gives_valid_ones() -> None:
    bare = replace(trajectory([([1], [5, 9])], 0.5), supports=None)
    completion = await quick(recording=Recording.of([bare]), vocabulary=12).generate(request([1]))
    assert completion.ids.tolist() == [5, 9]
    Completion.decode(completion.encode())


async def test_tokens_carry_the_version_that_was_loaded_when_they_came() -> None:
    engine = PacedEngine(SOURCE, tokens_per_second=100, capacity=1, version=3)
    turn = asyncio.create_task(engine.generate(request([1], stop=(), max_tokens=20)))
    await asyncio.sleep(0.1)
    await engine.load(4, {})
    versions = (await turn).versions
    assert engine.version == 4
    assert versions[0] == 3
    assert versions[-1] == 4
    assert (np.diff(versions) >= 0).all()
    assert engine.stats().swaps == 1


async def test_the_line_is_bounded_and_a_cancelled_turn_frees_its_place() -> None:
    engine = PacedEngine(SOURCE, tokens_per_second=1, capacity=1)
    turns = [asyncio.create_task(engine.generate(request([1]))) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert (engine.stats().active, engine.stats().waiting) == (1, 2)
    turns[0].cancel()
    turns[2].cancel()
    await asyncio.sleep(0.01)
    assert (engine.stats().active, engine.stats().waiting) == (1, 0)
    turns[1].cancel()


async def test_errors() -> None:
    with pytest.raises(TooLong):
        await quick(context=2).generate(request([1, 2]))
    assert len((await quick(context=5).generate(request([1, 2], stop=()))).ids) == 3
    with pytest.raises(BadInput):
        PacedEngine(SOURCE, tokens_per_second=0, capacity=1)
    engine = quick()
    await engine.close()
    with pytest.raises(EngineError):
        await engine.generate(request([1]))
