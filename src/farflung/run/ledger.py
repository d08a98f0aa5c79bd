"""The ledger: what happened in a run, in one SQLite file with one writer (the coordinator) and any number of readers.

An episode counts once its row is committed; its tokens lie in a frame under ``episodes/`` that is durable before the row.
Tables are documented in docs/ledger.md. Nothing is ever updated except a group's state, and nothing is deleted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from farflung.core.episode import DropCause, Episode
from farflung.core.errors import BadInput, Corrupt, FarflungError, disk_full
from farflung.core.metrics import UpdateMetrics
from farflung.weights.publisher import Published

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, task TEXT NOT NULL, state TEXT NOT NULL CHECK (state IN ('open','ready','taken','dropped')),
    opened_at REAL NOT NULL, ready_at REAL, update_id INTEGER, oldest_version INTEGER);
CREATE TABLE IF NOT EXISTS episodes (
    group_id INTEGER NOT NULL REFERENCES groups(id), idx INTEGER NOT NULL, task TEXT NOT NULL, end TEXT NOT NULL,
    reward REAL NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL, actions INTEGER NOT NULL,
    format_errors INTEGER NOT NULL, attempt INTEGER NOT NULL, patch TEXT NOT NULL, detail TEXT NOT NULL,
    seconds TEXT NOT NULL, origins TEXT NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT NULL, created_at REAL NOT NULL,
    PRIMARY KEY (group_id, idx));
CREATE TABLE IF NOT EXISTS updates (id INTEGER PRIMARY KEY, created_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (
    version INTEGER PRIMARY KEY, created_at REAL NOT NULL, bytes INTEGER NOT NULL, changed INTEGER NOT NULL,
    total INTEGER NOT NULL, seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS streams (
    version INTEGER NOT NULL, format TEXT NOT NULL, bytes INTEGER NOT NULL, changed INTEGER NOT NULL,
    elements INTEGER NOT NULL, bound REAL NOT NULL, PRIMARY KEY (version, format));
CREATE TABLE IF NOT EXISTS drops (
    id INTEGER PRIMARY KEY, created_at REAL NOT NULL, group_id INTEGER NOT NULL, idx INTEGER, attempt INTEGER,
    cause TEXT NOT NULL, detail TEXT NOT NULL, retried INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS pools (at REAL NOT NULL, pool TEXT NOT NULL, status TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS machine (at REAL NOT NULL, rss_bytes INTEGER NOT NULL, cpu_seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (name TEXT PRIMARY KEY, created_at REAL NOT NULL, result TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group as the ledger knows it: which of its episodes are finished or finally dropped."""

    id: int
    task: str
    state: str
    finished: frozenset[int]
    dropped: frozenset[int]


