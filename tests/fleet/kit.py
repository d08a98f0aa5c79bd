"""Small fleets on loopback: real servers, the paced engine, a weight source that tests steer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from farflung.config import RouterConfig
from farflung.core.errors import InfraError
from farflung.core.sampling import GenerateRequest, SamplingParams, Source
from farflung.engines.paced import PacedEngine
from farflung.fleet import wire
from farflung.fleet.reconcile import Reconciler
from farflung.fleet.replica import Replica
from farflung.fleet.router import RouterServer
from farflung.weights.subscriber import Update

TOKEN = "a-token-for-tests"
QUIET = RouterConfig(turn_seconds=30.0, retry_seconds=30.0, heartbeat_seconds=0.5)


def request(session: str = "s", *, max_tokens: int = 4, min_version: int = 0, length: int = 3) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, top_k=8, seed=7)
    return GenerateRequest(session, np.arange(length, dtype=np.int32), params, min_version)


def engine(
    pool: str = "a", name: str = "a-0", *, rate: float = 1e4, capacity: int = 16, version: int = 0
) -> PacedEngine:
    return PacedEngine(Source(pool, name, "bf16", "bf16"), tokens_per_second=rate, capacity=capacity, version=version)


class Weights:
    """A weight source in memory: ``pointer`` names the newest version, ``bad`` are errors that fetching raises."""

    def __init__(self, pointer: int | None = 0) -> None:
        self.pointer = pointer
        self.bad: dict[int, Exception] = {}
        self.down = False
        self.hanging = threading.Event()
        self.hanging.set()
        self.fetched: list[int] = []

    def newest(self) -> int | None:
        self.hanging.wait()
        if self.down:
            raise InfraError("the store is down")
        return self.pointer

    def fetch(self, version: int) -> Update:
        self.fetched.append(version)
        if version in self.bad:
            raise self.bad[version]
        return Update(version, {}, None)


class Fleet:
    """A router and replicas in this process, each with its own server on its own port."""

    def __init__(self, config: RouterConfig = QUIET) -> None:
        self.config = config
        self.server = RouterServer(TOKEN, config)
        self.replicas: dict[str, Replica] = {}
        self.url = ""

    async def start(self) -> None:
        self.url = await self.server.start("127.0.0.1", 0)

    async def add(self, machine: PacedEngine, *, capacity: int = 16, weights: Weights | None = None) -> Replica:
        reconciler = None if weights is None else Reconciler(machine, weights, poll_seconds=0.02, backoff_limit=0.1)
        replica = Replica(machine, TOKEN, capacity=capacity, reconciler=reconciler, version_seconds=0.3)
        self.replicas[machine.source.replica] = replica
        await replica.start("127.0.0.1", 0, router=self.url, interval=self.config.heartbeat_seconds)
        await until(lambda: machine.source.replica in self.server.state.members)
        return replica

    async def kill(self, name: str) -> None:
        """As kill -9 does it: connections break, nobody is told."""
        replica = self.replicas[name]
        assert replica._runner is not None
        for task in (replica._beating, replica._following):
            if task is not None:
                task.cancel()
        await sever(replica._runner)

    async def restart_router(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        assert self.server._runner is not None
        await sever(self.server._runner)
        await self.server.close()
        self.server = RouterServer(TOKEN, self.config)
        self.url = await self.server.start("127.0.0.1", port)

    async def status(self) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http,
            http.get(f"{self.url}/v1/status") as answer,
        ):
            return dict(await answer.json())

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.close()
        await self.server.close()


@asynccontextmanager
async def fleet(config: RouterConfig = QUIET) -> AsyncIterator[Fleet]:
    one = Fleet(config)
    await one.start()
    try:
        yield one
    finally:
        await one.close()


async def sever(runner: web.AppRunner) -> None:
    """Close a server's port and break its connections."""
    for site in list(runner.sites):
        await site.stop()
    assert runner.server is not None
    for connection in list(runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until ``condition()`` holds; an error after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
