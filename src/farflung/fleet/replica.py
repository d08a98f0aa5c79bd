"""A sampler: an engine behind HTTP that keeps itself at the newest version and keeps its place in the router's rotation."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import aiohttp
from aiohttp import web

from farflung.core.sampling import Completion, GenerateRequest
from farflung.engines.base import Engine, EngineError
from farflung.fleet import wire
from farflung.fleet.membership import Membership
from farflung.fleet.reconcile import Reconciler

BROKEN_AFTER = 3


@dataclass(slots=True)
class _Turn:
    """A turn in flight and how many requests wait for it."""

    digest: bytes
    task: asyncio.Task[Completion]
    waiters: int = 0


class Replica:
    """The server over one engine.

    A turn that is asked for again while it is in flight (a retry whose first try is not known to be lost) joins the
    first; another turn of the same session waits for it; a turn that nobody waits for is cancelled. A finished turn
    leaves nothing behind that a retry could meet, since a request carries the whole session. ``broken`` is set when the
    engine has failed several turns in a row: the process should end and be started again.
    """

    def __init__(
        self,
        engine: Engine,
        token: str,
        *,
        capacity: int,
        reconciler: Reconciler | None = None,
        version_seconds: float = 5.0,
    ) -> None:
        self.engine = engine
        self.capacity = capacity
        self.url = ""
        self.draining = False
        self.broken = asyncio.Event()
        self._engine_errors = 0
        self._token = token
        self._reconciler = reconciler
        self._version_seconds = version_seconds
        self._turns: dict[str, _Turn] = {}
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._counts = {"turns": 0, "failed": 0, "cancelled": 0, "joined": 0, "refused": 0}
        self._membership: Membership | None = None
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._following: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[bool] | None = None

    async def start(
        self, host: str, port: int, *, router: str | None = None, advertise: str | None = None, interval: float = 1.0
    ) -> str:
        """Listen, begin to follow the store, join the router; returns the URL. ``advertise`` is the URL that others
        reach this replica by, where it is not the one that it listens on."""
        self._runner, bound = await wire.listen(self.app(), host, port)
        self.url = advertise or bound
        if router is not None:
            self._http = aiohttp.ClientSession(headers=wire.bearer(self._token))
            self._membership = Membership(router, self._http, self.report, interval)
            self._beating = asyncio.create_task(self._membership.run())
            if self._reconciler is not None:
                self._reconciler.on_change = self._membership.hurry
        if self._reconciler is not None:
            self._following = asyncio.create_task(self._reconciler.run())
        return self.url

    def app(self) -> web.Application:
        app = wire.application(self._token)
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_delete("/v1/sessions/{session:.+}", self._forget)
        app.router.add_get("/v1/status", self._status)
        app.router.add_post("/v1/drain", self._drain)
        return app

    @property
    def loading(self) -> bool:
        """It has not caught up with the store since it started."""
        return self._reconciler is not None and not self._reconciler.ready.is_set()

    def report(self) -> dict[str, Any]:
        """What the router hears at every heartbeat, and people in the status."""
        stats = self.engine.stats()
        counters = asdict(stats) | self._counts
        if self._reconciler is not None:
            counters["weights"] = self._reconciler.counters()
        return {
            "url": self.url,
            "source": asdict(self.engine.source),
            "capacity": self.capacity,
            "version": self.engine.version,
            "active": stats.active,
            "waiting": stats.waiting,
            "draining": self.draining,
            "loading": self.loading,
            "counters": counters,
        }

    async def drain(self, seconds: float | None) -> bool:
        """Take no new turns, let those in flight finish, leave the router; false when some were still in flight then."""
        self.draining = True
        if self._membership is not None:
            self._membership.hurry()
        finished = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            finished = False
        await self._leave()
        return finished

    async def close(self) -> None:
        """Leave and stop at once. Safe to call twice."""
        await _stop(self._drained)
        await self._leave()
        await _stop(self._following)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()
        await self.engine.close()

    async def _leave(self) -> None:
        membership, self._membership = self._membership, None
        await _stop(self._beating)
        if membership is not None:
            await membership.leave()

    # Handlers

    async def _generate(self, http: web.Request) -> web.Response:
        raw = await wire.read_body(http)
        request = GenerateRequest.decode(raw)
        if self.draining:
            return wire.error(503, "draining", "this replica takes no new turns")
        self._inflight += 1
        self._idle.clear()
        try:
            refusal = await self._refusal(request)
            if refusal is not None:
                self._counts["refused"] += 1
                return refusal
            completion = await self._turn(request, blake2b(raw, digest_size=16).digest())
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        except EngineError:
            self._counts["failed"] += 1
            self._engine_errors += 1
            if self._engine_errors >= BROKEN_AFTER:
                self.broken.set()
            raise
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()
        self._counts["turns"] += 1
        self._engine_errors = 0
        return web.Response(body=completion.encode(), content_type=wire.FRAME)

    async def _refusal(self, request: GenerateRequest) -> web.Response | None:
        """Why this turn cannot be served here now, after a short wait for its version."""
        if self.loading:
            return wire.error(503, "loading", "this replica has not caught up with the weight store yet")
        wanted = request.min_version
        if wanted > self.engine.version:
            if self._reconciler is None:
                return _unknown(wanted, self.engine.version)
            try:
                async with asyncio.timeout(self._version_seconds):
                    if wanted > self._reconciler.newest and wanted > (newest := await self._reconciler.look()):
                        return _unknown(wanted, newest)
                    await self._reconciler.reach(wanted)
            except TimeoutError:
                why = "not yet"
            except Exception as error:
                why = f"the weight store cannot be asked: {error}"
            else:
                return None
            return wire.error(409, "version", f"version {wanted} is asked for, {self.engine.version} is here: {why}")
        return None

    async def _turn(self, request: GenerateRequest, digest: bytes) -> Completion:
        turn = self._turns.get(request.session)
        if turn is None or turn.digest != digest:
            before = turn.task if turn is not None else None
            turn = _Turn(digest, asyncio.create_task(self._sample(request, before)))
            self._turns[request.session] = turn
        else:
            self._counts["joined"] += 1
        turn.waiters += 1
        try:
            return await asyncio.shield(turn.task)
        finally:
            turn.waiters -= 1
            if turn.waiters == 0:
                turn.task.cancel()
                if self._turns.get(request.session) is turn:
                    del self._turns[request.session]

    async def _sample(self, request: GenerateRequest, before: asyncio.Task[Completion] | None) -> Completion:
        if before is not None:
            await asyncio.wait({before})
        return await self.engine.generate(request)

    async def _forget(self, http: web.Request) -> web.Response:
        self.engine.forget(http.match_info["session"])
        return web.Response(status=204)

    async def _status(self, http: web.Request) -> web.Response:
        return web.json_response(self.report())

    async def _drain(self, http: web.Request) -> web.Response:
        if self._drained is None:
            self._drained = asyncio.create_task(self.drain(None))
        return web.json_response({"draining": True}, status=202)


async def _stop(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _unknown(wanted: int, newest: int) -> web.Response:
    return wire.error(404, "unknown_version", f"version {wanted} does not exist; the newest is {newest}")
