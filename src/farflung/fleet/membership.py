"""A replica's place in the router's rotation: join, report with every heartbeat, join again after anything, leave."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from farflung.fleet.wire import explain

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0


class Membership:
    """``report`` gives what the replica says of itself; the router's answer says how often it wants to hear that."""

    def __init__(
        self, router: str, http: aiohttp.ClientSession, report: Callable[[], Mapping[str, Any]], interval: float = 1.0
    ) -> None:
        self._router = router.rstrip("/")
        self._http = http
        self._report = report
        self._interval = interval
        self._wake = asyncio.Event()
        self._why = ""
        self.joined = False

    async def run(self) -> None:
        """Until cancelled. A router that does not answer is asked again at every heartbeat."""
        while True:
            self._wake.clear()
            await self._beat()
            try:
                async with asyncio.timeout(self._interval * random.uniform(0.9, 1.0)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def hurry(self) -> None:
        """Something changed that the router should hear of at once."""
        self._wake.set()

    async def leave(self) -> None:
        """Best effort: a router that cannot be told sees the heartbeats end."""
        report = self._report()
        url = URL(f"{self._router}/v1/replicas/{quote(report['source']['replica'], safe='')}", encoded=True)
        try:
            timeout = aiohttp.ClientTimeout(total=1.0)
            async with self._http.delete(url.update_query(url=report["url"]), timeout=timeout):
                self.joined = False
        except (aiohttp.ClientError, TimeoutError) as error:
            log.info("the router could not be told that this replica leaves: %r", error)

    async def _beat(self) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
            async with self._http.post(f"{self._router}/v1/replicas", json=self._report(), timeout=timeout) as answer:
                body = await answer.read()
                if answer.status == 200:
                    data = await answer.json()
                    self._interval = max(0.01, float(data.get("heartbeat_seconds", self._interval)))
                    self._note(True, "")
                else:
                    self._note(False, f"it answered {answer.status}: {explain(body)[1]}")
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            self._note(False, repr(error))

    def _note(self, joined: bool, why: str) -> None:
        """Log what changed, once."""
        if joined and not self.joined:
            log.info("joined the router at %s", self._router)
        elif why and why != self._why:
            log.warning("out of the router at %s: %s", self._router, why)
        self.joined, self._why = joined, why