class Ledger:
    """The writer. Opening it again after a crash finds exactly what was committed."""

    def __init__(self, run_dir: Path) -> None:
        self._episodes = run_dir / "episodes"
        self._episodes.mkdir(parents=True, exist_ok=True)
        path = run_dir / "ledger.sqlite"
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            if disk_full(error):
                raise
            raise BadInput(f"the ledger cannot be opened: {error}", where=str(path)) from None
        except sqlite3.DatabaseError as error:
            raise Corrupt(f"not a ledger: {error}", where=str(path)) from None

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # What a run is

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    # Groups and episodes

    def open_group(self, group: int, task: str) -> None:
        self._db.execute(
            "INSERT INTO groups (id, task, state, opened_at) VALUES (?, ?, 'open', ?)", (group, task, time.time())
        )

    def next_group(self) -> int:
        """The data position: the id of the first group that was never opened."""
        return int(self._db.execute("SELECT COALESCE(MAX(id) + 1, 0) FROM groups").fetchone()[0])

    def groups(self, state: str) -> list[GroupRow]:
        """Groups in one state, in the order in which they got there."""
        rows = self._db.execute(
            "SELECT id, task FROM groups WHERE state = ? ORDER BY COALESCE(ready_at, opened_at), id", (state,)
        ).fetchall()
        found = []
        for group, task in rows:
            finished = self._db.execute("SELECT idx FROM episodes WHERE group_id = ?", (group,)).fetchall()
            dropped = self._db.execute(
                "SELECT idx FROM drops WHERE group_id = ? AND retried = 0 AND idx IS NOT NULL", (group,)
            ).fetchall()
            found.append(
                GroupRow(group, task, state, frozenset(i for (i,) in finished), frozenset(i for (i,) in dropped))
            )
        return found

    def add_episode(self, episode: Episode, raw: bytes) -> bool:
        """Make a finished episode durable; False if this (group, index) is already here."""
        key = (episode.group, episode.index)
        if self._db.execute("SELECT 1 FROM episodes WHERE group_id = ? AND idx = ?", key).fetchone():
            return False
        name = f"g{episode.group:06d}-{episode.index:03d}.ffr"
        _write_durably(self._episodes / name, raw)
        trajectory = episode.trajectory
        origins: dict[str, dict[str, int]] = {}
        for source, version in zip(trajectory.source.tolist(), trajectory.versions.tolist(), strict=True):
            counts = origins.setdefault(trajectory.sources[source].pool, {})
            counts[str(version)] = counts.get(str(version), 0) + 1
        self._db.execute(
            "INSERT INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                *key,
                episode.task,
                str(episode.end),
                episode.reward,
                episode.turns,
                len(trajectory.ids),
                int(np.count_nonzero(trajectory.action)),
                episode.format_errors,
                episode.attempt,
                episode.patch,
                episode.detail,
                json.dumps(dict(episode.seconds)),
                json.dumps(origins),
                name,
                hashlib.sha256(raw).hexdigest(),
                time.time(),
            ),
        )
        return True

    def read_episode(self, group: int, index: int) -> bytes:
        """The frame of a finished episode. Raises Corrupt if the file is not what was written."""
        name, digest = self._db.execute(
            "SELECT file, sha256 FROM episodes WHERE group_id = ? AND idx = ?", (group, index)
        ).fetchone()
        path = self._episodes / name
        try:
            raw: bytes = path.read_bytes()
        except OSError as error:
            raise Corrupt(f"cannot be read: {error.strerror}", where=str(path)) from None
        if hashlib.sha256(raw).hexdigest() != digest:
            raise Corrupt("does not hash to what the ledger recorded", where=str(path))
        return raw

    def group_ready(self, group: int, oldest_version: int) -> None:
        self._db.execute(
            "UPDATE groups SET state = 'ready', ready_at = ?, oldest_version = ? WHERE id = ? AND state = 'open'",
            (time.time(), oldest_version, group),
        )

    def oldest_version(self, group: int) -> int:
        """The oldest version that a token of the group's finished episodes was sampled from."""
        rows = self._db.execute("SELECT origins FROM episodes WHERE group_id = ?", (group,)).fetchall()
        return min(
            (int(version) for (text,) in rows for counts in json.loads(text).values() for version in counts), default=0
        )

    def drop_group(self, group: int, cause: DropCause, detail: str) -> None:
        """Throw a group away as a whole, counting each of its finished episodes under ``cause``."""
        with self._transaction() as db:
            db.execute("UPDATE groups SET state = 'dropped' WHERE id = ?", (group,))
            for (index,) in db.execute("SELECT idx FROM episodes WHERE group_id = ?", (group,)).fetchall():
                db.execute(
                    "INSERT INTO drops (created_at, group_id, idx, attempt, cause, detail, retried) VALUES (?,?,?,?,?,?,0)",
                    (time.time(), group, index, None, str(cause), detail),
                )

    def add_drop(self, group: int, index: int, attempt: int, cause: DropCause, detail: str, *, retried: bool) -> None:
        """One attempt of an episode failed by machinery; ``retried`` if it is tried again."""
        self._db.execute(
            "INSERT INTO drops (created_at, group_id, idx, attempt, cause, detail, retried) VALUES (?,?,?,?,?,?,?)",
            (time.time(), group, index, attempt, str(cause), detail[:2000], int(retried)),
        )

    def drops(self, *, final: bool = True) -> dict[str, int]:
        """Cause -> count of what was thrown away for good (or, with final=False, of attempts that were tried again)."""
        return dict(
            self._db.execute("SELECT cause, COUNT(*) FROM drops WHERE retried = ? GROUP BY cause", (int(not final),))
        )

    # Batches and updates

    def batch(self, update: int) -> list[int]:
        """The groups that were given to this update, in order; empty if none were yet."""
        rows = self._db.execute("SELECT id FROM groups WHERE update_id = ? ORDER BY ready_at, id", (update,)).fetchall()
        return [group for (group,) in rows]

    def take_batch(self, update: int, groups: Sequence[int]) -> None:
        """Bind groups to an update for good, so that a trainer that starts again gets the same ones."""
        with self._transaction() as db:
            for group in groups:
                db.execute("UPDATE groups SET state = 'taken', update_id = ? WHERE id = ?", (update, group))

    def group_episodes(self, group: int) -> list[int]:
        rows = self._db.execute("SELECT idx FROM episodes WHERE group_id = ? ORDER BY idx", (group,)).fetchall()
        return [index for (index,) in rows]

    def commit_update(self, metrics: UpdateMetrics, published: Published) -> bool:
        """Record an update and its version; False if it was recorded before. Raises FarflungError out of turn."""
        done = self.last_update()
        if metrics.update <= done:
            return False
        if metrics.update != done + 1:
            raise FarflungError(f"update {metrics.update} was reported after {done}", where="ledger")
        with self._transaction() as db:
            now = time.time()
            db.execute("INSERT INTO updates VALUES (?, ?, ?)", (metrics.update, now, json.dumps(metrics.to_dict())))
            self._insert_version(db, metrics.update, published)
        return True

    def add_base_version(self, published: Published) -> None:
        self._insert_version(self._db, 0, published)

    @staticmethod
    def _insert_version(db: sqlite3.Connection, version: int, published: Published) -> None:
        """What was published: bytes of all formats together, changes of the first (BF16), and each of them."""
        first = next(iter(published.streams.values()))
        size = sum(stream.bytes for stream in published.streams.values())
        row = (version, time.time(), size, first.changed, first.elements, published.seconds)
        db.execute("INSERT OR IGNORE INTO versions VALUES (?,?,?,?,?,?)", row)
        for format, stream in published.streams.items():
            numbers = stream.bytes, stream.changed, stream.elements, stream.bound
            db.execute("INSERT OR IGNORE INTO streams VALUES (?,?,?,?,?,?)", (version, format, *numbers))

    def last_update(self) -> int:
        """Updates made so far, which is also the newest version's number."""
        return int(self._db.execute("SELECT COALESCE(MAX(id), 0) FROM updates").fetchone()[0])

    def updates(self, after: int = 0) -> list[UpdateMetrics]:
        """What was measured of every update later than ``after``, in order."""
        rows = self._db.execute("SELECT metrics FROM updates WHERE id > ? ORDER BY id", (after,)).fetchall()
        return [UpdateMetrics.from_dict(json.loads(text)) for (text,) in rows]

    # What is only for people

    def add_pools(self, status: Mapping[str, Mapping[str, Any]]) -> None:
        now = time.time()
        self._db.executemany("INSERT INTO pools VALUES (?,?,?)", [(now, p, json.dumps(s)) for p, s in status.items()])

    def add_machine(self, rss_bytes: int, cpu_seconds: float) -> None:
        """Memory and CPU time of all local processes at this moment."""
        self._db.execute("INSERT INTO machine VALUES (?,?,?)", (time.time(), rss_bytes, cpu_seconds))

    def pool_rates(self) -> dict[str, float]:
        """Sampled tokens per second of each pool, from its first to its last report; restarts of the router start anew."""
        series: dict[str, list[tuple[float, int]]] = {}
        for at, pool, status in self._db.execute("SELECT at, pool, status FROM pools ORDER BY at"):
            series.setdefault(pool, []).append((at, int(json.loads(status).get("sampled_tokens", 0))))
        rates = {}
        for pool, points in series.items():
            grown = sum(max(0, b[1] - a[1]) for a, b in itertools.pairwise(points))
            rates[pool] = grown / max(1e-9, points[-1][0] - points[0][0])
        return rates

    def add_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?,?,?)", (name, time.time(), json.dumps(result)))

    def evaluation(self, name: str) -> dict[str, Any] | None:
        row = self._db.execute("SELECT result FROM evaluations WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add_event(self, kind: str, detail: str) -> None:
        self._db.execute("INSERT INTO events VALUES (?,?,?)", (time.time(), kind, detail))

    def episode_count(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0])

    def recent_reward(self, episodes: int = 64) -> float:
        """Mean reward of the newest episodes."""
        row = self._db.execute(
            "SELECT AVG(reward) FROM (SELECT reward FROM episodes ORDER BY created_at DESC LIMIT ?)", (episodes,)
        ).fetchone()
        return float(row[0] or 0.0)


def _write_durably(path: Path, raw: bytes) -> None:
    """All of it or nothing, and on the disk when this returns."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
