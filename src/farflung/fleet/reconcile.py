"""Keeps an engine at the newest version of the store, while it serves; what does not verify is never loaded."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from farflung.core.errors import BadInput
from farflung.core.process import patience
from farflung.engines.base import Engine
from farflung.fleet.blocking import beside

if TYPE_CHECKING:
    from farflung.weights.subscriber import Update

log = logging.getLogger(__name__)

NO_VERSION = -1
T = TypeVar("T")


class WeightsSource(Protocol):
    """What a replica needs of the weight store; both calls may block and raise, and ``newest`` is asked while ``fetch`` is at work."""

    def newest(self) -> int | None:
        """The version that the pointer names, None before the first."""
        ...

    def fetch(self, version: int) -> Update:
        """That version's tensors, verified. Raises BadInput (Corrupt, Missing) or InfraError."""
        ...


class Reconciler:
    """Polls the pointer, fetches beside the serving engine, loads, and goes on. Every failure is counted and retried.

    A version that does not verify is retried with growing pauses, a newer one at once. ``ready`` is set once the engine
    has the version that the pointer names, from the store's bytes, or the store has none. ``on_change`` hears of both.
    """

    def __init__(
        self,
        engine: Engine,
        source: WeightsSource,
        *,
        poll_seconds: float = 0.5,
        backoff_limit: float = 30.0,
    ) -> None:
        self._engine = engine
        self._source = source
        self._poll = poll_seconds
        self._limit = backoff_limit
        self.on_change: Callable[[], None] = lambda: None
        self._held = NO_VERSION
        self._followed = False
        self._looking = asyncio.Lock()
        self._queued: asyncio.Task[int] | None = None
        self._calls: set[float] = set()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.newest = NO_VERSION
        self.loads = 0
        self.skipped = 0
        self.bytes = 0
        self.stage_seconds = 0.0
        self.failures = 0
        self.rejected: dict[int, int] = {}
        self.last_error = ""

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        pauses, failed, retry_at = patience(self._poll, self._limit), NO_VERSION, 0.0
        while True:
            self._wake.clear()
            try:
                newest = await self.look()
                if newest > self._held and (newest != failed or loop.time() >= retry_at):
                    if newest != failed:
                        pauses, failed = patience(self._poll, self._limit), newest
                    retry_at = loop.time() + next(pauses)
                    await self._advance(newest)
                if newest <= self._held:
                    self.last_error = ""
                    if not self.ready.is_set():
                        self.ready.set()
                        self.on_change()
            except Exception as error:
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"
                log.warning("version %d serves on: %s", self._engine.version, error)
            self._pulse()
            try:
                async with asyncio.timeout(self._poll * random.uniform(0.8, 1.2)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def look(self) -> int:
        """A look at the pointer that begins after this call; those who wait for the same one share it."""
        if self._queued is None:
            self._queued = asyncio.create_task(self._look())
            self._queued.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._queued)

    async def _look(self) -> int:
        async with self._looking:
            self._queued = None
            newest = await self._ask(self._source.newest)
        self.newest = NO_VERSION if newest is None else newest
        return self.newest

    async def reach(self, version: int) -> None:
        """Wait until the engine serves ``version`` or newer."""
        self._wake.set()
        while self._engine.version < version:
            await self._changed.wait()

    def counters(self) -> dict[str, Any]:
        return {
            "newest": self.newest,
            "lag": max(0, self.newest - self._held),
            "loads": self.loads,
            "skipped": self.skipped,
            "bytes": self.bytes,
            "stage_seconds": round(self.stage_seconds, 3),
            "failures": self.failures,
            "rejected": {str(version): count for version, count in self.rejected.items()},
            "last_error": self.last_error,
            "store_busy_seconds": round(time.monotonic() - min(self._calls), 1) if self._calls else 0.0,
        }

    async def _ask(self, call: Callable[[], T]) -> T:
        """One call to the store. Its thread is a daemon, so that a store that hangs cannot keep the process from ending;
        until then it shows in the counters."""
        began = time.monotonic()
        self._calls.add(began)
        try:
            return await beside(call, seconds=None)
        finally:
            self._calls.discard(began)

    async def _advance(self, version: int) -> None:
        try:
            began = time.monotonic()
            update = await self._ask(lambda: self._source.fetch(version))
            # What changed is what changed since the fetch before: no use to an engine that did not load that one.
            followed, self._followed = self._followed, False
            await self._engine.load(version, update.tensors, update.changed if followed else None)
            self._followed = True
        except BadInput:
            self.rejected[version] = self.rejected.get(version, 0) + 1
            raise
        self.stage_seconds += time.monotonic() - began
        self.bytes += update.bytes
        self.skipped += max(0, version - self._held - 1) if self._held != NO_VERSION else 0
        self._held = version
        self.loads += 1
        self.on_change()
        log.info("serving version %d", version)

    def _pulse(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
