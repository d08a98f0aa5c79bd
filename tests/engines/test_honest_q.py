"""Recorded probabilities are the ones that tokens were drawn with, for every format, as transformers recomputes them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from farflung.core.sampling import Completion, GenerateRequest, KvFormat, WeightFormat
from farflung.engines import audit
from farflung.engines.embedded import EmbeddedEngine, EngineOptions
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.weights import read_folder
from farflung.formats.kv import KV_FORMATS
from farflung.formats.weights import FORMATS
from tests.engines import tiny
from tests.engines.tiny import request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3", tmp_path_factory.mktemp("qwen3"), spread=0.1)


def recomputed(model: PreTrainedModel, kv: KvFormat, one: GenerateRequest, done: Completion) -> torch.Tensor:
    ids = np.concatenate([one.ids, done.ids])
    return audit.full_log_probs(model, kv, ids, len(one.ids), one.params.temperature)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("format", FORMATS)
async def test_q_follows_from_version_and_format(folder: Path, format: WeightFormat, kv: KvFormat) -> None:
    model = tiny.reference(folder)
    audit.load_rounded(model, read_folder(folder), format)
    source = replace(tiny.SOURCE, weights=format, kv=kv)
    engine = EmbeddedEngine.from_folder(folder, source, EngineOptions(capacity=8, prefill_tokens=64))
    asked = [
        request(10 + i, session=str(i), seed=i, max_tokens=60, top_k=(0, 16)[i % 2], top_p=(1.0, 0.9)[i % 2])
        for i in range(16)
    ]
    try:
        done = await asyncio.gather(*map(engine.generate, asked))
    finally:
        await engine.close()
    full = audit.replayed_log_probs(
        Architecture.read(folder),
        read_folder(folder),
        source,
        [(one.ids, completion.ids, one.params.temperature) for one, completion in zip(asked, done, strict=True)],
    )
    replayed = audit.join(
        audit.audit(log_probs, completion, one.params)
        for log_probs, one, completion in zip(full, asked, done, strict=True)
    )
    assert replayed.gaps.max() < 1e-3
    assert replayed.drifts.max() < 1e-3
    independent = audit.join(
        audit.audit(recomputed(model, kv, one, completion), completion, one.params, seed=i)
        for i, (one, completion) in enumerate(zip(asked, done, strict=True))
    )
    # A key or value at the edge between two codes rounds the other way when a last digit differs: hardly felt in BF16,
    # more in FP8.
    assert np.mean(independent.gaps < 1e-3) > (0.999 if kv == "bf16" else 0.99)
    assert independent.drifts.max() < (1e-3 if kv == "bf16" else 2e-2)
    assert not independent.wrong.any()
    assert audit.uniformity_p(independent.places, bins=20) > 1e-3


async def test_tokens_on_both_sides_of_a_swap_follow_from_their_own_version(folder: Path, tmp_path: Path) -> None:
    versions = [read_folder(folder), read_folder(tiny.save("qwen3", tmp_path, seed=3, spread=0.1))]
    engine = EmbeddedEngine.from_folder(folder, tiny.SOURCE, EngineOptions(recompute_on_swap=True))
    one = request(max_tokens=200)
    try:
        turn = asyncio.create_task(engine.generate(one))
        while engine.stats().sampled_tokens < 20:
            await asyncio.sleep(0.001)
        await engine.load(1, versions[1])
        done = await turn
    finally:
        await engine.close()
    assert set(done.versions) == {0, 1}
    for version, weights in enumerate(versions):
        model = tiny.reference(folder)
        audit.load_rounded(model, weights, "bf16")
        checked = audit.audit(recomputed(model, "bf16", one, done), done, one.params)
        mine = done.versions == version
        assert checked.gaps[mine].max() < 1e-3
        assert np.median(checked.gaps[~mine]) > 1e-2


def test_the_audit_sees_a_wrong_q(folder: Path) -> None:
    assert audit.uniformity_p(np.random.default_rng(0).random(10_000)) > 1e-3
    assert audit.uniformity_p(np.random.default_rng(0).random(10_000) ** 1.1) < 1e-6
    assert audit.chi_square_p(np.array([10.0, 10.0]), np.array([10.0, 10.0])) == 1.0
    assert audit.chi_square_p(np.array([60.0, 40.0]), np.array([50.0, 50.0])) == pytest.approx(0.0455, abs=1e-4)
    with pytest.raises(ValueError, match="do not fit"):
        audit.load_rounded(tiny.reference(folder), {"nothing": torch.zeros(2, 2)}, "bf16")
