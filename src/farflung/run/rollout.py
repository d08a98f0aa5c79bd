"""A rollout worker: takes tickets, runs many episodes at once, reports each. ``python -m farflung.run.rollout``.

An episode that has finished is reported until the coordinator says that it is durable, through restarts of it; failed
machinery is reported by cause, and the coordinator decides whether the episode is tried again. The worker keeps nothing:
what dies with it is handed out again. It ends when the coordinator wants no more, on SIGTERM, or with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from farflung.agents.base import Sampler
from farflung.agents.dialect import Dialect
from farflung.agents.harness import Dropped, run_episode, sampling_params
from farflung.config import Recipe
from farflung.core.episode import DropCause, Episode
from farflung.core.errors import BAD_INPUT_CODE, BadInput, FarflungError, InfraError
from farflung.core.process import patience
from farflung.core.task import Task
from farflung.fleet import process, wire
from farflung.fleet.client import FleetClient
from farflung.run.buffer import Ticket
from farflung.sandboxes import open_factory
from farflung.sandboxes.base import SandboxFactory
from farflung.tasks.files import load_tasks

ANSWER_SECONDS = 60.0  # one HTTP call, well above the coordinator's long poll
DEADLINE_SECONDS = 300.0  # how long the coordinator may be away
STOP_SECONDS = 3.0  # for reports under way when the worker is told to stop
MOST_PAUSE = 10.0

Key = tuple[int, int, int]  # group, index, attempt


class RunOver(Exception):
    """The coordinator wants nothing more."""


class CoordinatorClient:
    """Calls to the coordinator that outlive its restarts, each up to ``deadline`` seconds."""

    def __init__(self, url: str, token: str, http: aiohttp.ClientSession, deadline: float = DEADLINE_SECONDS) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._headers = {"Authorization": f"Bearer {token}"}
        self._deadline = deadline

    async def recipe(self) -> dict[str, Any]:
        """The recipe and where model and tasks lie."""
        return await self._call("GET", "/v1/recipe", None)

    async def tickets(self, worker: str, most: int, running: Collection[Key]) -> list[Ticket]:
        """Up to ``most`` tickets; none if there was no room for a while. ``running`` is what the worker has: what else it
        was given was lost on the way. Raises RunOver."""
        body = {"worker": worker, "max": most, "running": list(running)}
        answer = await self._call("POST", "/v1/tickets", json.dumps(body).encode())
        return [Ticket(**ticket) for ticket in answer["episodes"]]

    async def finished(self, episode: Episode) -> None:
        """Returns once the episode is durable."""
        await self._call("POST", "/v1/episodes", episode.encode())

    async def dropped(self, ticket: Ticket, cause: DropCause, detail: str) -> None:
        body = {
            "group": ticket.group,
            "index": ticket.index,
            "attempt": ticket.attempt,
            "cause": cause,
            "detail": detail,
        }
        await self._call("POST", "/v1/drops", json.dumps(body).encode())

    async def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """Raises RunOver (410), BadInput for other refusals, InfraError when there is no answer in time."""
        where = self._url + path
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        until = asyncio.get_running_loop().time() + self._deadline
        for pause in patience(0.1, 5.0):
            try:
                async with self._http.request(
                    method, where, data=body, headers=self._headers, timeout=timeout
                ) as answer:
                    raw = await answer.read()
                    if answer.status == 200:
                        return dict(json.loads(raw))
                    reason = f"{answer.status} {raw[:500].decode(errors='replace')}"
                    if answer.status == 410:
                        raise RunOver
                    if answer.status < 500:
                        raise BadInput(f"the coordinator refused: {reason}", where=where)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                reason = repr(error)
            if asyncio.get_running_loop().time() + pause > until:
                raise InfraError(f"no answer for {self._deadline:g} s; last: {reason}", where=where)
            await asyncio.sleep(pause)
        raise AssertionError("patience never ends")


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that an episode needs besides its ticket."""

    recipe: Recipe
    tasks: Mapping[str, Task]
    sampler: Sampler
    factory: SandboxFactory
    dialect: Dialect


