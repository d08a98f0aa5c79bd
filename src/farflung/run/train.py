"""`farflung train`: the coordinator with all the local processes of a run, and the view of it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console

from farflung.config import PoolConfig, Recipe
from farflung.core.errors import DISK_FULL, Corrupt, FarflungError, disk_full
from farflung.core.metrics import UpdateMetrics
from farflung.fleet import wire
from farflung.run.buffer import Buffer
from farflung.run.coordinator import Coordinator
from farflung.run.ledger import Ledger
from farflung.run.live import PoolView, Snapshot, View, open_view
from farflung.run.preflight import Checked, preflight
from farflung.run.processes import Meter, Processes, Program, free_port
from farflung.run.workspace import Workspace

LOOK_SECONDS = 0.5
POOL_SECONDS = 2.0
GRACE_SECONDS = 60.0  # for all pools to be ready, so that the first sessions are shared out over all of them
FINISH_SECONDS = 600.0  # for the trainer to end its update and write the last policy
BY_HAND = "stopped by hand"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: ``stopped`` says why it ended before its last update, if it did."""

    update: int
    wall_s: float
    peak_rss_bytes: int
    stopped: str | None = None


def train(space: Workspace, *, console: Console | None = None, meter: Meter | None = None) -> Outcome:
    """Start or go on with the run in ``space`` until its updates are made, its time is up, or somebody stops it.

    Raises FarflungError for what cannot go on (bad input, a process that dies again and again, a full disk).
    """
    console = console or Console()
    checked = preflight(space, console)
    with space.locked():
        try:
            return asyncio.run(_Run(space, checked, console, meter or Meter()).go())
        except (OSError, sqlite3.DatabaseError) as error:
            if disk_full(error):
                raise _cannot_go_on(space, DISK_FULL) from None
            if isinstance(error, sqlite3.DatabaseError):
                raise Corrupt(f"the ledger cannot be read or written: {error}", where=str(space.path)) from None
            raise


