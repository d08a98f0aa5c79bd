"""Which replica serves a turn: the router's decisions as a state machine without I/O, clock or randomness.

Pools get new sessions in proportion to the capacity of their live replicas, a session stays where its cache is, and what
fails is passed over for a while. Times are seconds of any monotonic clock that the caller passes in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from farflung.core.errors import BadInput
from farflung.core.sampling import Source

MOST_CAPACITY = 1_000_000


@dataclass(frozen=True, slots=True)
class Policy:
    """heartbeat_seconds: how often replicas report; a replica that is silent for ``misses`` and a half of them is dead.

    avoid_seconds: how long a replica is passed over after a failure, doubled by each one in a row up to avoid_limit.
    spill: a new session leaves its pool for another with room when every replica of the pool holds this many times
    its capacity. session_seconds: a session that is silent for this long is forgotten.
    """

    heartbeat_seconds: float = 1.0
    misses: int = 3
    avoid_seconds: float = 0.5
    avoid_limit: float = 30.0
    spill: float = 3.0
    session_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself when it joins and with every heartbeat."""

    url: str
    source: Source
    capacity: int
    version: int = 0
    active: int = 0
    draining: bool = False
    loading: bool = False
    counters: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(data: Mapping[str, Any]) -> Report:
        """Raises BadInput with what is wrong; keys of a newer replica are left out."""
        where = "replica report"
        try:
            report = Report(
                str(data["url"]).rstrip("/"),
                Source(**{name: str(data["source"][name]) for name in ("pool", "replica", "weights", "kv")}),
                int(data["capacity"]),
                int(data.get("version", 0)),
                int(data.get("active", 0)),
                bool(data.get("draining", False)),
                bool(data.get("loading", False)),
                dict(data.get("counters", {})),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"not a replica's report: {error!r}", where=where) from None
        names = (report.source.replica, report.source.pool)
        if not report.url.startswith(("http://", "https://")) or not all(
            n and n.isascii() and n.isprintable() for n in names
        ):
            raise BadInput(f"url {report.url!r}, pool and replica {report.source!r}", where=where)
        if not 1 <= report.capacity <= MOST_CAPACITY:
            raise BadInput(f"capacity is {report.capacity}; 1 to {MOST_CAPACITY} is needed", where=where)
        return report


@dataclass(slots=True)
class Member:
    """A replica in rotation. ``sessions`` are pinned to it, ``turns`` are in flight through this router."""

    report: Report
    seen: float
    sessions: int = 0
    turns: int = 0
    failures: int = 0
    avoid_until: float = float("-inf")

    @property
    def name(self) -> str:
        return self.report.source.replica

    @property
    def pool(self) -> str:
        return self.report.source.pool

    @property
    def load(self) -> float:
        """Sessions (or, where more, turns) for each place."""
        return max(self.sessions, self.turns) / self.report.capacity

    def usable(self, now: float) -> bool:
        return not self.report.draining and not self.report.loading and now >= self.avoid_until

    def status(self, now: float) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.report.url,
            "capacity": self.report.capacity,
            "version": self.report.version,
            "sessions": self.sessions,
            "turns": self.turns,
            "draining": self.report.draining,
            "loading": self.report.loading,
            "avoided": now < self.avoid_until,
            "silent_seconds": round(now - self.seen, 3),
            "counters": dict(self.report.counters),
        }


@dataclass(slots=True)
class PoolCounts:
    """sessions: assigned here when new; moved: came from a replica that could not serve them; spilled: sent elsewhere
    because the pool was far over its capacity; retries: turns that went on elsewhere, by cause."""

    sessions: int = 0
    moved: int = 0
    spilled: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Pin:
    replica: str
    pool: str
    seen: float


