"""The agents' view of the fleet: one turn, whatever becomes of replicas and router meanwhile, until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import TracebackType
from urllib.parse import quote

import aiohttp
from yarl import URL

from farflung.core.errors import BadInput, Corrupt, InfraError
from farflung.core.process import patience
from farflung.core.sampling import Completion, GenerateRequest
from farflung.engines.base import TooLong
from farflung.fleet import wire

CONNECT_SECONDS = 5.0
FORGET_SECONDS = 2.0


class FleetClient:
    """``agents.base.Sampler`` over a router (or a single replica) at ``url``.

    Connection errors, 409 and 5xx are tried again until ``deadline_seconds`` have passed for the turn; a reply that
    does not check is asked for again at another replica. The client remembers where each session was served and says
    so, so that a router without memory finds the session's cache again. ``retries`` counts by cause.
    """

    def __init__(self, url: str, token: str, *, deadline_seconds: float = 240.0) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._deadline = deadline_seconds
        self._http: aiohttp.ClientSession | None = None
        self._served: dict[str, str] = {}
        self.retries: Counter[str] = Counter()

    async def __aenter__(self) -> FleetClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises InfraError when no sampler could serve the turn in time; BadInput (TooLong) when none ever will."""
        raw = request.encode()
        until = time.monotonic() + self._deadline
        avoid: str | None = None
        for pause in patience(0.1, 2.0):
            try:
                return await self._attempt(request.session, raw, avoid, until - time.monotonic())
            except _Again as again:
                self.retries[again.cause] += 1
                avoid = again.avoid
                if time.monotonic() + pause > until:
                    raise InfraError(
                        f"no sampler served the turn within {self._deadline:g} s; last: {again.text}", where=self._url
                    ) from None
            await asyncio.sleep(pause)
        raise AssertionError("patience never ends")

    async def forget(self, session: str) -> None:
        """Best effort: caches of ended sessions are evicted anyway."""
        headers = self._affinity(session)
        self._served.pop(session, None)
        url = URL(f"{self._url}/v1/sessions/{quote(session, safe='')}", encoded=True)
        try:
            timeout = aiohttp.ClientTimeout(total=FORGET_SECONDS)
            async with self._session().delete(url, headers=headers, timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.retries["forget"] += 1

    async def _attempt(self, session: str, raw: bytes, avoid: str | None, seconds: float) -> Completion:
        headers = self._affinity(session)
        if avoid:
            headers[wire.AVOID_HEADER] = avoid
        timeout = aiohttp.ClientTimeout(total=max(0.001, seconds), sock_connect=CONNECT_SECONDS)
        try:
            async with self._session().post(
                f"{self._url}/v1/generate", data=raw, headers=headers, timeout=timeout
            ) as answer:
                body = await answer.read()
        except TimeoutError:
            raise _Again("timeout", "no answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Again("connection", repr(error)) from None
        replica = answer.headers.get(wire.REPLICA_HEADER)
        if answer.status == 200:
            try:
                completion = Completion.decode(body)
            except Corrupt as error:
                raise _Again("corrupt", str(error), replica) from None
            self._served[session] = completion.source.replica
            return completion
        kind, text = wire.explain(body)
        if answer.status == 409 or answer.status >= 500:
            raise _Again(kind, text)
        if kind == "too_long":
            raise TooLong(text, where=self._url)
        raise BadInput(f"{answer.status} {kind}: {text}", where=self._url)

    def _affinity(self, session: str) -> dict[str, str]:
        replica = self._served.get(session)
        return {wire.REPLICA_HEADER: replica} if replica else {}

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=wire.bearer(self._token), connector=aiohttp.TCPConnector(limit=0)
            )
        return self._http


class _Again(Exception):
    """The turn can be tried again; ``avoid`` is the replica whose reply did not check."""

    def __init__(self, cause: str, text: str, avoid: str | None = None) -> None:
        super().__init__(text)
        self.cause = cause
        self.text = text
        self.avoid = avoid
