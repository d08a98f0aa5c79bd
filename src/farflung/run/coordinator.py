"""The coordinator's HTTP face: tickets out, episodes in, batches out, updates in. docs/architecture.md lists the calls.

Whatever it answers with 200 is durable. It keeps no state that the ledger does not, but for who samples what right now.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from aiohttp import web

from farflung.config import Recipe, dump_recipe
from farflung.core import frame
from farflung.core.episode import DropCause, Episode
from farflung.core.errors import DISK_FULL, BadInput, FarflungError, disk_full
from farflung.core.metrics import UpdateMetrics
from farflung.fleet import wire
from farflung.run.buffer import Buffer
from farflung.run.ledger import Ledger
from farflung.weights.publisher import Published

POLL_SECONDS = 10.0  # an empty answer after this long, so that both sides see that the other lives
MAX_BODY = 1 << 30
LOST_GROUPS = 16  # in a row: what fails so often will not mend itself

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Coordinator:
    """Serves one run. ``over`` once all updates are made; ``halted`` holds the reason when it cannot go on."""

    def __init__(self, ledger: Ledger, buffer: Buffer, recipe: Recipe, facts: Mapping[str, Any]) -> None:
        self._ledger = ledger
        self._buffer = buffer
        self._recipe = recipe
        self._facts = dict(facts)
        self._pulse = asyncio.Event()
        self._ending = False
        self._sampling = False
        self.halted: str | None = None

    @property
    def over(self) -> bool:
        return self._ending or self._ledger.last_update() >= self._recipe.run.updates

    @property
    def sampling(self) -> bool:
        """Whether tickets are given out yet."""
        return self._sampling

    def start_sampling(self) -> None:
        """The fleet is there (or has had its time): give tickets out."""
        self._sampling = True
        self._notify()

    def finish_early(self) -> None:
        """Make no further updates (time is up); the one being made is still recorded."""
        self._ending = True
        self._notify()

    def halt(self, reason: str) -> None:
        """The run cannot go on; what is in the ledger stays."""
        self.halted = self.halted or reason
        self._notify()

    def worker_died(self, worker: str) -> int:
        """Hand out again what a dead worker was sampling."""
        count = self._buffer.release(worker)
        self._notify()
        return count

    def app(self, auth: Any) -> web.Application:
        """``auth`` is the middleware that asks for the run's token."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[auth, self._errors])
        app.router.add_get("/v1/recipe", self._get_recipe)
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_post("/v1/tickets", self._post_tickets)
        app.router.add_post("/v1/episodes", self._post_episode)
        app.router.add_post("/v1/drops", self._post_drop)
        app.router.add_post("/v1/batches", self._post_batch)
        app.router.add_post("/v1/updates", self._post_update)
        app.router.add_post("/v1/halts", self._post_halt)
        return app

    def status(self) -> dict[str, Any]:
        """What the live view shows."""
        return {
            "update": self._ledger.last_update(),
            "updates": self._recipe.run.updates,
            "episodes": self._ledger.episode_count(),
            "buffer": dict(self._buffer.counts()),
            "dropped": self._ledger.drops(),
            "retried": self._ledger.drops(final=False),
            "reward": self._ledger.recent_reward(),
            "over": self.over,
            "halted": self.halted,
        }

    # Handlers

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except FarflungError as error:
            return web.json_response({"error": str(error), "kind": type(error).__name__}, status=400)
        except (OSError, sqlite3.OperationalError) as error:
            if not disk_full(error):
                raise
            self.halt(DISK_FULL)
            return web.json_response({"error": self.halted, "kind": "disk_full"}, status=507)

    async def _get_recipe(self, request: web.Request) -> web.Response:
        return web.json_response({"recipe": dump_recipe(self._recipe), **self._facts})

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _post_tickets(self, request: web.Request) -> web.Response:
        body = await wire.read_json(request)
        worker, most, running = body.get("worker"), body.get("max", 1), body.get("running")
        if not isinstance(worker, str) or not worker or type(most) is not int or most < 1:
            raise BadInput(f"worker is {worker!r:.100} and max {most!r:.100}", where="tickets")
        if running is not None:
            try:
                self._buffer.release(worker, but={(int(g), int(i), int(attempt)) for g, i, attempt in running})
            except (TypeError, ValueError) as error:
                raise BadInput(f"running is no list of [group, index, attempt]: {error}", where="tickets") from None
        deadline = time.monotonic() + POLL_SECONDS
        while True:
            if self.over or self.halted:
                return web.json_response({"error": self.halted or "the run is over", "kind": "over"}, status=410)
            if self._sampling and (tickets := self._buffer.tickets(worker, most)):
                return web.json_response({"episodes": [asdict(ticket) for ticket in tickets]})
            if not await self._change(deadline):
                return web.json_response({"episodes": []})

    async def _post_episode(self, request: web.Request) -> web.Response:
        raw = await wire.read_body(request)
        recorded = self._buffer.finish(Episode.decode(raw), raw)
        self._notify()
        return web.json_response({"recorded": recorded})

    async def _post_drop(self, request: web.Request) -> web.Response:
        body = await wire.read_json(request)
        try:
            cause = DropCause(body["cause"])
            key = (int(body["group"]), int(body["index"]), int(body["attempt"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a drop: {error!r}", where="drops") from None
        detail = str(body.get("detail", ""))
        self._buffer.fail(*key, cause, detail)
        if self._buffer.lost_in_a_row >= LOST_GROUPS:
            self.halt(f"{LOST_GROUPS} groups in a row came to nothing; the last failure ({cause}): {detail[:500]}")
        self._notify()
        return web.json_response({})

    async def _post_batch(self, request: web.Request) -> web.Response:
        update = (await wire.read_json(request)).get("update")
        if type(update) is not int:
            raise BadInput(f"update is {update!r:.100}", where="batches")
        deadline = time.monotonic() + POLL_SECONDS
        while True:
            if self._ledger.batch(update) == [] and (self.over or self.halted):
                return web.json_response({"error": self.halted or "the run is over", "kind": "over"}, status=410)
            groups = self._buffer.batch(update)
            if groups is not None:
                self._notify()  # there is room for new groups now
                return web.Response(body=self._frame(update, groups), content_type="application/octet-stream")
            if not await self._change(deadline):
                return web.Response(status=204)

    def _frame(self, update: int, groups: list[int]) -> bytes:
        """The batch on the wire: how many episodes each group has, and every episode's own frame as bytes."""
        episodes: dict[str, frame.Array] = {}
        members = []
        for group in groups:
            indices = self._ledger.group_episodes(group)
            members.append(len(indices))
            for index in indices:
                raw = self._ledger.read_episode(group, index)
                episodes[f"{group}/{index}"] = np.frombuffer(raw, np.uint8)
        return frame.encode({"update": update, "members": members}, episodes)

    async def _post_update(self, request: web.Request) -> web.Response:
        body = await wire.read_json(request)
        try:
            published = Published.of(body["published"])
            metrics = UpdateMetrics.from_dict(body["metrics"]) if body.get("metrics") else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"not an update: {error!r}", where="updates") from None
        if metrics is None:
            self._ledger.add_base_version(published)
            recorded = True
        else:
            recorded = self._ledger.commit_update(metrics, published)
        self._notify()
        return web.json_response({"recorded": recorded})

    async def _post_halt(self, request: web.Request) -> web.Response:
        self.halt(str((await wire.read_json(request)).get("reason", "a worker cannot go on")))
        return web.json_response({})

    # Waiting

    def _notify(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _change(self, deadline: float) -> bool:
        """Wait until something changed; False once the deadline has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._pulse.wait(), left)
        except TimeoutError:
            return False
        return True


def decode_batch(raw: bytes) -> list[list[Episode]]:
    """The groups of a batch as they lie on the wire. Raises Corrupt."""
    data, arrays = frame.decode(raw, where="batch")
    episodes = [Episode.decode(array.tobytes(), where=f"batch, episode {name}") for name, array in arrays.items()]
    groups, at = [], 0
    for members in data["members"]:
        groups.append(episodes[at : at + members])
        at += members
    return groups
