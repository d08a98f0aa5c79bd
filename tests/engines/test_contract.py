"""What every engine owes the replica that serves it, asked of both adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farflung.core.sampling import Completion
from farflung.engines.base import Engine, EngineError, Positions, TooLong
from farflung.engines.embedded import EmbeddedEngine, EngineOptions
from farflung.engines.embedded.weights import read_folder
from farflung.engines.paced import PacedEngine
from tests.engines import tiny
from tests.engines.tiny import request

CAPACITY, CONTEXT, VERSION = 2, 256, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["embedded", "paced"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    made: Engine
    if request.param == "embedded":
        made = EmbeddedEngine.from_folder(folder, tiny.SOURCE, EngineOptions(capacity=CAPACITY), VERSION)
    else:
        made = PacedEngine(
            tiny.SOURCE, tokens_per_second=500, capacity=CAPACITY, vocabulary=tiny.VOCABULARY, context=CONTEXT,
            version=VERSION,
        )  # fmt: skip
    yield made
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("top_k", [0, 1, 8])
async def test_a_completion_says_all_about_its_tokens(engine: Engine, top_k: int) -> None:
    done = await engine.generate(request(max_tokens=9, top_k=top_k, top_p=0.9 if top_k else 1.0))
    assert Completion.decode(done.encode()).ids.tolist() == done.ids.tolist()
    assert (len(done.ids), done.finish, done.source, done.cached) == (9, "length", engine.source, 0)
    assert done.versions.tolist() == [VERSION] * 9 == [engine.version] * 9
    assert (done.logprobs <= 0).all()
    assert (done.supports is None) == (top_k == 0)
    if done.supports is not None:
        assert len(done.supports) == 9
        assert done.supports.sizes.max() <= top_k


async def test_a_turn_ends_with_its_stop_id(engine: Engine) -> None:
    free = await engine.generate(request(max_tokens=30))
    stop = int(free.ids[4])
    done = await engine.generate(request(session="t", max_tokens=30, stop_ids=(stop,)))
    if done.finish == "stop":
        assert done.ids[-1] == stop
        assert stop not in done.ids[:-1]
    else:
        assert (stop in done.ids, len(done.ids)) == (False, 30)


async def test_the_same_request_gives_the_same_turn(engine: Engine) -> None:
    first, again = await asyncio.gather(*(engine.generate(request(session=name, seed=7)) for name in "ab"))
    other = await engine.generate(request(session="c", seed=8))
    assert first.ids.tolist() == again.ids.tolist()
    assert first.ids.tolist() != other.ids.tolist()


async def test_a_session_goes_on_and_a_forgotten_one_starts_anew(engine: Engine) -> None:
    first = request(max_tokens=6)
    done = await engine.generate(first)
    following = replace(first, ids=np.concatenate([first.ids, done.ids, tiny.prompt(4, 9)]).astype(np.int32))
    assert (await engine.generate(following)).cached >= len(first.ids) + len(done.ids) - 1
    engine.forget(first.session)
    engine.forget("never heard of")
    assert (await engine.generate(following)).cached == 0


async def test_what_does_not_fit_is_refused_and_what_nearly_fits_is_cut(engine: Engine) -> None:
    with pytest.raises(TooLong):
        await engine.generate(request(CONTEXT))
    done = await engine.generate(request(CONTEXT - 3, session="t", max_tokens=50))
    assert (len(done.ids), done.finish) == (3, "length")


async def test_turns_beyond_the_capacity_wait_and_a_cancelled_one_frees_its_place(engine: Engine) -> None:
    turns = [asyncio.create_task(engine.generate(request(session=str(n), max_tokens=200))) for n in range(CAPACITY + 1)]
    await until(lambda: engine.stats().active == CAPACITY and engine.stats().waiting == 1)
    turns[0].cancel()
    await until(lambda: engine.stats().waiting == 0)
    assert [len((await turn).ids) for turn in turns[1:]] == [200] * CAPACITY
    stats = engine.stats()
    assert (stats.active, stats.waiting) == (0, 0)
    assert stats.sampled_tokens >= 200 * CAPACITY


@pytest.mark.parametrize("changed", [None, {}, {"model.norm.weight": np.arange(32)}])
async def test_a_new_version_comes_in_the_middle_of_a_turn(
    engine: Engine, folder: Path, changed: dict[str, Positions] | None
) -> None:
    turn = asyncio.create_task(engine.generate(request(max_tokens=240)))
    await until(lambda: engine.stats().active == 1)
    await asyncio.sleep(0.05)
    await engine.load(VERSION + 2, read_folder(folder), changed)
    versions = (await turn).versions
    assert (np.diff(versions) >= 0).all()
    assert {int(v) for v in versions} <= {VERSION, VERSION + 2}
    assert (engine.version, engine.stats().swaps) == (VERSION + 2, 1)
    assert set((await engine.generate(request(session="t"))).versions.tolist()) == {VERSION + 2}


async def test_a_closed_engine_is_an_infrastructure_failure(engine: Engine) -> None:
    turn = asyncio.create_task(engine.generate(request(max_tokens=240)))
    await until(lambda: engine.stats().active == 1)
    await engine.close()
    for asked in (turn, engine.generate(request(session="t"))):
        with pytest.raises(EngineError):
            await asked
