"""Loads that write only what changed: the same bits as a version prepared whole, whatever came before."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.engines.base import Positions
from farflung.engines.embedded import EmbeddedEngine, EngineOptions, refresh
from farflung.engines.embedded.weights import Weights, prepare
from farflung.formats.weights import FORMATS
from tests.engines import tiny
from tests.engines.streams import Trainer, architecture, difference, same_bits

UP = "model.layers.1.mlp.up_proj.weight"
each_format = pytest.mark.parametrize("format", FORMATS)


@asynccontextmanager
async def serving(trainer: Trainer, stream: dict[str, Tensor], **options: Any) -> AsyncIterator[EmbeddedEngine]:
    source = replace(tiny.SOURCE, weights=trainer.format)
    made = EngineOptions(device="cpu", exclude=trainer.exclude, **{"compute": "float32"} | options)
    engine = EmbeddedEngine(trainer.architecture, stream, source, made)
    try:
        yield engine
    finally:
        await engine.close()


def whole(trainer: Trainer, stream: dict[str, Tensor], compute: str = "float32") -> Weights:
    with torch.inference_mode():
        return prepare(
            trainer.architecture, stream, trainer.format, getattr(torch, compute), torch.device("cpu"), trainer.exclude
        )


def published(trainer: Trainer, steps: int) -> list[dict[str, Tensor]]:
    """The stream at the start and after each step."""
    streams = [trainer.publish()]
    for _ in range(steps):
        trainer.step(0.01)
        streams.append(trainer.publish())
    return streams


def spoil(trainer: Trainer, stream: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stream with one number of the last layer that is not finite."""
    name = "model.layers.1.mlp.down_proj.weight"
    if stream[name].dtype == torch.uint8:
        name += "_scale"
    bad = stream[name].clone()
    bad.view(torch.int16 if bad.dtype == torch.bfloat16 else torch.uint8)[0, 0] = (
        0x7FC0 if bad.dtype == torch.bfloat16 else 0xFF
    )
    return stream | {name: bad}


STEPS = ("few", "few", "many", "nothing", "scales", "norms", "biases", "skipped", "unknown", "spoilt", "outside")


async def follow(trainer: Trainer, compute: str, steps: list[str]) -> None:
    stream = trainer.publish()
    async with serving(trainer, stream, compute=compute) as engine:
        must_be_whole = False
        for version, step in enumerate(steps, 1):
            names = list(trainer.weights)
            matrices = [name for name in names if trainer.weights[name].ndim == 2]
            match step:
                case "many":
                    trainer.step(0.4, [matrices[trainer.pick(len(matrices))]])
                case "scales":
                    trainer.step(0.02, [matrices[trainer.pick(len(matrices))]], factor=4.0)
                case "norms":
                    trainer.step(0.1, [name for name in names if "norm" in name])
                case "biases":
                    trainer.step(0.1, [name for name in names if name.endswith("bias")])
                case "nothing":
                    pass
                case _:
                    trainer.step(0.01)
            if step == "skipped":
                trainer.publish()
                trainer.step(0.01)
            new = trainer.publish()
            before = engine.stats().refreshed
            if step in ("spoilt", "outside"):
                bad = spoil(trainer, new) if step == "spoilt" else new
                changed = difference(stream, bad)
                if step == "outside":
                    changed["model.layers.1.mlp.down_proj.weight"] = np.array([3, 1 << 20])
                if step == "spoilt" or not must_be_whole:
                    with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp\.down_proj"):
                        await engine.load(version, bad, changed)
                    must_be_whole = True
                    assert same_bits(engine._weights, whole(trainer, stream, compute))
                    assert engine.stats().refreshed == before
                    continue
            changed = None if step == "unknown" else difference(stream, new)
            await engine.load(version, new, changed)
            assert engine.version == version
            expected = whole(trainer, new, compute)
            assert same_bits(engine._weights, expected), step
            written = engine.stats().refreshed - before
            if must_be_whole or changed is None:
                assert written == expected.elements
            must_be_whole, stream = False, new


