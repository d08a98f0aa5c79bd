"""A single replica over HTTP: the token, errors as the contract has them, retried turns, draining."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from farflung.core import frame
from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import Completion, GenerateRequest
from farflung.engines.base import TooLong
from farflung.engines.paced import PacedEngine
from farflung.fleet import wire
from farflung.fleet.client import FleetClient
from farflung.fleet.replica import Replica
from tests.fleet.kit import TOKEN, engine, request, until


class One:
    """One replica and a plain HTTP session."""

    def __init__(self, machine: PacedEngine, http: aiohttp.ClientSession) -> None:
        self.machine = machine
        self.replica = Replica(machine, TOKEN, capacity=4)
        self.http = http
        self.url = ""

    async def post(self, body: bytes, token: str | None = TOKEN, path: str = "/v1/generate") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        async with self.http.post(self.url + path, data=body, headers=headers) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def one() -> AsyncIterator[One]:
    async with aiohttp.ClientSession() as http:
        stage = One(engine(rate=200.0, version=2), http)
        stage.url = await stage.replica.start("127.0.0.1", 0)
        yield stage
        await stage.replica.close()


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", "é"])
@pytest.mark.parametrize("path", ["/v1/generate", "/v1/drain", "/v1/nothing"])
async def test_a_wrong_token_gets_nothing(
    one: One, token: str | None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, body = await one.post(request().encode(), token, path)
    assert status == 401
    assert json.loads(body)["kind"] == "unauthorized"
    assert TOKEN not in body.decode() + caplog.text
    assert not one.replica.draining


@pytest.mark.parametrize(
    "body",
    [b"", b"junk", b"FFR1\xff\xff\xff\xff", frame.encode({}), frame.encode({"session": "s", "params": {"max_tokens": 0}}),
     frame.encode({"session": "s", "params": {"max_tokens": 4}}, {"ids": np.zeros(0, np.int32)}),
     frame.encode({"session": "s", "params": {"max_tokens": 4, "beams": 2}}, {"ids": np.zeros(2, np.int32)}),
     request().encode()[:-4]],
)  # fmt: skip
async def test_a_bad_frame_is_a_bad_request(one: One, body: bytes) -> None:
    status, answer = await one.post(body)
    assert status == 400
    assert json.loads(answer)["kind"] == "bad_request"


async def test_a_sequence_beyond_the_context_is_too_long(one: One) -> None:
    one.machine._context = 100
    status, answer = await one.post(request(length=100).encode())
    assert (status, json.loads(answer)["kind"]) == (413, "too_long")
    async with FleetClient(one.url, TOKEN) as client:
        with pytest.raises(TooLong):
            await client.generate(request(length=100))


async def test_a_lone_replica_serves_its_folder_and_no_other_version(one: One) -> None:
    status, answer = await one.post(request(min_version=2).encode())
    assert status == 200
    assert Completion.decode(answer).versions.tolist() == [2] * 4
    status, answer = await one.post(request(min_version=3).encode())
    assert (status, json.loads(answer)["kind"]) == (404, "unknown_version")


async def test_unknown_paths_are_json_errors(one: One) -> None:
    status, answer = await one.post(b"{}", path="/v1/nothing")
    assert (status, json.loads(answer)["kind"]) == (404, "http")


async def test_the_same_turn_twice_is_sampled_once(one: One) -> None:
    body = request(max_tokens=20).encode()
    answers = await asyncio.gather(*(one.post(body) for _ in range(3)))
    assert {status for status, _ in answers} == {200}
    assert len({answer for _, answer in answers}) == 1
    assert one.machine.stats().sampled_tokens == 20
    assert one.replica.report()["counters"]["joined"] == 2


async def test_a_retry_outlives_its_lost_first_try(one: One) -> None:
    body = request(max_tokens=40).encode()
    first = asyncio.create_task(one.post(body))
    await until(lambda: one.machine.stats().active == 1)
    retry = asyncio.create_task(one.post(body))
    await until(lambda: one.replica.report()["counters"]["joined"] == 1)
    first.cancel()
    assert (await retry)[0] == 200
    assert one.machine.stats().sampled_tokens == 40
    assert one.replica._turns == {}


async def test_another_turn_of_a_session_waits_for_the_one_before(one: One) -> None:
    first = asyncio.create_task(one.post(request(max_tokens=20).encode()))
    await until(lambda: one.machine.stats().active == 1)
    second = asyncio.create_task(one.post(request(max_tokens=1, length=9).encode()))
    status, _ = await second
    assert status == 200
    assert first.done()


async def test_a_finished_turn_can_be_asked_for_again(one: One) -> None:
    first, again = [Completion.decode((await one.post(request().encode()))[1]) for _ in range(2)]
    assert first.ids.tolist() == again.ids.tolist()
    assert again.cached == 3


async def test_draining_refuses_new_turns_and_finishes_old_ones(one: One) -> None:
    turn = asyncio.create_task(one.post(request(max_tokens=40).encode()))
    await until(lambda: one.machine.stats().active == 1)
    assert (await one.post(b"", path="/v1/drain"))[0] == 202
    status, answer = await one.post(request("other").encode())
    assert (status, json.loads(answer)["kind"]) == (503, "draining")
    assert (await turn)[0] == 200
    assert await one.replica.drain(1.0)


async def test_a_drain_has_a_deadline(one: One) -> None:
    turn = asyncio.create_task(one.post(request(max_tokens=2000).encode()))
    await until(lambda: one.machine.stats().active == 1)
    assert not await one.replica.drain(0.05)
    turn.cancel()


async def test_sessions_with_odd_names_can_be_forgotten(one: One) -> None:
    name = "run/7 ü?#%2F"
    async with FleetClient(one.url, TOKEN) as client:
        await client.generate(request(name))
        assert (await client.generate(request(name, length=7))).cached == 7
        await client.forget(name)
        assert one.machine._seen == {}
        assert client.retries == {}


async def test_an_engine_that_breaks_is_an_infrastructure_failure(one: One) -> None:
    await one.machine.close()
    status, answer = await one.post(request().encode())
    assert (status, json.loads(answer)["kind"]) == (500, "engine")
    async with FleetClient(one.url, TOKEN, deadline_seconds=0.2) as client:
        with pytest.raises(InfraError, match="engine is closed"):
            await client.generate(request())
        assert client.retries["engine"] >= 1
    assert one.replica.broken.is_set()


async def test_a_client_with_a_wrong_token_is_told_at_once(one: One) -> None:
    async with FleetClient(one.url, "wrong") as client:
        with pytest.raises(BadInput, match="401 unauthorized"):
            await client.generate(request())


async def test_nobody_there_is_an_infrastructure_failure() -> None:
    async with FleetClient("http://127.0.0.1:9", TOKEN, deadline_seconds=0.2) as client:
        with pytest.raises(InfraError, match="no sampler served"):
            await client.generate(request())
        await client.forget("s")


async def test_a_body_beyond_the_limit_is_refused(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY", 1000)
    small = Replica(one.machine, TOKEN, capacity=1)
    one.url = await small.start("127.0.0.1", 0)
    params = request().params
    status, answer = await one.post(GenerateRequest("s", np.zeros(1000, np.int32), params).encode())
    assert (status, json.loads(answer)["kind"]) == (413, "too_large")
    await small.close()


def test_tokens_come_from_a_file_or_the_environment(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "token"
    file.write_text("abc\n")
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "def")
    assert wire.read_token(file) == "abc"
    assert wire.read_token() == "def"
    monkeypatch.delenv(wire.TOKEN_VARIABLE)
    for place in (None, tmp_path / "missing"):
        with pytest.raises(BadInput):
            wire.read_token(place)
    file.write_text("se cret")
    with pytest.raises(BadInput) as caught:
        wire.read_token(file)
    assert "se cret" not in str(caught.value)
