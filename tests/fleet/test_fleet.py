"""The fleet on loopback: what a turn survives, and how sessions are shared out."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import aiohttp
import pytest

from farflung.config import RouterConfig
from farflung.core.errors import BadInput, Corrupt, InfraError
from farflung.core.sampling import Completion
from farflung.fleet import wire
from farflung.fleet.client import FleetClient
from farflung.fleet.replica import Replica
from tests.fleet.kit import TOKEN, Weights, engine, fleet, request, until


async def test_a_turn_goes_through_router_and_replica() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        await f.add(engine("a", "a-0", version=3))
        completion = await client.generate(request(max_tokens=5))
        assert completion.source.replica == "a-0"
        assert completion.versions.tolist() == [3] * 5
        assert completion.supports is not None
        assert completion.supports.sizes.tolist() == [8] * 5
        pool = (await f.status())["pools"]["a"]
        assert (pool["turns"], pool["sampled_tokens"], pool["prompt_tokens"], pool["sessions"]) == (1, 5, 3, 1)


async def test_pools_get_sessions_by_capacity() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        for pool, capacity in (("a", 4), ("b", 8), ("c", 16)):
            await f.add(engine(pool, f"{pool}-0", rate=1e6), capacity=capacity)
        pools = Counter(
            c.source.pool for c in await asyncio.gather(*(client.generate(request(f"s{i}")) for i in range(70)))
        )
        for pool, share in (("a", 1 / 7), ("b", 2 / 7), ("c", 4 / 7)):
            assert pools[pool] / 70 == pytest.approx(share, abs=0.05)
        status = (await f.status())["pools"]
        assert status["c"]["capacity_share"] == pytest.approx(4 / 7)
        assert status["c"]["session_share"] == pytest.approx(4 / 7, abs=0.02)


async def test_a_session_stays_with_its_replica_and_reuses_its_cache() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        for n in range(4):
            await f.add(engine("a", f"a-{n}", rate=1e6))
        homes: dict[str, set[str]] = {}
        for turn in range(3):
            for s in range(8):
                completion = await client.generate(request(f"s{s}", length=3 + 4 * turn))
                homes.setdefault(f"s{s}", set()).add(completion.source.replica)
                assert completion.cached == (3 + 4 * turn if turn else 0)
        assert all(len(replicas) == 1 for replicas in homes.values())
        assert Counter(r for replicas in homes.values() for r in replicas) == {f"a-{n}": 2 for n in range(4)}


async def test_a_replica_killed_in_mid_turn_loses_no_turn() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        slow = await f.add(engine("a", "a-0", rate=10.0))
        turn = asyncio.create_task(client.generate(request("s", max_tokens=40)))
        await until(lambda: slow.engine.stats().active == 1)
        await f.add(engine("a", "a-1"))
        await f.kill("a-0")
        completion = await turn
        assert completion.source.replica == "a-1"
        assert len(completion.ids) == 40
        status = (await f.status())["pools"]["a"]
        assert status["retries"] == {"connection": 1}
        assert status["moved"] == 1
        assert client.retries == {}


async def test_a_slow_replica_is_passed_over_and_its_turn_cancelled() -> None:
    async with fleet(RouterConfig(turn_seconds=0.5, retry_seconds=30, heartbeat_seconds=0.5)) as f:
        slow = await f.add(engine("a", "a-0", rate=0.1))
        async with FleetClient(f.url, TOKEN) as client:
            turn = asyncio.create_task(client.generate(request("s")))
            await until(lambda: slow.engine.stats().active == 1)
            await f.add(engine("b", "b-0"))
            assert (await turn).source.replica == "b-0"
            await until(lambda: slow.engine.stats().active == 0)
            assert (await f.status())["pools"]["a"]["retries"] == {"slow": 1}


async def test_a_silent_replica_loses_its_turns_to_others() -> None:
    async with (
        fleet(RouterConfig(turn_seconds=30, retry_seconds=30, heartbeat_seconds=0.2)) as f,
        FleetClient(f.url, TOKEN) as client,
    ):
        slow = await f.add(engine("a", "a-0", rate=0.1))
        turn = asyncio.create_task(client.generate(request("s")))
        await until(lambda: slow.engine.stats().active == 1)
        await f.add(engine("a", "a-1"))
        assert slow._beating is not None
        slow._beating.cancel()
        assert (await turn).source.replica == "a-1"
        assert (await f.status())["pools"]["a"]["retries"] == {"silent": 1}


async def test_draining_finishes_turns_in_flight_and_moves_the_sessions() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        first = await f.add(engine("a", "a-0", rate=20.0))
        turn = asyncio.create_task(client.generate(request("s", max_tokens=10)))
        await until(lambda: first.engine.stats().active == 1)
        await f.add(engine("a", "a-1"))
        assert await first.drain(5.0)
        assert (await turn).source.replica == "a-0"
        assert list(f.server.state.members) == ["a-1"]
        assert (await client.generate(request("s", length=9))).source.replica == "a-1"


async def test_the_router_can_die() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        for n in range(3):
            await f.add(engine("abc"[n], f"{'abc'[n]}-0"))
        homes = {s: (await client.generate(request(s))).source.replica for s in ("s0", "s1", "s2", "s3")}
        assert len(set(homes.values())) == 3
        turn = asyncio.create_task(client.generate(request("s4", max_tokens=2000)))
        await until(lambda: any(r.engine.stats().active for r in f.replicas.values()))
        await f.restart_router()
        await turn
        assert client.retries["connection"] >= 1
        await until(lambda: len(f.server.state.members) == 3)
        again = {s: (await client.generate(request(s, length=9))).source.replica for s in homes}
        assert again == homes


async def test_a_client_that_goes_away_cancels_its_turn() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        replica = await f.add(engine("a", "a-0", rate=0.1))
        turn = asyncio.create_task(client.generate(request("s")))
        await until(lambda: replica.engine.stats().active == 1)
        turn.cancel()
        await until(lambda: replica.engine.stats().active == 0)
        assert replica.report()["counters"]["cancelled"] == 1


async def test_no_replica_is_an_infrastructure_failure_in_time() -> None:
    config = RouterConfig(turn_seconds=1, retry_seconds=0.2, heartbeat_seconds=0.1)
    async with fleet(config) as f, FleetClient(f.url, TOKEN, deadline_seconds=0.5) as client:
        with pytest.raises(InfraError, match="no replica"):
            await client.generate(request())
        assert f.server.failed["no_replica"] >= 1


async def test_a_version_that_does_not_exist_is_bad_input_and_one_to_come_is_waited_for() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        weights = Weights(0)
        await f.add(engine("a", "a-0"), weights=weights)
        with pytest.raises(BadInput, match="unknown_version"):
            await client.generate(request(min_version=1))
        weights.pointer = 1
        completion = await client.generate(request(min_version=1))
        assert completion.versions.tolist() == [1] * 4


async def test_a_replica_that_is_behind_is_tried_last() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        behind, ahead = Weights(0), Weights(2)
        await f.add(engine("a", "a-0"), weights=behind)
        await f.add(engine("b", "b-0"), weights=ahead)
        await until(lambda: f.server.state.members["b-0"].report.version == 2)
        served = {(await client.generate(request(f"s{i}", min_version=2))).source.replica for i in range(6)}
        assert served == {"b-0"}


async def test_a_replica_joins_late_and_gets_its_share() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        await f.add(engine("a", "a-0", rate=1e6))
        for i in range(10):
            await client.generate(request(f"early{i}"))
        await f.add(engine("b", "b-0", rate=1e6))
        served = Counter([(await client.generate(request(f"late{i}"))).source.pool for i in range(10)])
        assert served == {"a": 5, "b": 5}


async def test_a_broken_reply_is_asked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        bad = await f.add(engine("a", "a-0"))
        await f.add(engine("b", "b-0"))
        whole = bad.engine.generate

        async def wrong(turn: object) -> Completion:
            completion = await whole(turn)  # type: ignore[arg-type]
            completion.logprobs[:] = -9.0
            return completion

        monkeypatch.setattr(bad.engine, "generate", wrong)
        served = [(await client.generate(request(f"s{i}"))).source.replica for i in range(2)]
        assert served == ["b-0", "b-0"]
        assert client.retries == {"corrupt": 1}
        assert (await f.status())["pools"]["a"]["retries"] == {"corrupt": 1}


@pytest.mark.parametrize("cause", ["corrupt", "down"])
async def test_a_replica_serves_on_when_its_store_fails_and_says_so(cause: str) -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        weights = Weights(1)
        replica = await f.add(engine("a", "a-0"), weights=weights)
        assert (await client.generate(request(min_version=1))).versions.tolist() == [1] * 4
        if cause == "corrupt":
            weights.bad[2] = Corrupt("tensor x does not have the published hash", where="object o")
        weights.pointer, weights.down = 2, cause == "down"
        await until(lambda: replica.report()["counters"]["weights"]["failures"] >= 2)
        assert (await client.generate(request())).versions.tolist() == [1] * 4
        counters = replica.report()["counters"]["weights"]
        if cause == "corrupt":
            assert counters["rejected"]["2"] >= 2
            assert "published hash" in counters["last_error"]
        else:
            assert "store is down" in counters["last_error"]
            assert counters["rejected"] == {}
        weights.bad.clear()
        weights.down = False
        assert (await client.generate(request(min_version=2))).versions.tolist() == [2] * 4
        assert replica.report()["counters"]["weights"]["last_error"] == ""


async def test_a_store_that_hangs_holds_up_no_turn_and_shows() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN, deadline_seconds=1.0) as client:
        weights = Weights(1)
        replica = await f.add(engine("a", "a-0"), weights=weights)
        assert (await client.generate(request(min_version=1))).versions.tolist() == [1] * 4
        weights.hanging.clear()
        await until(lambda: replica.report()["counters"]["weights"]["store_busy_seconds"] > 0.1)
        assert (await client.generate(request())).versions.tolist() == [1] * 4
        with pytest.raises(InfraError, match="no sampler served"):
            await client.generate(request(min_version=2))
        weights.pointer = 2
        weights.hanging.set()
        assert (await client.generate(request(min_version=2))).versions.tolist() == [2] * 4


async def test_a_rejected_version_does_not_hold_up_the_next_one() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        weights = Weights(0)
        replica = await f.add(engine("a", "a-0"), weights=weights)
        weights.bad[1] = Corrupt("broken")
        weights.pointer = 1
        await until(lambda: replica.report()["counters"]["weights"]["rejected"])
        weights.pointer = 2
        assert (await client.generate(request(min_version=1))).versions.tolist() == [2] * 4


async def test_a_replica_that_has_not_caught_up_takes_no_turn() -> None:
    async with fleet() as f, FleetClient(f.url, TOKEN) as client:
        weights = Weights(5)
        weights.down = True
        replica = await f.add(engine("a", "a-0"), weights=weights)
        turn = asyncio.create_task(client.generate(request()))
        await until(lambda: replica.report()["counters"]["weights"]["failures"] >= 2)
        assert replica.loading
        assert not turn.done()
        weights.down = False
        assert (await turn).versions.tolist() == [5] * 4


async def test_a_replica_with_another_token_does_not_get_in(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as f:
        stranger = Replica(engine("a", "a-0"), "another-token", capacity=1)
        await stranger.start("127.0.0.1", 0, router=f.url, interval=0.05)
        await until(lambda: "it answered 401" in caplog.text)
        assert f.server.state.members == {}
        assert "another-token" not in caplog.text
        await stranger.close()


async def test_the_router_passes_a_drain_on() -> None:
    async with fleet() as f, aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http:
        await f.add(engine("a", "a-0"))
        async with http.post(f"{f.url}/v1/drain", json={"replica": "b-0"}) as answer:
            assert answer.status == 404
            assert "a-0" in (await answer.json())["error"]
        async with http.post(f"{f.url}/v1/drain", json={"replica": "a-0"}) as answer:
            assert answer.status == 202
        await until(lambda: not f.server.state.members)
        async with http.post(f"{f.url}/v1/replicas", json={"url": "nonsense"}) as answer:
            assert (answer.status, (await answer.json())["kind"]) == (400, "bad_request")


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_the_router_tells_a_stranger_nothing(token: str | None) -> None:
    async with fleet() as f, aiohttp.ClientSession(headers=wire.bearer(token) if token else {}) as http:
        one = await f.add(engine("a", "a-0"))
        for method, path in [(r.method, r.resource.canonical) for r in f.server.app().router.routes() if r.resource]:
            address = f.url + re.sub("{[^}]*}", "a-0", path)
            async with http.request(method, address, data=request().encode()) as answer:
                assert (path, answer.status) == (path, 401)
                assert TOKEN not in (body := await answer.text())
                assert "a-0" not in body
        assert one.engine.stats().sampled_tokens == 0
        assert not one.draining