@each_format
@settings(max_examples=25, deadline=None)
@given(
    tied=st.booleans(),
    qk_norm=st.booleans(),
    biased=st.booleans(),
    coded=st.booleans(),
    exclude=st.sampled_from([(), ("model.layers.0.*",), ("*.down_proj.weight", "*.q_proj.weight")]),
    compute=st.sampled_from(["float32", "bfloat16"]),
    share=st.sampled_from([refresh.WHOLE_SHARE, 1e9]),
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_every_load_gives_the_bits_of_a_whole_one(
    format: WeightFormat,
    tied: bool,
    qk_norm: bool,
    biased: bool,
    coded: bool,
    exclude: tuple[str, ...],
    compute: str,
    share: float,
    steps: list[str],
    seed: int,
) -> None:
    model = architecture(tied=tied, qk_norm=qk_norm)
    with pytest.MonkeyPatch.context() as patch:
        # At the higher share no matrix is too small to be written element by element.
        patch.setattr(refresh, "WHOLE_SHARE", share)
        asyncio.run(follow(Trainer(model, format, coded and format != "bf16", biased, exclude, seed), compute, steps))


@each_format
async def test_only_what_changed_is_written(format: WeightFormat) -> None:
    trainer = Trainer(architecture(), format, coded=format != "bf16")
    stream = trainer.publish()
    async with serving(trainer, stream) as engine:
        await engine.load(1, stream, {})
        assert engine.stats().refreshed == 0
        # The standby also lacks what the load before wrote.
        for version, (place, written) in enumerate([(7, 1), (30, 2), (30, 2)], 2):
            before = engine.stats().refreshed
            stream, changed = flip(stream, place)
            await engine.load(version, stream, changed)
            assert same_bits(engine._weights, whole(trainer, stream))
            assert engine.stats().refreshed - before == written
        stats = engine.stats()
        assert stats.swaps == 4
        assert stats.load_seconds > 0


def flip(stream: dict[str, Tensor], place: int) -> tuple[dict[str, Tensor], dict[str, Positions]]:
    """The stream with another code of the weight at this place of UP [136, 24], and where that stands in the stream."""
    codes = stream[UP].clone()
    if codes.dtype == torch.uint8:
        place += place // 24 * (codes.shape[1] * 2 - 24)
        codes.view(-1)[place // 2] ^= 1 << place % 2 * 4
    else:
        codes.view(torch.int16 if codes.dtype == torch.bfloat16 else torch.uint8).view(-1)[place] ^= 1
    return stream | {UP: codes}, {UP: np.array([place])}


@pytest.mark.parametrize(("scale", "written"), [("_scale", 16), ("_scale_2", 136 * 24)])
async def test_a_scale_is_all_the_weights_under_it(scale: str, written: int) -> None:
    trainer = Trainer(architecture(), "nvfp4", coded=True)
    stream = trainer.publish()
    async with serving(trainer, stream) as engine:
        scales = stream[UP + scale].float()
        scales.view(-1)[0] *= 2
        stream |= {UP + scale: scales.to(stream[UP + scale].dtype)}
        await engine.load(1, stream, {UP + scale: np.zeros(1, np.int64)})
        assert same_bits(engine._weights, whole(trainer, stream))
        # Gate and up are one matrix, which is prepared whole when half of it is to be written.
        assert engine.stats().refreshed == (16 if written == 16 else 2 * written)


async def test_a_stream_of_another_form_is_taken_whole() -> None:
    trainer = Trainer(architecture(), "fp8", coded=True)
    plain = replace(trainer, coded=False).publish()
    async with serving(trainer, trainer.publish()) as engine:
        for version, stream in enumerate([plain, trainer.publish()], 1):
            before = engine.stats().refreshed
            await engine.load(version, stream, {})
            expected = whole(trainer, stream)
            assert same_bits(engine._weights, expected)
            assert engine.stats().refreshed - before == expected.elements


async def test_without_a_standby_every_load_is_whole() -> None:
    trainer = Trainer(architecture(), "nvfp4", coded=True)
    stream = trainer.publish()
    async with serving(trainer, stream, standby=False) as engine:
        for version in (1, 2):
            await engine.load(version, stream, {})
            assert engine.stats().refreshed == version * engine._weights.elements
            assert engine._standby is None


@pytest.mark.parametrize("begun", [True, False])
async def test_after_a_load_that_was_cancelled_while_it_waited_the_next_is_whole(begun: bool) -> None:
    trainer = Trainer(architecture(), "bf16", coded=True)
    streams = published(trainer, 4)
    async with serving(trainer, streams[0]) as engine:
        loads = [
            asyncio.create_task(engine.load(v, streams[v], difference(streams[v - 1], streams[v]))) for v in (1, 2, 3)
        ]
        if begun:
            await asyncio.sleep(0)
        loads[1].cancel()
        done = await asyncio.gather(*loads, return_exceptions=True)
        assert [type(result) for result in done] == [type(None), asyncio.CancelledError, type(None)]
        assert same_bits(engine._weights, whole(trainer, streams[3]))
        before = engine.stats().refreshed
        await engine.load(4, streams[4], difference(streams[3], streams[4]))
        assert same_bits(engine._weights, whole(trainer, streams[4]))
        assert engine.stats().refreshed - before < engine._weights.elements


@pytest.mark.parametrize("standby", [True, False])
async def test_replaced_weights_are_freed_where_nobody_waits(standby: bool) -> None:
    trainer = Trainer(architecture(), "bf16", coded=False)
    stream = trainer.publish()
    freed: list[str] = []
    async with serving(trainer, stream, standby=standby) as engine:
        served = engine._weights.held()
        count = len(served)
        for tensor in served:
            weakref.finalize(tensor, lambda: freed.append(threading.current_thread().name))
        del served, tensor
        await engine.load(1, stream)
        assert freed == ["weights"] * count
        if standby:  # the second set is kept
            await engine.load(2, stream, {})
            await engine.load(3, stream, {})
            assert len(freed) == count


async def test_after_a_load_that_was_cancelled_the_next_is_whole() -> None:
    trainer = Trainer(architecture(), "nvfp4", coded=True)
    streams = published(trainer, 3)
    async with serving(trainer, streams[0]) as engine:
        await engine.load(1, streams[1], difference(streams[0], streams[1]))
        cancelled = asyncio.create_task(engine.load(2, streams[2], difference(streams[1], streams[2])))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        before = engine.stats().refreshed
        await engine.load(3, streams[3], {})
        assert same_bits(engine._weights, whole(trainer, streams[3]))
        assert engine.stats().refreshed - before == engine._weights.elements


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.layers.7.mlp.up_proj.weight": [0]}, "said to have changed, but the weights lack it"),
        ({UP: [-1, 0]}, r"up_proj\.weight are int64 \[2\] in \[-1, 0\]"),
        ({UP: [[1]]}, r"up_proj\.weight are int64 \[1, 1\]"),
        ({UP: [136 * 32]}, r"must be int64 \[n\] in \[0, 4352\)"),
        ({"model.embed_tokens.weight": [40 * 24]}, r"embed_tokens\.weight .* in \[0, 960\)"),
    ],
)
async def test_positions_that_do_not_fit_are_refused(changed: dict[str, list[Any]], message: str) -> None:
    trainer = Trainer(architecture(), "nvfp4", coded=True)
    stream = trainer.publish()
    async with serving(trainer, stream) as engine:
        with pytest.raises(BadInput, match=message):
            await engine.load(1, stream, {name: np.array(positions) for name, positions in changed.items()})
        assert engine.version == 0
        assert same_bits(engine._weights, whole(trainer, stream))


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_codes_are_what_the_engine_would_have_made(format: WeightFormat, compute: str) -> None:
    trainer = Trainer(architecture(tied=False), format, coded=True, biased=True, exclude=("model.layers.0.*",))
    coded, plain = trainer.publish(), replace(trainer, coded=False).publish()
    assert len(coded) > len(plain)
    assert same_bits(whole(trainer, coded, compute), whole(trainer, plain, compute))


def test_streams_that_do_not_fit_are_named() -> None:
    trainer = Trainer(architecture(), "nvfp4", coded=True)
    good = trainer.publish()
    for bad, message in (
        ({name: tensor for name, tensor in good.items() if name != f"{UP}_scale_2"}, rf"lack {UP}_scale_2"),
        (good | {UP: good[UP][:, :-1]}, rf"{UP} is uint8 \[136, 15\]; it must be uint8 \[136, 16\]"),
        (good | {UP: good[UP].view(torch.float8_e4m3fn)}, rf"{UP} is float8_e4m3fn"),
        (good | {f"{UP}_scale_2": torch.tensor(torch.inf)}, rf"{UP} holds NaN or infinity"),
        (good | {UP: torch.full((136, 24), torch.nan)}, rf"{UP} holds NaN or infinity"),
        (good | {"model.norm.weight": torch.ones(24, dtype=torch.uint8)}, r"model\.norm\.weight is uint8"),
    ):
        with pytest.raises(BadInput, match=message):
            whole(trainer, bad)
    with pytest.raises(BadInput, match=r"it must be bfloat16 \[32, 24\]"):
        whole(replace(trainer, format="bf16"), good)
