"""The fleet as processes: a router and embedded samplers of a tiny random model, killed while sessions go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from farflung.core.sampling import Completion, GenerateRequest, SamplingParams
from farflung.fleet import wire
from farflung.fleet.client import FleetClient
from farflung.weights.manifest import derive_key
from farflung.weights.publisher import Publisher
from farflung.weights.urls import open_store

TOKEN = "integration-token"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_weights() -> dict[str, torch.Tensor]:
    """Random weights of CONFIG, BF16, by Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 64),
        "lm_head.weight": (96, 64),
        "model.norm.weight": (64,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name, shape in (("q", (64, 64)), ("k", (32, 64)), ("v", (32, 64)), ("o", (64, 64))):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (128, 64)), ("up", (128, 64)), ("down", (64, 128))):
            shapes[f"{at}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (64,)
    return {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.randn(shape, generator=generator).mul(0.1).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


class Stage:
    """A model folder, a store with version 0, and the processes that a test starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        self.weights = tiny_weights()
        save_file(self.weights, self.model / "model.safetensors")
        store = open_store(str(path / "store"))
        self.publisher = Publisher(store, "run", formats=("bf16", "nvfp4"), key=derive_key(TOKEN))
        self.publisher.publish(0, self.weights)
        (path / "token").write_text(TOKEN)
        self.processes: list[asyncio.subprocess.Process] = []
        self.router = ""

    def publish(self, version: int) -> None:
        self.weights = {name: w + 0.01 * torch.ones_like(w) for name, w in self.weights.items()}
        self.publisher.publish(version, self.weights)

    async def start(self, module: str, *argv: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """A process and the line that it announces itself with (empty if it ended instead)."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"farflung.fleet.{module}", "--token-file", str(self.path / "token"), *argv,
            stdout=asyncio.subprocess.PIPE, stderr=(self.path / "log").open("ab"),
            env=os.environ | {"FARFLUNG_PARENT": str(os.getpid())},
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 100)
        return process, json.loads(line) if line else {}

    async def start_router(self, port: int = 0) -> asyncio.subprocess.Process:
        process, said = await self.start("router", "--port", str(port), "--heartbeat-seconds", "1.0")
        self.router = said["url"]
        return process

    async def start_replica(self, pool: str, weights: str = "bf16") -> asyncio.subprocess.Process:
        process, _ = await self.start(
            "serve", "--model", str(self.model), "--pool", pool, "--replica", f"{pool}-0", "--weights", weights,
            "--store", str(self.path / "store"), "--run-id", "run", "--join", self.router, "--capacity", "4",
        )  # fmt: skip
        return process

    async def status(self) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http,
            http.get(f"{self.router}/v1/status") as answer,
        ):
            return dict((await answer.json())["pools"])

    async def wait(self, pool: str, field: str, at_least: int) -> None:
        """Until a pool's first replica says so."""
        async with asyncio.timeout(30):
            while True:
                replicas = (await self.status()).get(pool, {}).get("replicas", [])
                if replicas and replicas[0][field] >= at_least and not replicas[0]["loading"]:
                    return
                await asyncio.sleep(0.05)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    one = Stage(tmp_path)
    yield one
    for process in one.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


def turn(session: str, ids: list[int], *, max_tokens: int = 8, min_version: int = 0) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, top_k=16, top_p=0.95, seed=5)
    return GenerateRequest(session, np.array(ids, np.int32), params, min_version)


@pytest.mark.timeout(300)
async def test_sessions_go_on_while_processes_are_killed(stage: Stage) -> None:
    router = await stage.start_router()
    first, second = await asyncio.gather(stage.start_replica("high"), stage.start_replica("low", "nvfp4"))
    await stage.wait("high", "version", 0)
    await stage.wait("low", "version", 0)
    async with FleetClient(stage.router, TOKEN, deadline_seconds=60) as client:
        replies = {s: await client.generate(turn(s, [1, 2, 3])) for s in ("s0", "s1")}
        assert sorted(c.source.weights for c in replies.values()) == ["bf16", "nvfp4"]
        high = next(s for s, c in replies.items() if c.source.pool == "high")
        low = next(s for s in replies if s != high)
        ids = {s: [1, 2, 3, *c.ids.tolist(), 4] for s, c in replies.items()}
        again = await client.generate(turn(high, ids[high]))
        assert again.source.pool == "high"
        assert again.cached >= 10

        # A new version reaches both pools, requantised, and the tokens say so.
        stage.publish(1)
        for s in (high, low):
            completion = await client.generate(turn(s, ids[s], min_version=1))
            assert set(completion.versions.tolist()) == {1}

        # A sampler dies in mid-turn; its turn goes on elsewhere and comes back whole.
        long = asyncio.create_task(client.generate(turn(high, ids[high], max_tokens=2000)))
        await stage.wait("high", "turns", 1)
        first.kill()
        completion = await long
        assert completion.source.pool == "low"
        assert len(completion.ids) == 2000
        assert (await stage.status())["high"]["retries"].get("connection") == 1
        Completion.decode(completion.encode())

        # The router dies in mid-turn; a new one at its address finds the replicas and the sessions again.
        long = asyncio.create_task(client.generate(turn(low, ids[low], max_tokens=1500)))
        await stage.wait("low", "turns", 1)
        router.kill()
        await router.wait()
        router = await stage.start_router(int(stage.router.rsplit(":", 1)[1]))
        assert len((await long).ids) == 1500
        assert client.retries["connection"] >= 1

        # The dead replica's successor catches up with what was published meanwhile before it serves.
        stage.publish(2)
        first = await stage.start_replica("high")
        await stage.wait("high", "version", 2)
        served = [await client.generate(turn(f"t{i}", [5, 6], min_version=2)) for i in range(4)]
        assert {c.source.pool for c in served} == {"high", "low"}

        # SIGTERM finishes the turn in flight, leaves the router and ends well. (On a busy machine a replica may have been
        # silent for so long that the session has moved: wherever it is, it stays.)
        home = (await client.generate(turn(low, [7]))).source.pool
        assert (await stage.status())[home]["sessions"] >= 1
        long = asyncio.create_task(client.generate(turn(low, ids[low], max_tokens=1000)))
        await stage.wait(home, "turns", 1)
        leaving = {"high": first, "low": second}[home]
        leaving.send_signal(signal.SIGTERM)
        assert (await long).source.pool == home
        assert await leaving.wait() == 0
        assert (await stage.status())[home]["replicas"] == []
    assert TOKEN not in (stage.path / "log").read_text()


async def test_a_lone_sampler(stage: Stage) -> None:
    process, said = await stage.start("serve", "--model", str(stage.model))
    async with FleetClient(said["url"], TOKEN) as client:
        assert (await client.generate(turn("s", [1, 2]))).versions.tolist() == [0] * 8
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0


async def test_starts_that_cannot_work_say_why(stage: Stage) -> None:
    wrong = {
        "config.json": ("--model", str(stage.path / "nowhere")),
        "--run-id": ("--model", str(stage.model), "--store", "x"),
        "cannot listen": ("--model", str(stage.model), "--engine", "paced", "--host", "192.0.2.1"),
    }
    for process, said in await asyncio.gather(*(stage.start("serve", *argv) for argv in wrong.values())):
        assert said == {}
        assert await process.wait() == 2
    log = (stage.path / "log").read_text()
    assert [why for why in wrong if why not in log] == []
