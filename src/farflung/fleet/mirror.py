"""A mirror: one region's read-through cache of a weight store. Each object crosses the ocean once, however many ask.

    GET, HEAD /KEY        an object, a manifest, a pointer, a note; objects and manifests by range too
    PUT /RUN/leases/NAME  a subscriber's note, passed on to the store
    GET /stats            JSON: what was served and what it cost

Objects and manifests are named by the SHA-256 of their bytes. They are verified before anything of them is served, and
kept for ever, or until room is needed. Every other key may change, so it is asked for in the store each time. Errors:
404 missing, 502 the store's bytes are wrong, 503 the store cannot be reached or fails.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from farflung.core.errors import BadInput, Corrupt
from farflung.fleet import process, wire
from farflung.fleet.blocking import beside
from farflung.fleet.cache import CHUNK, Cached, Decayed, HashCache, digest_of
from farflung.weights.manifest import MAX_OBJECT
from farflung.weights.store import MAX_POINTER, Missing, Store, StoreError, check_key
from farflung.weights.urls import open_store

log = logging.getLogger(__name__)

MAX_PASSED = 1 << 20
FILLS = 4
"""Objects fetched at a time; each is in memory whole until those that wait for it have it."""
PASSES = 32
FILL_SECONDS = 900.0
PASS_SECONDS = 60.0
SEND_SECONDS = 60.0

_HASHED = re.compile(r".+/(?:objects/|manifests/[0-9]{8,15}-)([0-9a-f]{64})")
_LEASE = re.compile(r"[^/]+/leases/[^/]+")
T = TypeVar("T")


@dataclass(slots=True)
class Stats:
    """``misses`` were fetched from the store for an object or a manifest, ``hits`` answered without a fetch of their own,
    ``passed`` were requests for what is never cached. ``rejected``: bytes, of the store's or the cache's, without the
    hash in their name. ``uncached``: fetched, served and not kept, for the disk was full or all of it in use."""

    hits: int = 0
    misses: int = 0
    passed: int = 0
    bytes_served: int = 0
    bytes_fetched: int = 0
    rejected: int = 0
    uncached: int = 0


class Mirror:
    """HTTP around a store and a cache. Holds no truth: stop it, lose its folder, start it elsewhere at any time."""

    def __init__(self, store: Store, cache: Path, *, token: str, limit_bytes: int) -> None:
        """``limit_bytes`` also bounds one object, as MAX_OBJECT does. Raises BadInput for a folder that cannot be the cache."""
        self._store = store
        self._token = token
        self._cache = HashCache(cache, limit_bytes)
        self._fills: dict[str, asyncio.Task[bytes]] = {}
        self._filling = asyncio.Semaphore(FILLS)
        self._passing = asyncio.Semaphore(PASSES)
        self._runner: web.AppRunner | None = None
        self.stats = Stats()
        self.url = ""

    async def start(self, host: str, port: int) -> str:
        """Returns the URL. Port 0 takes a free one. Raises BadInput."""
        self._runner, self.url = await wire.listen(self.app(), host, port)
        return self.url

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for fill in list(self._fills.values()):
            fill.cancel()
        await asyncio.gather(*self._fills.values(), return_exceptions=True)
        self._cache.close()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[wire.guard(self._token), _explained], client_max_size=MAX_POINTER)
        app.router.add_get("/stats", self._show)
        app.router.add_get("/{key:.+}", self._get)
        app.router.add_put("/{key:.+}", self._put)
        return app

    async def _show(self, request: web.Request) -> web.Response:
        cache = {"cached_objects": len(self._cache), "cached_bytes": self._cache.used, "limit_bytes": self._cache.limit}
        return web.json_response(asdict(self.stats) | cache)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        key = check_key(request.match_info["key"])
        hashed = _HASHED.fullmatch(key)
        if hashed is None:
            return await self._pass(request, key)
        digest = hashed[1]
        with self._cache.open(digest) as cached:
            if cached is not None:
                self.stats.hits += 1
                return await self._send_file(request, digest, cached)
        data = memoryview(await self._filled(key, digest))

        async def chunk(number: int) -> memoryview:
            return data[number * CHUNK : (number + 1) * CHUNK]

        return await self._send(request, digest, len(data), chunk)

    async def _put(self, request: web.Request) -> web.Response:
        key = check_key(request.match_info["key"])
        if not _LEASE.fullmatch(key):
            return wire.error(
                405, "read_only", f"a mirror takes RUN/leases/NAME, not {key}; write to the store behind it"
            )
        data = await wire.read_body(request)
        await self._ask(lambda: self._store.write_note(key, data), self._passing, PASS_SECONDS)
        return web.Response(status=204)

    async def _pass(self, request: web.Request, key: str) -> web.Response:
        """What may change: from the store each time, and whole whatever range was asked for."""
        self.stats.passed += 1
        data = await self._ask(lambda: self._store.get(key, MAX_PASSED), self._passing, PASS_SECONDS)
        self.stats.bytes_fetched += len(data)
        self.stats.bytes_served += len(data) if request.method == "GET" else 0
        return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    async def _filled(self, key: str, digest: str) -> bytes:
        """The object's verified bytes; those who ask for it at the same time share one fetch, which outlives them."""
        fill = self._fills.get(key)
        if fill is not None:
            data = await asyncio.shield(fill)
            self.stats.hits += 1
            return data
        fill = self._fills[key] = asyncio.create_task(self._fill(key, digest))
        fill.add_done_callback(lambda task: (self._fills.pop(key), task.cancelled() or task.exception()))
        return await asyncio.shield(fill)

    async def _fill(self, key: str, digest: str) -> bytes:
        held = digest in self._cache
        kept = await self._cache.recheck(digest)
        if kept is not None:
            self.stats.hits += 1
            return kept
        self.stats.rejected += held
        self.stats.misses += 1
        most = min(self._cache.limit, MAX_OBJECT)
        data = await self._ask(lambda: self._store.get(key, most), self._filling, FILL_SECONDS)
        self.stats.bytes_fetched += len(data)
        if await digest_of(data) != digest:
            self.stats.rejected += 1
            log.warning("%s: the store's bytes do not have the hash in its name", key)
            raise Corrupt("the store's bytes do not have the hash in its name", where=key, mend="publish it again")
        if not await self._cache.add(digest, data):
            self.stats.uncached += 1
        return data

    async def _ask(self, call: Callable[[], T], slots: asyncio.Semaphore, seconds: float) -> T:
        """One call to the store. Raises Missing, Corrupt for what is too large, and StoreError for all other trouble."""
        try:
            async with asyncio.timeout(seconds), slots:
                return await beside(call, seconds=seconds)
        except TimeoutError:
            raise StoreError(f"the store did not answer within {seconds:g} s") from None
        except (Missing, Corrupt):
            raise
        except BadInput as problem:
            raise StoreError(f"the store behind this mirror is wrong: {problem}") from problem

    async def _send_file(self, request: web.Request, digest: str, cached: Cached) -> web.StreamResponse:
        async def chunk(number: int) -> bytes:
            try:
                return await asyncio.to_thread(cached.chunk, number)
            except Decayed:
                log.warning("%s is damaged in the cache", digest)
                self.stats.rejected += 1
                self._cache.drop(digest)
                raise

        return await self._send(request, digest, cached.size, chunk)

    async def _send(
        self,
        request: web.Request,
        digest: str,
        size: int,
        chunk: Callable[[int], Awaitable[bytes | memoryview]],
    ) -> web.StreamResponse:
        """The object, or the range that was asked for, out of its chunks."""
        try:
            wanted = request.http_range
        except ValueError:
            wanted = slice(size, size)
        ranged = wanted.start is not None or wanted.stop is not None
        start, stop, _ = wanted.indices(size)
        if ranged and start >= stop:
            refusal = wire.error(416, "range", f"no such range of {size} bytes: {request.headers.get('Range')}")
            refusal.headers["Content-Range"] = f"bytes */{size}"
            return refusal
        response = web.StreamResponse(status=206 if ranged else 200, headers={"Accept-Ranges": "bytes"})
        if ranged:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        response.etag = digest
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            for number in range(start // CHUNK, -(-stop // CHUNK)):
                at = number * CHUNK
                part = (await chunk(number))[max(0, start - at) : stop - at]
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(part)
                self.stats.bytes_served += len(part)
        except OSError as problem:
            # An error answer now would be taken for a part of the object, so the connection breaks instead.
            log.info("%s was not sent whole: %s", digest, problem or "the client reads nothing")
            if request.transport is not None:
                request.transport.abort()
        return response


@web.middleware
async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the store's errors are to a client."""
    try:
        return await handler(request)
    except Missing as problem:
        return wire.error(404, "missing", str(problem))
    except Corrupt as problem:
        return wire.error(502, "corrupt", str(problem))
    except StoreError as problem:
        log.warning("%s %s: %s", request.method, request.path, problem)
        return wire.error(503, "store", str(problem))


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """``store``: URL of the store, or of another mirror with the same token. ``limit_bytes`` bounds the cache."""

    store: str
    cache: Path
    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    limit_bytes: int = 64 << 30


async def serve(options: MirrorOptions) -> None:
    """Serve until SIGTERM or SIGINT; prints one JSON line with the URL once it listens. Raises BadInput before that."""
    store = open_store(options.store, token=options.token)
    mirror = Mirror(store, options.cache, token=options.token, limit_bytes=options.limit_bytes)
    try:
        process.announce("mirror", await mirror.start(options.host, options.port))
        await process.stop_signal()
    finally:
        await mirror.close()
