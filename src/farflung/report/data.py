"""Read a run's ledger for its report: read-only, also while the run goes on, also from a folder that cannot be written."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.config import Recipe, recipe_of
from farflung.core.errors import BadInput, Corrupt
from farflung.core.metrics import UpdateMetrics


@dataclass(frozen=True, slots=True)
class Drop:
    """Attempts that machinery failed or that grew too old: thrown away for good, or tried again."""

    cause: str
    final: int
    retried: int
    example: str


@dataclass(frozen=True, slots=True)
class Ending:
    """Episodes that ended for one reason; ``reward`` is their mean."""

    end: str
    count: int
    reward: float


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    at: float
    bytes: int
    changed: int
    total: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A version in one format: bytes of its delta, elements changed, and the bytes that their positions and steps need."""

    version: int
    format: str
    bytes: int
    changed: int
    elements: int
    bound: float


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica's last word on its weights. Seconds: staging (fetch, verify, prepare) and pauses, over all its loads."""

    name: str
    pool: str
    version: int
    lag: int
    loads: int
    skipped: int
    bytes: int
    stage_seconds: float
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """Where a finished episode lies and what the ledger says of it."""

    group: int
    index: int
    task: str
    end: str
    reward: float
    file: Path


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """A pool's router status at one moment (seconds since the run began)."""

    at: float
    sampled_tokens: int
    active: int


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything a report shows. Times are seconds since the first group was opened."""

    folder: Path
    recipe: Recipe
    model: Path
    updates: tuple[UpdateMetrics, ...]
    update_times: tuple[float, ...]
    versions: tuple[Version, ...]
    streams: tuple[StreamRow, ...]
    replicas: tuple[ReplicaRow, ...]
    endings: tuple[Ending, ...]
    drops: tuple[Drop, ...]
    pools: Mapping[str, tuple[PoolPoint, ...]]
    evaluations: Mapping[str, Mapping[str, Any]]
    episodes: tuple[EpisodeRow, ...]
    groups: Mapping[str, int]
    seconds: float
    peak_rss_bytes: int = 0
    events: tuple[tuple[float, str, str], ...] = field(default=())

    @property
    def finished(self) -> bool:
        return len(self.updates) >= self.recipe.run.updates


def read_run(folder: Path) -> RunData:
    """Read the run in ``folder``. Raises BadInput if there is none, Corrupt if it cannot be understood."""
    path = folder / "ledger.sqlite"
    if not path.is_file() or not (folder / "recipe.json").is_file():
        raise BadInput(
            "no run is here, or none that has begun (recipe.json or ledger.sqlite is missing)",
            where=str(folder),
            mend="give the folder of a run, such as runs/quickstart",
        )
    try:
        facts = json.loads((folder / "recipe.json").read_text())
        recipe, model = recipe_of(facts["recipe"], str(folder / "recipe.json")), Path(facts["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"not a run's recipe: {error!r}", where=str(folder / "recipe.json")) from None
    try:
        db = _open(path)
        try:
            return _read(db, folder, recipe, model)
        finally:
            db.close()
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"not a ledger: {error}", where=str(path)) from None


def _open(path: Path) -> sqlite3.Connection:
    """A reader. Where no files can be made beside the ledger, nobody writes to it either: then it is read as it lies."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10.0, isolation_level=None)
        try:
            db.execute("BEGIN")  # one moment of the run for all tables
            db.execute("SELECT 1 FROM meta LIMIT 1").fetchall()
            return db
        except sqlite3.OperationalError:
            db.close()
            if "immutable" in mode:
                raise
    raise AssertionError


def _read(db: sqlite3.Connection, folder: Path, recipe: Recipe, model: Path) -> RunData:
    began = float(db.execute("SELECT COALESCE(MIN(opened_at), 0) FROM groups").fetchone()[0])
    updates = db.execute("SELECT created_at, metrics FROM updates ORDER BY id").fetchall()
    pools: dict[str, list[PoolPoint]] = {}
    replicas: dict[str, ReplicaRow] = {}
    for at, pool, text in db.execute("SELECT at, pool, status FROM pools ORDER BY at"):
        status = json.loads(text)
        replicas |= {replica["name"]: _replica(pool, replica) for replica in status.get("replicas", ())}
        point = PoolPoint(at - began, int(status.get("sampled_tokens", 0)), int(status.get("active", 0)))
        pools.setdefault(pool, []).append(point)
    last = db.execute(
        "SELECT MAX(t) FROM (SELECT MAX(created_at) t FROM updates UNION SELECT MAX(created_at) FROM episodes)"
    ).fetchone()[0]
    return RunData(
        folder=folder,
        recipe=recipe,
        model=model,
        updates=tuple(UpdateMetrics.from_dict(json.loads(text)) for _, text in updates),
        update_times=tuple(at - began for at, _ in updates),
        versions=tuple(
            Version(number, at - began, size, changed, total)
            for number, at, size, changed, total in db.execute(
                "SELECT version, created_at, bytes, changed, total FROM versions ORDER BY version"
            )
        ),
        streams=tuple(
            StreamRow(*row)
            for row in db.execute(
                "SELECT version, format, bytes, changed, elements, bound FROM streams ORDER BY version, format"
            )
        ),
        replicas=tuple(replicas[name] for name in sorted(replicas)),
        endings=tuple(
            Ending(*row)
            for row in db.execute("SELECT end, COUNT(*), AVG(reward) FROM episodes GROUP BY end ORDER BY COUNT(*) DESC")
        ),
        drops=tuple(
            Drop(*row)
            for row in db.execute(
                "SELECT cause, SUM(retried = 0), SUM(retried = 1), MAX(detail) FROM drops GROUP BY cause ORDER BY cause"
            )
        ),
        pools={name: tuple(points) for name, points in pools.items()},
        evaluations={
            name: json.loads(text)
            for name, text in db.execute("SELECT name, result FROM evaluations ORDER BY created_at")
        },
        episodes=tuple(
            EpisodeRow(group, index, task, end, reward, folder / "episodes" / file)
            for group, index, task, end, reward, file in db.execute(
                "SELECT group_id, idx, task, end, reward, file FROM episodes ORDER BY created_at DESC, group_id DESC, idx"
            )
        ),
        groups=dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")),
        seconds=max(0.0, float(last or began) - began),
        peak_rss_bytes=int(db.execute("SELECT COALESCE(MAX(rss_bytes), 0) FROM machine").fetchone()[0]),
        events=tuple(
            (at - began, kind, detail)
            for at, kind, detail in db.execute("SELECT at, kind, detail FROM events ORDER BY at DESC LIMIT 200")
        ),
    )


def _replica(pool: str, status: Mapping[str, Any]) -> ReplicaRow:
    counters = status.get("counters", {})
    weights = counters.get("weights", {})
    return ReplicaRow(
        str(status["name"]),
        pool,
        int(status["version"]),
        int(weights.get("lag", 0)),
        int(weights.get("loads", 0)),
        int(weights.get("skipped", 0)),
        int(weights.get("bytes", 0)),
        float(weights.get("stage_seconds", 0.0)),
        float(counters.get("swap_seconds", 0.0)),
    )