class _Run:
    def __init__(self, space: Workspace, checked: Checked, console: Console, meter: Meter) -> None:
        self._space = space
        self._recipe = space.recipe
        self._ledger = Ledger(space.path)
        self._coordinator = Coordinator(
            self._ledger,
            Buffer(self._ledger, space.recipe, checked.train_tasks),
            space.recipe,
            {"model": str(space.model), "run_id": space.run_id, "store": space.store, "tasks": checked.task_file},
        )
        self._processes = Processes(space.path / "logs", self._event)
        self._view: View = open_view(console)
        self._meter = meter
        self._fleet: dict[str, Any] = {}
        self._sampled: dict[str, list[tuple[float, int]]] = {}
        self._history: list[UpdateMetrics] = []
        self._samples: Counter[str] = Counter()
        self._note = ""
        self._router = ""
        self._stop = asyncio.Event()
        self._began = time.monotonic()
        self._first = self._ledger.last_update()

    async def go(self) -> Outcome:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        runner, url = await wire.listen(self._coordinator.app(wire.guard(self._space.token)), "127.0.0.1", 0)
        (self._space.path / "coordinator").write_text(url)
        try:
            await self._start(url)
            reason = await self._until_over()
            if reason is None:
                reason = await self._until_written()
            if self._coordinator.halted:
                raise _cannot_go_on(self._space, self._coordinator.halted)
            return Outcome(self._ledger.last_update(), time.monotonic() - self._began, self._meter.peak, reason)
        finally:
            await self._processes.stop(order=("trainer", "rollout"))
            self._view.show(self._snapshot())
            self._view.close()
            await runner.cleanup()
            self._ledger.close()

    async def _start(self, url: str) -> None:
        space, token = self._space, str(self._space.token_file)
        port = free_port()
        router = f"http://127.0.0.1:{port}"
        common = ("--token-file", token)
        self._router = router
        limits = self._recipe.router
        await self._processes.start(
            Program(
                "router",
                ("farflung.fleet.router", *common, "--port", str(port), "--turn-seconds", str(limits.turn_seconds),
                 "--retry-seconds", str(limits.retry_seconds), "--heartbeat-seconds", str(limits.heartbeat_seconds)),
            )
        )  # fmt: skip
        await self._processes.start(
            Program("trainer", ("farflung.run.training", *common, "--run", url, "--dir", str(space.path)))
        )
        for pool in self._recipe.pools:
            for number in range(pool.replicas):
                await self._processes.start(self._sampler(pool, number, router))
        await self._processes.start(
            Program(
                "rollout",
                ("farflung.run.rollout", *common, "--run", url, "--router", router, "--worker", "rollout"),
                on_death=lambda: self._event(
                    "handed_out_again", f"{self._coordinator.worker_died('rollout')} episodes"
                ),
            )
        )

    def _sampler(self, pool: PoolConfig, number: int, router: str) -> Program:
        space = self._space
        name = f"{pool.name}-{number}"
        replay = ("--replay", pool.replay) if pool.replay else ()
        return Program(
            name,
            ("farflung.fleet.serve", "--token-file", str(space.token_file), "--model", str(space.model), "--pool", pool.name,
             "--replica", name, "--weights", pool.weights, "--kv", pool.kv, "--capacity", str(pool.capacity),
             "--store", space.store, "--run-id", space.run_id, "--join", router, "--engine", pool.engine,
             "--tokens-per-second", str(pool.tokens_per_second), *replay),
        )  # fmt: skip

    async def _until_over(self) -> str | None:
        """Look after the run; None when its updates are made, else why it stops."""
        minutes = self._recipe.run.minutes
        headers = wire.bearer(self._space.token)
        looked = 0.0
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=2)) as http:
            while True:
                if self._processes.failed is not None:
                    raise self._processes.failed
                if self._coordinator.halted:
                    return self._coordinator.halted
                if self._ledger.last_update() >= self._recipe.run.updates:
                    return None
                if minutes is not None and time.monotonic() - self._began > 60 * minutes:
                    self._coordinator.finish_early()
                    return None
                if self._stop.is_set():
                    return BY_HAND
                if time.monotonic() - looked > (POOL_SECONDS if self._coordinator.sampling else 0):
                    looked = time.monotonic()
                    await self._look(http)
                self._view.show(self._snapshot())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)

    async def _until_written(self) -> str | None:
        """Let the trainer end its update and write the policy; None once it has, else why the run stops before that."""
        until = time.monotonic() + FINISH_SECONDS
        while not await self._processes.ended("trainer", LOOK_SECONDS):
            if self._processes.failed is not None:
                raise self._processes.failed
            if self._stop.is_set():
                return BY_HAND
            if time.monotonic() > until:
                raise _cannot_go_on(self._space, f"the trainer wrote no policy within {FINISH_SECONDS:.0f} s")
            self._view.show(self._snapshot())
        return None

    async def _look(self, http: aiohttp.ClientSession) -> None:
        """Ask the router how the pools are, and the kernel how much memory is used."""
        self._meter.look()
        self._ledger.add_machine(self._meter.memory, self._meter.cpu)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with http.get(f"{self._router}/v1/status") as answer:
                self._fleet = (await answer.json())["pools"]
        now = time.monotonic()
        if not self._coordinator.sampling and (self._all_ready() or now - self._began > GRACE_SECONDS):
            self._coordinator.start_sampling()
        if not self._fleet:
            return
        for name, status in self._fleet.items():
            series = self._sampled.setdefault(name, [])
            series.append((now, int(status.get("sampled_tokens", 0))))
            del series[:-10]
        self._ledger.add_pools(self._fleet)

    def _all_ready(self) -> bool:
        """Whether every replica that was started here serves."""
        return all(
            sum(not replica["loading"] for replica in self._fleet.get(pool.name, {}).get("replicas", ()))
            >= pool.replicas
            for pool in self._recipe.pools
        )

    def _snapshot(self) -> Snapshot:
        status = self._coordinator.status()
        for metrics in self._ledger.updates(after=len(self._history)):
            self._history.append(metrics)
            self._processes.progressed()
            self._samples.update({name: pool.samples for name, pool in metrics.pools.items()})
        return Snapshot(
            name=self._recipe.run.name,
            update=status["update"],
            updates=self._recipe.run.updates,
            episodes=status["episodes"],
            history=tuple(self._history),
            pools={pool.name: self._pool_view(pool.name) for pool in self._recipe.pools},
            buffer=status["buffer"],
            dropped=status["dropped"],
            elapsed=time.monotonic() - self._began,
            memory=self._meter.memory,
            recent_reward=status["reward"],
            note=self._note,
            formats={pool.name: f"{pool.weights}, kv {pool.kv}" for pool in self._recipe.pools},
            first=self._first,
        )

    def _pool_view(self, name: str) -> PoolView:
        status: Mapping[str, Any] = self._fleet.get(name, {})
        series = self._sampled.get(name, [])
        rate = 0.0
        if len(series) > 1 and series[-1][0] > series[0][0]:
            rate = max(0.0, (series[-1][1] - series[0][1]) / (series[-1][0] - series[0][0]))
        replicas = status.get("replicas", [])
        return PoolView(
            capacity_share=capacity_shares(self._recipe)[name],
            sample_share=self._samples[name] / max(1, self._samples.total()),
            tokens_per_s=rate,
            replicas=len(replicas),
            version=min((int(r.get("version", 0)) for r in replicas), default=0),
        )

    def _event(self, kind: str, detail: str) -> None:
        self._note = f"{kind.replace('_', ' ')}: {detail}"
        with contextlib.suppress(sqlite3.Error):  # what is only for people must not stop the run
            self._ledger.add_event(kind, detail)


def _cannot_go_on(space: Workspace, reason: str) -> FarflungError:
    mend = f"nothing finished is lost; mend it, then: farflung train --resume {shlex.quote(str(space.path))}"
    return FarflungError(reason, where=str(space.path), mend=mend)


def capacity_shares(recipe: Recipe) -> dict[str, float]:
    """Each pool's part of the fleet's capacity."""
    total = sum(pool.capacity * pool.replicas for pool in recipe.pools)
    return {pool.name: pool.capacity * pool.replicas / total for pool in recipe.pools}