class Shares:
    """Hands out turns in proportion to weights, at every moment within one of the exact share (for fixed weights).

    Each pool has a credit: its exact share so far minus what it got. Of the pools whose turn has come, the one whose
    turn ends first is next (Tijdeman 1980, "The chairman assignment problem": the deviation stays below
    1 - 1/(2m - 2) for m pools). A pool that leaves gives its credit to the others, so weights may change at any time.
    """

    def __init__(self) -> None:
        self.credit: dict[str, float] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """The pool that is next; weights are positive and not empty."""
        total = sum(weights.values())
        credit = {pool: self.credit.get(pool, 0.0) for pool in weights}
        rest = 1.0 - sum(credit.values())
        for pool, weight in weights.items():
            credit[pool] += rest * weight / total
        slack = 1 / max(2, 2 * len(weights) - 2)
        due = [p for p in weights if credit[p] >= slack - 1e-9] or [max(weights, key=lambda p: credit[p])]
        chosen = min(due, key=lambda p: ((1 - slack - credit[p]) * total / weights[p], p))
        credit[chosen] -= 1.0
        self.credit = credit
        return chosen


class Router:
    """Members, sessions and counts. ``choose`` decides, ``begin``/``served``/``failed`` say what became of the turn."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.members: dict[str, Member] = {}
        self.pools: dict[str, PoolCounts] = {}
        self.lost: Counter[str] = Counter()
        self._sessions: OrderedDict[str, _Pin] = OrderedDict()
        self._shares = Shares()

    # Membership

    def join(self, report: Report, now: float) -> bool:
        """A heartbeat; true when the replica is new or came back at another address (then its failures are forgotten)."""
        name = report.source.replica
        member = self.members.get(name)
        new = member is None or member.report.url != report.url or member.report.source != report.source
        if member is None or new:
            turns = member.turns if member else 0
            pinned = sum(pin.replica == name for pin in self._sessions.values())
            self.members[name] = Member(report, now, sessions=pinned, turns=turns)
            self.pools.setdefault(report.source.pool, PoolCounts())
        else:
            member.report, member.seen = report, now
        return new

    def leave(self, name: str, url: str | None = None) -> bool:
        """Take a replica out; with ``url`` only if it is still the one there (a successor of the same name stays)."""
        member = self.members.get(name)
        if member is None or (url is not None and member.report.url != url.rstrip("/")):
            return False
        del self.members[name]
        return True

    def expire(self, now: float) -> list[str]:
        """Names of replicas that went silent and are out now; sessions that went silent are forgotten."""
        limit = (self.policy.misses + 0.5) * self.policy.heartbeat_seconds
        gone = [m.name for m in self.members.values() if now - m.seen > limit]
        for name in gone:
            del self.members[name]
            self.lost["silent"] += 1
        while self._sessions:
            session, pin = next(iter(self._sessions.items()))
            if now - pin.seen <= self.policy.session_seconds:
                break
            self.forget(session)
        return gone

    # Sessions

    def choose(
        self,
        session: str,
        now: float,
        *,
        min_version: int = 0,
        tried: Collection[str] = (),
        before: str | None = None,
    ) -> Member | None:
        """The replica for the session's turn, or None while there is none; the session is pinned to it.

        ``tried`` are replicas that failed this turn. ``before`` is where the client says that it was served, for a
        router that has no memory of the session. A replica known to be behind ``min_version`` is taken last.
        """
        usable = [m for m in self.members.values() if m.usable(now) and m.name not in tried]
        if not usable:
            return None
        usable = [m for m in usable if m.report.version >= min_version] or usable
        pin = self._sessions.get(session)
        if pin is None and before in self.members:
            pin = self._pin(session, self.members[before], now)
        if pin is None:
            member = self._place(session, usable)
            self._pin(session, member, now)
            return member
        pin.seen = now
        self._sessions.move_to_end(session)
        home = next((m for m in usable if m.name == pin.replica), None)
        if home is not None:
            return home
        member = _lightest([m for m in usable if m.pool == pin.pool] or usable, session)
        self.forget(session)
        self._pin(session, member, now)
        self.pools[member.pool].moved += 1
        return member

    def forget(self, session: str) -> str | None:
        """The session has ended; the name of the replica that it was pinned to."""
        pin = self._sessions.pop(session, None)
        if pin is None:
            return None
        if pin.replica in self.members:
            self.members[pin.replica].sessions -= 1
        return pin.replica

    def _place(self, session: str, usable: list[Member]) -> Member:
        """A new session's replica: the pool by capacity share, in it the smallest load."""
        weights: dict[str, float] = {}
        for m in usable:
            weights[m.pool] = weights.get(m.pool, 0) + m.report.capacity
        pool = self._shares.next(weights)
        self.pools[pool].sessions += 1
        member = _lightest([m for m in usable if m.pool == pool], session)
        if member.load >= self.policy.spill:
            other = _lightest(usable, session)
            if other.load < 1:
                self.pools[pool].spilled += 1
                return other
        return member

    def _pin(self, session: str, member: Member, now: float) -> _Pin:
        pin = self._sessions[session] = _Pin(member.name, member.pool, now)
        member.sessions += 1
        return pin

    # Turns

    def begin(self, name: str) -> None:
        if name in self.members:
            self.members[name].turns += 1

    def end(self, name: str) -> None:
        """The turn is no longer in flight, whatever became of it."""
        if name in self.members:
            self.members[name].turns = max(0, self.members[name].turns - 1)

    def served(self, source: Source, *, sampled: int, prompt: int, cached: int) -> None:
        counts = self.pools.setdefault(source.pool, PoolCounts())
        counts.turns += 1
        counts.sampled_tokens += sampled
        counts.prompt_tokens += prompt
        counts.cached_tokens += cached
        if source.replica in self.members:
            self.members[source.replica].failures = 0

    def failed(self, member: Member, cause: str, now: float) -> None:
        """The turn goes on elsewhere, and the replica is passed over for a while.

        Not for a version that is still to come, and for a slow turn only when it is not the first in a row: to move
        every session of a busy replica would make the others slow too.
        """
        retries = self.pools[member.pool].retries
        retries[cause] = retries.get(cause, 0) + 1
        current = self.members.get(member.name)
        if current is None or current.report.url != member.report.url or cause == "version":
            return
        current.failures += 1
        if cause == "slow" and current.failures == 1:
            return
        backoff = self.policy.avoid_seconds * 2.0 ** min(current.failures - 1, 16)
        current.avoid_until = now + min(backoff, self.policy.avoid_limit)

    # What people see

    def status(self, now: float) -> dict[str, Any]:
        """Pools with their share of capacity and of sessions, their counts, and their replicas."""
        live = [m for m in self.members.values() if not m.report.draining and not m.report.loading]
        total = sum(m.report.capacity for m in live)
        sessions = sum(counts.sessions for counts in self.pools.values())
        pools = {}
        for pool, counts in sorted(self.pools.items()):
            members = [m for m in self.members.values() if m.pool == pool]
            capacity = sum(m.report.capacity for m in live if m.pool == pool)
            pools[pool] = {
                "capacity": capacity,
                "capacity_share": capacity / total if total else 0.0,
                "session_share": counts.sessions / sessions if sessions else 0.0,
                "active": sum(m.turns for m in members),
                "replicas": [m.status(now) for m in members],
                **asdict(counts),
            }
        return {"pools": pools, "sessions": len(self._sessions), "lost": dict(self.lost)}


def _lightest(members: Iterable[Member], session: str) -> Member:
    """The smallest load; among equals the same one for the same session, so that a restarted router finds its cache."""
    return min(members, key=lambda m: (m.load, m.turns / m.report.capacity, _rank(session, m.name)))


def _rank(session: str, replica: str) -> bytes:
    """Rendezvous hash: every replica's rank for a session, independent of the other replicas."""
    return blake2b(f"{session}\0{replica}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
