"""A mirror of a folder, that tests ask over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from farflung.fleet import wire
from farflung.fleet.mirror import Mirror
from farflung.weights import FolderStore, StoreError
from tests.fleet.kit import TOKEN

MIB = 1 << 20


class Upstream(FolderStore):
    """A folder as the store behind a mirror, that counts, waits and fails as a test says."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.down = False

    def get(self, key: str, max_bytes: int) -> bytes:
        self.asked.append(key)
        assert self.open.wait(30)
        if self.down:
            raise StoreError("the network is down", where=key)
        return super().get(key, max_bytes)

    def add(self, data: bytes, run: str = "run") -> str:
        key = f"{run}/objects/{hashlib.sha256(data).hexdigest()}"
        self.put(key, data)
        return key


class Site:
    """A mirror and a client of it."""

    def __init__(self, upstream: Upstream, cache: Path, limit: int) -> None:
        self.upstream = upstream
        self.mirror = Mirror(upstream, cache, token=TOKEN, limit_bytes=limit)

    async def start(self) -> None:
        url = await self.mirror.start("127.0.0.1", 0)
        self.http = aiohttp.ClientSession(url, headers=wire.bearer(TOKEN), timeout=aiohttp.ClientTimeout(total=30))

    async def close(self) -> None:
        self.upstream.open.set()
        await self.http.close()
        await self.mirror.close()

    async def ask(self, key: str, method: str = "GET", **options: Any) -> tuple[int, bytes]:
        async with self.http.request(method, f"/{key}", **options) as answer:
            return answer.status, await answer.read()

    async def get(self, key: str) -> bytes:
        status, body = await self.ask(key)
        assert status == 200, body
        return body

    async def refused(self, key: str, method: str = "GET", **options: Any) -> tuple[int, str]:
        """The status and the kind of an error answer."""
        status, body = await self.ask(key, method, **options)
        answer = json.loads(body)
        assert answer["error"]
        return status, answer["kind"]

    async def stats(self) -> dict[str, int]:
        return dict(json.loads(await self.get("stats")))


@asynccontextmanager
async def site(path: Path, limit: int = MIB) -> AsyncIterator[Site]:
    one = Site(Upstream(path / "store"), path / "cache", limit)
    await one.start()
    try:
        yield one
    finally:
        await one.close()


def cached(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "cache").iterdir() if not entry.name.startswith(".lock"))
