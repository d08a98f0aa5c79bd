"""The router's process: turns in, each to the replica that ``routing.Router`` names, and on to another when that fails."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from yarl import URL

from farflung.config import RouterConfig
from farflung.core import frame
from farflung.core.errors import Corrupt, FarflungError
from farflung.core.process import patience
from farflung.core.sampling import GenerateRequest, Source
from farflung.fleet import process, wire
from farflung.fleet.routing import Member, Policy, Report, Router

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
FORGET_SECONDS = 2.0
PASSED_ON = {400, 404, 413}


@dataclass(frozen=True, slots=True)
class _Failed:
    """Another replica may serve the turn. ``kind`` and ``text`` are for the client if none does."""

    cause: str
    text: str


class RouterServer:
    """HTTP around the state machine. A client that goes away cancels its turn upstream."""

    def __init__(self, token: str, config: RouterConfig | None = None) -> None:
        self._token = token
        self._config = config or RouterConfig()
        self.state = Router(Policy(heartbeat_seconds=self._config.heartbeat_seconds))
        self.failed: Counter[str] = Counter()
        self._gone: dict[str, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> str:
        self._http = aiohttp.ClientSession(
            headers=wire.bearer(self._token), connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        self._runner, self.url = await wire.listen(self.app(), host, port)
        self._spawn(self._watch())
        return self.url

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    def app(self) -> web.Application:
        app = wire.application(self._token)
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_delete("/v1/sessions/{session:.+}", self._forget)
        app.router.add_get("/v1/status", self._status)
        app.router.add_post("/v1/drain", self._drain)
        app.router.add_post("/v1/replicas", self._join)
        app.router.add_delete("/v1/replicas/{name:.+}", self._leave)
        return app

    # Turns

    async def _generate(self, http: web.Request) -> web.Response:
        """Try replicas until one answers; after a round without success pause, and give up after retry_seconds."""
        raw = await wire.read_body(http)
        request = GenerateRequest.decode(raw)
        tried = {name for name in (http.headers.get(wire.AVOID_HEADER),) if name}
        for name in tried & self.state.members.keys():
            self.state.failed(self.state.members[name], "corrupt", time.monotonic())
        until = time.monotonic() + self._config.retry_seconds
        pauses = patience(0.05, 1.0)
        last = _Failed("no_replica", "no replica is in rotation")
        while True:
            member = self.state.choose(
                request.session,
                time.monotonic(),
                min_version=request.min_version,
                tried=tried,
                before=http.headers.get(wire.REPLICA_HEADER),
            )
            if member is None:
                pause = next(pauses)
                if time.monotonic() + pause > until:
                    return self._give_up(last)
                await asyncio.sleep(pause)
                tried = set()
                continue
            outcome = await self._attempt(member, request, raw)
            if isinstance(outcome, web.Response):
                return outcome
            last = outcome
            tried.add(member.name)
            self.state.failed(member, outcome.cause, time.monotonic())
            log.info("session %s leaves %s (%s): %s", request.session, member.name, outcome.cause, outcome.text)
            if time.monotonic() > until:
                return self._give_up(last)

    async def _attempt(self, member: Member, request: GenerateRequest, raw: bytes) -> web.Response | _Failed:
        """One replica's answer, unless it fails, is slow, or drops out of rotation meanwhile."""
        gone = self._gone.setdefault(member.name, asyncio.Event())
        post = asyncio.create_task(self._post(member, request, raw))
        lost = asyncio.create_task(gone.wait())
        self.state.begin(member.name)
        try:
            done, _ = await asyncio.wait(
                {post, lost}, timeout=self._config.turn_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if post in done:
                return post.result()
            if lost in done:
                return _Failed("silent", "it stopped reporting")
            return _Failed("slow", f"it did not answer within {self._config.turn_seconds:g} s")
        finally:
            self.state.end(member.name)
            lost.cancel()
            post.cancel()
            await asyncio.wait({post, lost})

    async def _post(self, member: Member, request: GenerateRequest, raw: bytes) -> web.Response | _Failed:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with self._http.post(f"{member.report.url}/v1/generate", data=raw, timeout=timeout) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _Failed("connection", repr(error))
        if answer.status == 200:
            return self._accept(member, request, body)
        kind, text = wire.explain(body)
        if answer.status in PASSED_ON and kind != "http":
            return wire.error(answer.status, kind, text)
        if answer.status == 409 or kind in ("loading", "draining"):
            return _Failed(kind if kind in ("loading", "draining") else "version", text)
        return _Failed(f"http_{answer.status}", text)

    def _accept(self, member: Member, request: GenerateRequest, body: bytes) -> web.Response | _Failed:
        """Count what came; a frame that does not parse goes no further (the client checks what the numbers say)."""
        try:
            data, arrays = frame.decode(body, where=member.name)
            source = Source(**data["source"])
            sampled, cached = len(arrays["ids"]), int(data["cached"])
        except (Corrupt, KeyError, TypeError, ValueError) as error:
            return _Failed("corrupt", repr(error))
        self.state.served(source, sampled=sampled, prompt=len(request.ids), cached=cached)
        return web.Response(body=body, content_type=wire.FRAME, headers={wire.REPLICA_HEADER: member.name})

    def _give_up(self, last: _Failed) -> web.Response:
        self.failed[last.cause] += 1
        if last.cause == "version":
            return wire.error(409, "version", last.text)
        text = f"no replica could serve the turn within {self._config.retry_seconds:g} s; the last one: {last.text}"
        return wire.error(503, "no_replica", text)

    # Membership

    async def _join(self, http: web.Request) -> web.Response:
        report = Report.parse(await wire.read_json(http))
        if self.state.join(report, time.monotonic()):
            self._lost(report.source.replica)
            log.info("replica %s joined at %s", report.source.replica, report.url)
        return web.json_response({"heartbeat_seconds": self._config.heartbeat_seconds})

    async def _leave(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        if self.state.leave(name, http.query.get("url")):
            self._gone.pop(name, None)  # it finishes what it has
            log.info("replica %s left", name)
        return web.Response(status=204)

    async def _watch(self) -> None:
        """Look for silent replicas; their turns go on elsewhere at once."""
        while True:
            await asyncio.sleep(self._config.heartbeat_seconds / 2 * random.uniform(0.8, 1.0))
            for name in self.state.expire(time.monotonic()):
                log.warning("replica %s is silent and out of rotation", name)
                self._lost(name)

    def _lost(self, name: str) -> None:
        gone = self._gone.pop(name, None)
        if gone is not None:
            gone.set()

    # The rest

    async def _forget(self, http: web.Request) -> web.Response:
        session = http.match_info["session"]
        home = self.state.forget(session) or http.headers.get(wire.REPLICA_HEADER)
        member = self.state.members.get(home) if home else None
        if member is not None:
            self._spawn(self._tell(member, session))
        return web.Response(status=204)

    async def _tell(self, member: Member, session: str) -> None:
        """Free the session's cache; best effort, as the replica evicts what is unused."""
        assert self._http is not None
        url = URL(f"{member.report.url}/v1/sessions/{quote(session, safe='')}", encoded=True)
        try:
            async with self._http.delete(url, timeout=aiohttp.ClientTimeout(total=FORGET_SECONDS)):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("session %s could not be forgotten at %s: %r", session, member.name, error)

    async def _status(self, http: web.Request) -> web.Response:
        return web.json_response(self.state.status(time.monotonic()) | {"failed": dict(self.failed)})

    async def _drain(self, http: web.Request) -> web.Response:
        """Pass the wish on to the replica that ``{"replica": NAME}`` names."""
        assert self._http is not None
        name = (await wire.read_json(http)).get("replica")
        member = self.state.members.get(str(name))
        if member is None:
            known = ", ".join(sorted(self.state.members)) or "none"
            return wire.error(404, "unknown_replica", f"no replica {name!r}; in rotation: {known}")
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            async with self._http.post(f"{member.report.url}/v1/drain", json={}, timeout=timeout) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return wire.error(502, "connection", f"replica {name} cannot be reached: {error!r}")

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def run_router(token: str, config: RouterConfig, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; prints one JSON line with the URL once it listens."""
    server = RouterServer(token, config)
    url = await server.start(host, port)
    process.announce("router", url)
    await process.stop_signal()
    await server.close()


def main(argv: list[str] | None = None) -> int:
    defaults = RouterConfig().model_dump()
    parser = argparse.ArgumentParser(prog="farflung-router", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and prints it")
    parser.add_argument("--token-file", type=Path, help=f"the run's token; without it {wire.TOKEN_VARIABLE} is read")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, dest=name)
    options = parser.parse_args(argv)
    process.start_process()
    try:
        token = wire.read_token(options.token_file)
        config = RouterConfig(**{name: getattr(options, name) for name in defaults})
        asyncio.run(run_router(token, config, options.host, options.port))
    except FarflungError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