class Worker:
    """Runs up to ``concurrency`` episodes at a time until the run is over or ``stop`` is set."""

    def __init__(self, name: str, coordinator: CoordinatorClient, scene: Scene, concurrency: int) -> None:
        self._name = name
        self._coordinator = coordinator
        self._scene = scene
        self._concurrency = concurrency
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._reporting: set[asyncio.Task[None]] = set()
        self._drops_in_a_row = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Raises what an episode raised if it is neither a result nor failed machinery: a fault of this program."""
        stopped = asyncio.create_task(self.stop.wait())
        asking: asyncio.Task[list[Ticket]] | None = None
        try:
            while not stopped.done():
                if asking is None and len(self._running) < self._concurrency:
                    room = self._concurrency - len(self._running)
                    asking = asyncio.create_task(self._coordinator.tickets(self._name, room, self._running.keys()))
                events = [stopped, *self._running.values(), *([asking] if asking else [])]
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                self._reap()
                if asking is not None and asking.done():
                    self._start(asking.result())
                    asking = None
        except RunOver:
            pass
        finally:
            await self._wind_up([stopped, *([asking] if asking else [])])

    def _start(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            key = (ticket.group, ticket.index, ticket.attempt)
            if key not in self._running:  # a coordinator that started anew hands out again what still runs here
                self._running[key] = asyncio.create_task(self._attempt(ticket))

    def _reap(self) -> None:
        for key, task in list(self._running.items()):
            if task.done():
                del self._running[key]
                task.result()

    async def _attempt(self, ticket: Ticket) -> None:
        """One episode from ticket to report."""
        scene, recipe = self._scene, self._scene.recipe
        try:
            task = scene.tasks.get(ticket.task)
            if task is None:
                raise BadInput(f"there is no task {ticket.task!r}", where="tasks.train")
            episode = await run_episode(
                task,
                sampler=scene.sampler,
                factory=scene.factory,
                dialect=scene.dialect,
                agent=recipe.agent,
                sandbox=recipe.sandbox,
                params=sampling_params(recipe.sampling),
                session=f"{ticket.group}.{ticket.index}.{uuid.uuid4().hex[:12]}",
                group=ticket.group,
                index=ticket.index,
                seed=ticket.seed,
                min_version=ticket.min_version,
                attempt=ticket.attempt,
            )
        except Dropped as dropped:
            await self._report_drop(ticket, dropped.cause, str(dropped))
        except BadInput as error:
            await self._report_drop(ticket, DropCause.SAMPLER, str(error))
        else:
            await self._report(ticket, episode)

    async def _report(self, ticket: Ticket, episode: Episode) -> None:
        self._drops_in_a_row = 0
        with self._not_to_be_cancelled():
            try:
                await self._coordinator.finished(episode)
            except BadInput as error:
                await self._coordinator.dropped(ticket, DropCause.CORRUPT, str(error))

    async def _report_drop(self, ticket: Ticket, cause: DropCause, detail: str) -> None:
        """Report it, and hold its place for a while, the longer the more failed in a row: broken machinery needs time."""
        self._drops_in_a_row += 1
        print(f"dropped {ticket.group}/{ticket.index} of {ticket.task} ({cause}): {detail}", flush=True)
        pause = min(MOST_PAUSE, 0.05 * 2 ** min(self._drops_in_a_row, 10))
        with self._not_to_be_cancelled():
            await self._coordinator.dropped(ticket, cause, detail)
        await asyncio.sleep(pause)

    @contextlib.contextmanager
    def _not_to_be_cancelled(self) -> Iterator[None]:
        """A worker that stops waits for what is being reported."""
        task = asyncio.current_task()
        assert task is not None
        self._reporting.add(task)
        try:
            yield
        finally:
            self._reporting.discard(task)

    async def _wind_up(self, others: Sequence[asyncio.Task[Any]]) -> None:
        """End every episode so that its sandbox is closed; reports get a moment to arrive."""
        for task in [*others, *(t for t in self._running.values() if t not in self._reporting)]:
            task.cancel()
        if self._reporting:
            await asyncio.wait(list(self._reporting), timeout=STOP_SECONDS)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*others, *self._running.values(), return_exceptions=True)


async def work(run: str, token: str, router: str, worker: str, concurrency: int | None) -> None:
    """Fetch the recipe, then run episodes until there are none left to run."""
    async with aiohttp.ClientSession() as http:
        coordinator = CoordinatorClient(run, token, http)
        facts = await coordinator.recipe()
        recipe = Recipe.model_validate(facts["recipe"])
        deadline = recipe.router.retry_seconds * 2
        async with FleetClient(router, token, deadline_seconds=deadline) as sampler:
            scene = Scene(
                recipe=recipe,
                tasks={task.id: task for task in load_tasks(facts["tasks"])},
                sampler=sampler,
                factory=open_factory(recipe.sandbox),
                dialect=Dialect.load(facts["model"], recipe.model.tool_format),
            )
            capacity = sum(pool.replicas * pool.capacity for pool in recipe.pools)
            loop = Worker(worker, coordinator, scene, concurrency or capacity)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, loop.stop.set)
            print(f"rollout worker {worker} ready: {concurrency or capacity} episodes at a time", flush=True)
            await loop.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs episodes for a run; started by `farflung train`.")
    parser.add_argument("--run", required=True, help="URL of the coordinator")
    parser.add_argument("--router", required=True, help="URL of the router")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--worker", default=f"rollout-{os.getpid()}", help="name of this worker, unique in the run")
    parser.add_argument("--concurrency", type=int, help="episodes at a time (the pools' capacity if not given)")
    args = parser.parse_args()
    process.start_process()
    try:
        token = wire.read_token(args.token_file)
        asyncio.run(work(args.run, token, args.router, args.worker, args.concurrency))
    except RunOver:
        pass
    except FarflungError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT_CODE if isinstance(error, BadInput) else 1)


if __name__ == "__main__":
    main()
