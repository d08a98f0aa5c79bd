"""The router's decisions as a state machine: shares, affinity, and invariants under any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farflung.core.errors import BadInput
from farflung.core.sampling import Source
from farflung.fleet.routing import Policy, Report, Router, Shares


def report(
    pool: str, name: str, capacity: int = 4, *, version: int = 0, draining: bool = False, url: str = ""
) -> Report:
    source = Source(pool, name, "bf16", "bf16")
    return Report(url or f"http://{name}", source, capacity, version, draining=draining)


def router(*members: Report, policy: Policy | None = None) -> Router:
    one = Router(policy)
    for member in members:
        one.join(member, 0.0)
    return one


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 200))
def test_shares_are_within_one_turn_at_every_moment(weights: list[int], turns: int) -> None:
    pools = {f"p{i}": float(w) for i, w in enumerate(weights)}
    shares, got = Shares(), Counter[str]()
    bound = 1 - 1 / max(2, 2 * len(pools) - 2)
    for n in range(1, turns + 1):
        got[shares.next(pools)] += 1
        for pool, weight in pools.items():
            assert abs(got[pool] - n * weight / sum(weights)) <= bound + 1e-6


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), min_size=1, max_size=60))
def test_shares_follow_weights_that_change(steps: list[dict[str, int]]) -> None:
    shares = Shares()
    for weights in steps:
        assert shares.next({p: float(w) for p, w in weights.items()}) in weights
        assert sum(shares.credit.values()) == pytest.approx(0.0, abs=1e-6)
    pools = {"a": 1.0, "b": 2.0, "c": 4.0}
    got = Counter(shares.next(pools) for _ in range(700))
    for pool, weight in pools.items():
        assert got[pool] == pytest.approx(100 * weight, abs=8)


def test_sessions_follow_capacity_and_within_a_pool_the_load() -> None:
    one = router(report("a", "a-0", 1), report("b", "b-0", 1), report("b", "b-1", 3))
    names = [one.choose(f"s{i}", 0.0).name for i in range(20)]  # type: ignore[union-attr]
    assert Counter(names) == {"a-0": 4, "b-0": 4, "b-1": 12}


def test_a_session_that_must_move_prefers_its_pool() -> None:
    one = router(*(report(pool, f"{pool}-{n}") for pool in "ab" for n in range(2)))
    for s in range(40):
        first = one.choose(f"s{s}", 0.0)
        assert first is not None
        second = one.choose(f"s{s}", 0.0, tried={first.name})
        assert second is not None
        assert second.pool == first.pool
        assert one.choose(f"s{s}", 0.0) is second


def test_drained_and_behind_replicas() -> None:
    one = router(report("a", "a-0", version=1), report("b", "b-0", version=3), report("c", "c-0", draining=True))
    assert {one.choose(f"s{i}", 0.0, min_version=2).name for i in range(9)} == {"b-0"}  # type: ignore[union-attr]
    last = one.choose("s0", 0.0, min_version=2, tried={"b-0"})
    assert last is not None
    assert last.name == "a-0"
    assert one.choose("s0", 0.0, tried={"a-0", "b-0"}) is None


def test_what_a_client_remembers_survives_a_restarted_router() -> None:
    one = router(*(report("a", f"a-{n}") for n in range(5)))
    for s in range(20):
        member = one.choose(f"s{s}", 0.0, before="a-3")
        assert member is not None
        assert member.name == "a-3"
    assert one.choose("t", 0.0, before="gone") is not None
    assert one.status(0.0)["pools"]["a"]["sessions"] == 1


def test_the_first_choice_is_the_same_in_every_router() -> None:
    members = [report("a", f"a-{n}") for n in range(5)]
    for s in range(20):
        names = {router(*order).choose(f"s{s}", 0.0).name for order in (members, members[::-1])}  # type: ignore[union-attr]
        assert len(names) == 1


def test_failures_are_passed_over_for_longer_and_longer_until_a_turn_is_served() -> None:
    one = router(report("a", "a-0"), policy=Policy(avoid_seconds=1.0, avoid_limit=3.0))
    member = one.members["a-0"]
    now = 0.0
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert one.choose("s", now) is member
        one.failed(member, "connection", now)
        assert one.choose("s", now + pause - 0.01) is None
        now += pause
    one.served(member.report.source, sampled=1, prompt=1, cached=0)
    one.failed(member, "slow", now)
    assert one.choose("s", now) is member
    one.failed(member, "slow", now)
    assert one.choose("s", now) is None
    assert one.status(now)["pools"]["a"]["retries"] == {"connection": 4, "slow": 2}


def test_a_replica_that_comes_back_elsewhere_starts_afresh() -> None:
    one = router(report("a", "a-0"))
    one.failed(one.members["a-0"], "connection", 0.0)
    assert not one.join(report("a", "a-0"), 0.1)
    assert one.choose("s", 0.1) is None
    assert one.join(report("a", "a-0", url="http://elsewhere"), 0.2)
    assert one.choose("s", 0.2) is not None
    assert not one.leave("a-0", "http://a-0")
    assert one.leave("a-0", "http://elsewhere")


def test_silence_ends_membership_and_sessions() -> None:
    one = router(report("a", "a-0"), policy=Policy(heartbeat_seconds=1.0, session_seconds=10.0))
    one.choose("s", 0.0)
    assert one.expire(3.4) == []
    assert one.expire(3.6) == ["a-0"]
    assert one.status(3.6)["sessions"] == 1
    one.expire(11.0)
    assert one.status(11.0)["sessions"] == 0
    assert one.status(11.0)["lost"] == {"silent": 1}


def test_a_pool_far_over_its_capacity_spills_only_while_another_has_room() -> None:
    one = router(report("a", "a-0", 2), report("b", "b-0", 2), policy=Policy(spill=2.0))
    one.members["a-0"].turns = 4
    pools = Counter(one.choose(f"s{i}", 0.0).pool for i in range(8))  # type: ignore[union-attr]
    assert pools == {"b": 5, "a": 3}
    assert one.status(0.0)["pools"]["a"]["spilled"] == 1


@pytest.mark.parametrize(
    "change",
    [{"url": "ftp://x"}, {"capacity": 0}, {"capacity": "many"}, {"source": {"pool": "a"}}, {"source": 3}, {"url": None},
     {"source": {"pool": "a", "replica": "x\r\ny", "weights": "bf16", "kv": "bf16"}}],
)  # fmt: skip
def test_a_wrong_report_is_refused(change: dict[str, object]) -> None:
    good = {
        "url": "http://x",
        "source": {"pool": "a", "replica": "a-0", "weights": "bf16", "kv": "bf16"},
        "capacity": 1,
    }
    assert Report.parse(good).capacity == 1
    with pytest.raises(BadInput):
        Report.parse(good | change)


class Events(RuleBasedStateMachine):
    """Members come, go and fail while sessions take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.router = Router(Policy(heartbeat_seconds=1.0, session_seconds=30.0))
        self.flying: list[str] = []

    @rule(n=st.integers(0, 5), capacity=st.integers(1, 8), draining=st.booleans(), port=st.integers(0, 1))
    def join(self, n: int, capacity: int, draining: bool, port: int) -> None:
        member = report("ab"[n % 2], f"r{n}", capacity, draining=draining, url=f"http://r{n}:{port}")
        self.router.join(member, self.now)

    @rule(n=st.integers(0, 5))
    def leave(self, n: int) -> None:
        self.router.leave(f"r{n}")

    @rule(s=st.integers(0, 9), tried=st.sets(st.integers(0, 5)), version=st.integers(0, 1))
    def turn(self, s: int, tried: set[int], version: int) -> None:
        names = {f"r{n}" for n in tried}
        member = self.router.choose(f"s{s}", self.now, tried=names, min_version=version)
        usable = [m for m in self.router.members.values() if m.usable(self.now) and m.name not in names]
        assert (member is None) == (not usable)
        if member is not None:
            assert member in usable
            assert self.router.choose(f"s{s}", self.now, tried=names, min_version=version) is member
            self.router.begin(member.name)
            self.flying.append(member.name)

    @rule(cause=st.sampled_from(["", "connection", "slow", "version"]))
    def ends(self, cause: str) -> None:
        if self.flying:
            name = self.flying.pop()
            self.router.end(name)
            if name in self.router.members and cause:
                self.router.failed(self.router.members[name], cause, self.now)

    @rule(s=st.integers(0, 9))
    def forget(self, s: int) -> None:
        self.router.forget(f"s{s}")

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.router.expire(self.now)
        assert all(self.now - m.seen <= 3.5 for m in self.router.members.values())

    @invariant()
    def sessions_are_counted_where_they_are(self) -> None:
        pins = Counter(pin.replica for pin in self.router._sessions.values())
        for member in self.router.members.values():
            assert member.sessions == pins[member.name]
            assert member.turns >= 0


Events.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_events = Events.TestCase
