"""The embedded engine through its port."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farflung.core.errors import BadInput
from farflung.core.sampling import Completion, GenerateRequest
from farflung.engines.base import EngineError, TooLong
from farflung.engines.embedded import EmbeddedEngine, EngineOptions
from farflung.engines.embedded.weights import read_folder
from tests.engines import tiny
from tests.engines.tiny import request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def serving(folder: Path, version: int = 0, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine.from_folder(folder, tiny.SOURCE, EngineOptions(**options), version)
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def same(a: Completion, b: Completion) -> None:
    assert a.ids.tolist() == b.ids.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def longer(asked: GenerateRequest, *parts: np.ndarray[Any, Any], **more: Any) -> GenerateRequest:
    return replace(asked, ids=np.concatenate([asked.ids, *parts]).astype(np.int32), **more)


async def test_a_turn(folder: Path) -> None:
    async with serving(folder, version=5) as engine:
        done = await engine.generate(request(max_tokens=20))
        Completion.decode(done.encode())
        assert (len(done.ids), done.finish, done.cached, done.source) == (20, "length", 0, tiny.SOURCE)
        assert done.versions.tolist() == [5] * 20
        assert done.supports is not None
        stop = int(done.ids[11])
        stopped = await engine.generate(request(session="t", max_tokens=20, stop_ids=(299, stop)))
        end = done.ids.tolist().index(stop) + 1
        assert stopped.ids.tolist() == done.ids[:end].tolist()
        assert stopped.finish == "stop"
        opened = await engine.generate(request(session="u", top_k=0, top_p=1.0))
        assert opened.supports is None
        stats = engine.stats()
        assert (stats.active, stats.waiting, stats.swaps) == (0, 0, 0)
        assert stats.sampled_tokens == 20 + end + 12
        assert (stats.prompt_tokens, stats.cached_tokens) == (30, 0)


async def test_a_draw_does_not_depend_on_the_company(folder: Path) -> None:
    asked = [
        request(5 + 7 * i % 40, session=str(i), seed=i, max_tokens=3 + 5 * i % 30, top_k=(8, 0, 64)[i % 3], top_p=1.0)
        for i in range(25)
    ]
    async with serving(folder, capacity=1) as alone, serving(folder, capacity=6, prefill_tokens=16) as crowd:
        together = await asyncio.gather(*map(crowd.generate, asked))
        for one, done in zip(asked, together, strict=True):
            same(done, await alone.generate(one))


async def test_a_session_goes_on_from_its_cache_and_anywhere_else_from_its_ids(folder: Path) -> None:
    async with serving(folder) as engine, serving(folder) as other:
        first = request(30)
        done = await engine.generate(first)
        second = longer(first, done.ids, tiny.prompt(9, 7))
        again = await engine.generate(second)
        # The last sampled token was never fed, so its keys and values were not there.
        assert again.cached == 30 + 12 - 1
        fresh = await other.generate(second)
        assert fresh.cached == 0
        same(again, fresh)


async def test_only_what_really_agrees_is_reused(folder: Path) -> None:
    async with serving(folder) as engine, serving(folder) as other:
        first = request(30)
        done = await engine.generate(first)
        second = longer(first, done.ids, tiny.prompt(9, 7))
        second.ids[20] = (second.ids[20] + 1) % tiny.VOCABULARY
        again = await engine.generate(second)
        assert again.cached == 20
        same(again, await other.generate(second))
        # A shorter sequence, and one that ends where the cache ends: the last id is always fed anew.
        cut = replace(second, ids=second.ids[:25])
        assert (await engine.generate(cut)).cached == 24
        assert (await engine.generate(cut)).cached == 24
        assert (await engine.generate(replace(cut, session="another"))).cached == 0


async def test_idle_sessions_leave_in_order_of_use_and_when_forgotten(folder: Path) -> None:
    per_token = 3 * 4 * 8 * 2
    async with serving(folder, session_bytes=per_token * 50) as engine:
        for name in "abc":
            await engine.generate(request(10, session=name, max_tokens=11))  # 20 tokens are kept of each
        assert (await engine.generate(request(10, session="a", max_tokens=11))).cached == 0
        assert (await engine.generate(request(10, session="c", max_tokens=11))).cached == 9
        engine.forget("c")
        assert (await engine.generate(request(10, session="c", max_tokens=11))).cached == 0
        await engine.generate(request(100, session="too big"))
        assert (await engine.generate(request(100, session="too big"))).cached == 0


async def test_a_session_forgotten_in_mid_turn_is_not_kept(folder: Path) -> None:
    async with serving(folder) as engine:
        turn = asyncio.create_task(engine.generate(request(max_tokens=200)))
        await until(lambda: engine.stats().sampled_tokens > 3)
        engine.forget("s")
        await turn
        assert (await engine.generate(request())).cached == 0


async def test_a_cancelled_turn_frees_its_place_and_its_work_is_kept(folder: Path) -> None:
    async with serving(folder, capacity=1) as engine:
        turns = [asyncio.create_task(engine.generate(request(session=str(i), max_tokens=240))) for i in range(3)]
        await until(lambda: engine.stats().sampled_tokens > 3)
        assert (engine.stats().active, engine.stats().waiting) == (1, 2)
        turns[0].cancel()
        turns[1].cancel()
        assert len((await turns[2]).ids) == 240
        with pytest.raises(asyncio.CancelledError):
            await turns[0]
        assert (await engine.generate(request(session="0"))).cached == 9


async def test_the_context_ends_a_turn_and_refuses_a_longer_prompt(folder: Path) -> None:
    async with serving(folder, context=40) as engine:
        done = await engine.generate(request(30, max_tokens=100))
        assert (len(done.ids), done.finish) == (10, "length")
        assert len((await engine.generate(request(39, max_tokens=100))).ids) == 1
        with pytest.raises(TooLong, match="context of 40"):
            await engine.generate(request(40))
        for bad in (-1, tiny.VOCABULARY):
            with pytest.raises(BadInput, match="ids must lie"):
                await engine.generate(request(ids=np.array([1, bad])))


async def test_one_id_is_enough_of_a_prompt(folder: Path) -> None:
    async with serving(folder) as engine:
        first = request(1)
        done = await engine.generate(first)
        again = await engine.generate(longer(first, done.ids))
        assert again.cached == 12


@pytest.mark.parametrize("recompute", [False, True])
async def test_new_weights_come_between_two_tokens(folder: Path, tmp_path: Path, recompute: bool) -> None:
    newer = read_folder(tiny.save("llama", tmp_path, seed=1))
    async with serving(folder, recompute_on_swap=recompute, prefill_tokens=8) as engine, serving(tmp_path) as new:
        idle = request(session="idle")
        await engine.generate(idle)
        asked = [request(20 + i, session=str(i), seed=i, max_tokens=200) for i in range(3)]
        turns = [asyncio.create_task(engine.generate(one)) for one in asked]
        await until(lambda: engine.stats().sampled_tokens > 100)
        await engine.load(1, newer)
        assert engine.version == 1
        assert engine.stats().swaps == 1
        for one, done in zip(asked, await asyncio.gather(*turns), strict=True):
            assert set(done.versions) == {0, 1}
            assert (np.diff(done.versions) >= 0).all()
            swapped = int(np.flatnonzero(done.versions == 1)[0])
            rest = longer(one, done.ids[:swapped], params=replace(one.params, max_tokens=200 - swapped))
            expected = await new.generate(rest)
            # Read again under the new weights, the sequence goes on exactly as if these had always been there.
            agrees = np.allclose(done.logprobs[swapped:][:5], expected.logprobs[:5], atol=1e-3)
            assert agrees == recompute
        assert (await engine.generate(idle)).cached == (0 if recompute else 9)


async def test_weights_that_do_not_fit_change_nothing(folder: Path) -> None:
    good = read_folder(folder)
    async with serving(folder) as engine:
        before = await engine.generate(request())
        with pytest.raises(BadInput, match="lack"):
            await engine.load(1, {k: v for k, v in good.items() if k != "model.norm.weight"})
        assert engine.version == 0
        same(await engine.generate(request(session="t")), before)


async def test_weights_that_give_nan_fail_the_turns_and_not_the_engine(folder: Path) -> None:
    good = read_folder(folder)
    bad = good | {"model.norm.weight": torch.full_like(good["model.norm.weight"], torch.nan)}
    async with serving(folder) as engine:
        before = await engine.generate(request())
        await engine.load(1, bad)
        with pytest.raises(EngineError, match="version 1 gave logits that are not finite"):
            await engine.generate(request(session="t"))
        await engine.load(2, good)
        same(await engine.generate(request(session="u")), before)


async def test_a_step_that_breaks_fails_its_turns_and_not_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as engine:
        before = await engine.generate(request())
        with monkeypatch.context() as patch:

            def broken(*args: Any, **kwargs: Any) -> None:
                raise RuntimeError("out of something")

            patch.setattr(engine._decoder, "logits", broken)
            with pytest.raises(EngineError, match="out of something"):
                await engine.generate(request(session="t"))
            patch.setattr(engine._decoder, "hidden", broken)
            with pytest.raises(EngineError, match="out of something"):
                await engine.generate(request(session="u"))
        assert engine.stats().active == 0
        same(await engine.generate(request(session="v")), before)


async def test_a_closed_engine_fails_what_it_had_and_takes_no_more(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, tiny.SOURCE, EngineOptions(capacity=1))
    turns = [asyncio.create_task(engine.generate(request(session=str(i), max_tokens=240))) for i in range(2)]
    await until(lambda: engine.stats().sampled_tokens > 0)
    await engine.close()
    for turn in turns:
        with pytest.raises(EngineError, match="closed"):
            await turn
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request())
    with pytest.raises(EngineError, match="closed"):
        await engine.load(1, read_folder(folder))


async def test_an_engine_that_breaks_for_good_says_so_to_everybody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder) as engine:

        def broken() -> None:
            raise MemoryError("for good")

        monkeypatch.setattr(engine, "_admit", broken)
        asked = [engine.generate(request(session=str(i))) for i in range(3)]
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "for good" in str(result)
        for late in (engine.generate(request()), engine.load(1, read_folder(folder))):
            with pytest.raises(EngineError, match="for good"):
                await late
        engine.forget("s")


async def test_bfloat16_serves_too(folder: Path) -> None:
    async with serving(folder, compute="bfloat16") as rough:
        first = request(30)
        done = await rough.generate(first)
        Completion.decode(done.encode())
        assert (await rough.generate(longer(first, done.ids, tiny.prompt(9, 7)))).cached == 41


def test_unknown_formats_are_refused(folder: Path) -> None:
    for wrong in (replace(tiny.SOURCE, weights="int3"), replace(tiny.SOURCE, kv="fp4")):
        with pytest.raises(BadInput, match="not served"):
            EmbeddedEngine.from_folder(folder, wrong)


def test_the_port_loads_without_torch() -> None:
    code = "import farflung.engines.base, farflung.engines, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
