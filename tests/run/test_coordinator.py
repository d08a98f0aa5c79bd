"""The coordinator over real HTTP."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from builders import episode, recipe

from farflung.config import Recipe
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.fleet import wire
from farflung.run import coordinator as module
from farflung.run.buffer import Buffer
from farflung.run.coordinator import Coordinator, decode_batch
from farflung.run.ledger import Ledger
from farflung.weights.publisher import Published, PublishedStream

PUBLISHED = Published(1, {"bf16": PublishedStream(5, 100, 7, 0, 6.5)}, seconds=0.5)

TOKEN = "a-long-random-word"


class Served:
    def __init__(self, folder: Path, settings: Recipe) -> None:
        self.ledger = Ledger(folder)
        self.coordinator = Coordinator(self.ledger, Buffer(self.ledger, settings, ["t"]), settings, {"model": "m"})
        self.coordinator.start_sampling()
        self.url = ""
        self.http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, bytes]:
        async with self.http.post(self.url + path, json=body, data=raw) as answer:
            return answer.status, await answer.read()

    async def tickets(self, most: int) -> list[dict[str, Any]]:
        async with self.http.post(self.url + "/v1/tickets", json={"worker": "w", "max": most}) as answer:
            return list((await answer.json())["episodes"])

    async def batch(self, update: int) -> bytes:
        async with asyncio.timeout(30):
            while (answer := await self.post("/v1/batches", {"update": update}))[0] == 204:
                pass
        assert answer[0] == 200
        return answer[1]

    async def finish(self, ticket: dict[str, Any]) -> int:
        made = episode(ticket["group"], ticket["index"], ticket["task"])
        return (await self.post("/v1/episodes", raw=made.encode()))[0]


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.2)
    it = Served(tmp_path, recipe(groups=1, group_size=2, updates=2))
    runner, it.url = await wire.listen(it.coordinator.app(wire.guard(TOKEN)), "127.0.0.1", 0)
    async with aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as it.http:
        yield it
    await runner.cleanup()
    it.ledger.close()


async def test_tickets_episodes_batches_updates(served: Served) -> None:
    assert (await served.post("/v1/batches", {"update": 1}))[0] == 204
    waiting = asyncio.create_task(served.batch(1))
    for ticket in await served.tickets(2):
        assert await served.finish(ticket) == 200
        assert await served.finish(ticket) == 200  # told twice, counted once
    raw = await waiting
    assert [[e.index for e in group] for group in decode_batch(raw)] == [[0, 1]]
    assert (await served.post("/v1/batches", {"update": 1}))[1] == raw
    report = {"metrics": UpdateMetrics(1, TokenStats()).to_dict(), "published": asdict(PUBLISHED)}
    assert await served.post("/v1/updates", report) == (200, b'{"recorded": true}')
    assert await served.post("/v1/updates", report) == (200, b'{"recorded": false}')
    assert served.coordinator.status()["update"] == 1
    assert served.coordinator.status()["episodes"] == 2


async def test_no_ticket_is_given_before_the_fleet_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.1)
    settings = recipe()
    ledger = Ledger(tmp_path)
    coordinator = Coordinator(ledger, Buffer(ledger, settings, ["t"]), settings, {})
    runner, url = await wire.listen(coordinator.app(wire.guard(TOKEN)), "127.0.0.1", 0)
    async with aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http:
        for expected in (0, 3):
            async with http.post(f"{url}/v1/tickets", json={"worker": "w", "max": 3}) as answer:
                assert len((await answer.json())["episodes"]) == expected
            coordinator.start_sampling()
    await runner.cleanup()


async def test_tickets_that_were_lost_on_the_way_are_given_again(served: Served) -> None:
    async def ask(running: list[list[int]]) -> list[dict[str, Any]]:
        body = {"worker": "w", "max": 2, "running": running}
        return list(json.loads((await served.post("/v1/tickets", body))[1])["episodes"])

    lost = await ask([])
    assert await ask([]) == lost
    assert served.coordinator.status()["buffer"]["sampling"] == 2
    others = await ask([[t["group"], t["index"], t["attempt"]] for t in lost])
    assert {(t["group"], t["index"]) for t in lost}.isdisjoint((t["group"], t["index"]) for t in others)
    assert served.coordinator.status()["buffer"]["sampling"] == 4


async def test_over_is_said_to_everybody(served: Served) -> None:
    served.coordinator.finish_early()
    assert (await served.post("/v1/tickets", {"worker": "w", "max": 1}))[0] == 410
    assert (await served.post("/v1/batches", {"update": 1}))[0] == 410


async def test_no_token_no_answer(served: Served) -> None:
    async with aiohttp.ClientSession() as stranger:
        for headers in ({}, wire.bearer("wrong")):
            async with stranger.get(served.url + "/v1/recipe", headers=headers) as answer:
                assert answer.status == 401


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/tickets", {"max": 1}, "worker"),
        ("/v1/drops", {"group": 0, "index": 0, "attempt": 0, "cause": "bad luck"}, "bad luck"),
        ("/v1/updates", {}, "published"),
        ("/v1/batches", {"update": 7}, "cannot come after"),
        ("/v1/batches", {"update": "1"}, "update is '1'"),
        ("/v1/batches", {}, "update is None"),
        ("/v1/tickets", {"worker": "w", "max": "x"}, "max 'x'"),
        ("/v1/tickets", {"worker": "w", "max": 1e999}, "max"),
        ("/v1/tickets", {"worker": "w", "max": 1, "running": [[1]]}, "running"),
        ("/v1/tickets", {"worker": "w", "max": 1, "running": 3}, "running"),
        ("/v1/updates", {"metrics": 3, "published": {}}, "not an update"),
        ("/v1/updates", {"metrics": {"update": 1, "all": 3}, "published": {}}, "not an update"),
        ("/v1/updates", {"metrics": None, "published": 3}, "not an update"),
        ("/v1/updates", {"metrics": None, "published": {"version": 0, "streams": {}}}, "not an update"),
        ("/v1/updates", {"metrics": None, "published": asdict(PUBLISHED) | {"streams": {"bf16": 3}}}, "not an update"),
        ("/v1/episodes", {}, "not a frame"),
    ],
)
async def test_bad_requests_are_named(served: Served, path: str, body: dict[str, Any], word: str) -> None:
    status, text = await served.post(path, body)
    assert status == 400
    assert word in text.decode()


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("path", ["tickets", "drops", "batches", "updates", "halts", "episodes"])
async def test_garbage_is_refused_and_changes_nothing(served: Served, path: str, raw: bytes) -> None:
    before = served.coordinator.status()
    status, text = await served.post(f"/v1/{path}", raw=raw)
    assert status == 400
    assert json.loads(text)["error"]
    assert served.coordinator.status() == before


async def test_a_broken_episode_is_refused_and_can_be_sent_again(served: Served) -> None:
    ticket = (await served.tickets(1))[0]
    raw = bytearray(episode(ticket["group"], ticket["index"], "t").encode())
    raw[len(raw) // 2] ^= 0xFF
    assert (await served.post("/v1/episodes", raw=bytes(raw[:-8])))[0] == 400
    assert served.ledger.episode_count() == 0
    assert await served.finish(ticket) == 200


async def test_machinery_that_never_works_stops_the_run_and_says_why(served: Served) -> None:
    lost = 0
    while served.coordinator.halted is None:
        assert lost < 16 * 2 * 2
        for ticket in await served.tickets(2):
            key = {name: ticket[name] for name in ("group", "index", "attempt")}
            assert (await served.post("/v1/drops", key | {"cause": "sandbox", "detail": "no start"}))[0] == 200
            lost += 1
    assert "16 groups in a row came to nothing; the last failure (sandbox): no start" in served.coordinator.halted
    assert served.ledger.drops() == {"sandbox": 32}
    assert (await served.post("/v1/tickets", {"worker": "w", "max": 1}))[0] == 410


async def test_a_full_disk_stops_the_run_and_loses_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await served.tickets(2)
    assert await served.finish(first) == 200

    def full(path: Path, raw: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("farflung.run.ledger._write_durably", full)
    assert await served.finish(second) == 507
    assert served.coordinator.halted == "the disk is full"
    assert (await served.post("/v1/tickets", {"worker": "w", "max": 1}))[0] == 410
    assert served.ledger.episode_count() == 1
