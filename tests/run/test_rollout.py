"""The rollout worker against the real coordinator over HTTP, with a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from builders import recipe

from agents.dialects import dialect, save
from agents.world import MEND, TASK, FakeFactory, Script, complete
from farflung.config import Recipe, SandboxConfig
from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import GenerateRequest
from farflung.fleet import wire
from farflung.run import coordinator as coordinator_module
from farflung.run import rollout
from farflung.run.buffer import Buffer
from farflung.run.coordinator import Coordinator
from farflung.run.ledger import Ledger
from farflung.run.rollout import CoordinatorClient, RunOver, Scene, Worker

TOKEN = "a-long-random-word"
COMMAND = dialect("command")


class Run:
    """A coordinator that can go away and come back at the same address."""

    def __init__(
        self, folder: Path, settings: Recipe, task: str = TASK.id, facts: dict[str, Any] | None = None
    ) -> None:
        self.folder, self.settings, self.task, self.facts = folder, settings, task, facts or {}
        self.url = ""
        self.coordinator: Coordinator
        self.ledger: Ledger
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self.ledger = Ledger(self.folder)
        buffer = Buffer(self.ledger, self.settings, [self.task])
        self.coordinator = Coordinator(self.ledger, buffer, self.settings, self.facts)
        self.coordinator.start_sampling()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self._runner, self.url = await wire.listen(self.coordinator.app(wire.guard(TOKEN)), "127.0.0.1", port)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self.ledger.close()
            self._runner = None

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition(self.coordinator.status()):
                await asyncio.sleep(0.01)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr(coordinator_module, "POLL_SECONDS", 0.2)
    it = Run(tmp_path / "run", recipe(groups=2, group_size=2, updates=2, retries=1))
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def worker(run: Run, http: aiohttp.ClientSession, script: Any, factory: Any = None, concurrency: int = 3) -> Worker:
    scene = Scene(run.settings, {TASK.id: TASK}, script, factory or FakeFactory(), COMMAND)
    return Worker("w", CoordinatorClient(run.url, TOKEN, http, deadline=20.0), scene, concurrency)


async def test_it_samples_until_the_buffer_is_full_and_ends_when_the_run_is_over(run: Run, http: Any) -> None:
    script = Script(COMMAND, ["ls", "submit"])
    loop = asyncio.create_task(worker(run, http, script).run())
    await run.until(lambda status: status["episodes"] == 8)
    assert run.coordinator.status()["buffer"] == {"open": 0, "ready": 4, "sampling": 0, "waiting": 0}
    assert not loop.done()
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)
    kept = [run.ledger.group_episodes(group) for group in range(4)]
    assert kept == [[0, 1]] * 4
    assert len(set(script.forgotten)) == 8  # every episode had a session of its own
    seeds = {request.params.seed for request in script.requests}
    assert len(seeds) == 8


async def test_a_coordinator_that_comes_back_gets_every_episode_once(run: Run, http: Any) -> None:
    gate = asyncio.Event()

    class Gated(Script):
        async def generate(self, request: GenerateRequest) -> Any:
            await gate.wait()
            return await Script.generate(self, request)

    script = Gated(COMMAND, ["submit"])
    loop = asyncio.create_task(worker(run, http, script, concurrency=4).run())
    await run.until(lambda status: status["buffer"]["sampling"] == 4)
    await run.stop()
    gate.set()  # episodes finish while nobody listens
    async with asyncio.timeout(10):
        while len(script.forgotten) < 4:
            await asyncio.sleep(0.01)
    await run.start()
    await run.until(lambda status: status["episodes"] == 8)
    assert len(script.forgotten) == 8  # what was handed out again while it still ran was not run twice
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)


async def test_failed_machinery_is_counted_tried_again_and_given_up(run: Run, http: Any) -> None:
    class Broken(Script):
        async def generate(self, request: GenerateRequest) -> Any:
            raise InfraError("no sampler")

    loop = asyncio.create_task(worker(run, http, Broken(COMMAND, []), concurrency=2).run())
    await run.until(lambda status: status["dropped"].get("sampler", 0) >= 2)
    assert run.coordinator.status()["retried"]["sampler"] >= 2
    assert run.coordinator.status()["episodes"] == 0
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)


async def test_what_is_tried_again_starts_while_its_first_try_still_holds_its_place(
    run: Run, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "MOST_PAUSE", 60.0)

    class BrokenOnce(Script):
        async def generate(self, request: GenerateRequest) -> Any:
            self.requests.append(request)
            if len(self.requests) == 1:
                raise InfraError("no sampler")
            return await Script.generate(self, request)

    it = worker(run, http, BrokenOnce(COMMAND, ["submit"]), concurrency=3)
    it._drops_in_a_row = 10  # so that the first try rests for longer than this test takes
    loop = asyncio.create_task(it.run())
    await run.until(lambda status: status["episodes"] == 8)
    assert run.coordinator.status()["retried"] == {"sampler": 1}
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)


async def test_a_task_that_the_worker_does_not_have_is_a_drop_with_its_name(
    tmp_path: Path, http: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, recipe(retries=0), task="unheard-of")
    await run.start()
    loop = asyncio.create_task(worker(run, http, Script(COMMAND, [])).run())
    await run.until(lambda status: status["dropped"].get("sampler", 0) >= 1)
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)
    await run.stop()
    assert "there is no task 'unheard-of'" in capfd.readouterr().out


async def test_stopping_closes_sandboxes_and_lets_reports_arrive(run: Run, http: Any) -> None:
    factory = FakeFactory()

    class Endless(Script):
        async def generate(self, request: GenerateRequest) -> Any:
            if len(self.requests) < 1:
                return await Script.generate(self, request)
            self.requests.append(request)
            return await asyncio.Future()

    script = Endless(COMMAND, ["submit"])
    it = worker(run, http, script, factory, concurrency=3)
    reported = asyncio.Event()
    finished = it._coordinator.finished

    async def slow(episode: Any) -> None:
        reported.set()
        await asyncio.sleep(0.2)
        await finished(episode)

    it._coordinator.finished = slow  # type: ignore[method-assign]
    loop = asyncio.create_task(it.run())
    async with asyncio.timeout(10):
        await reported.wait()
        while len(script.requests) < 3:
            await asyncio.sleep(0.01)
    it.stop.set()
    await asyncio.wait_for(loop, 10)
    assert run.coordinator.status()["episodes"] == 1
    assert len(factory.boxes) >= 3
    assert all(box.closed for box in factory.boxes)
    assert run.coordinator.worker_died("w") >= 2  # the rest can be handed out again


async def test_a_fault_of_the_program_is_not_swallowed(run: Run, http: Any) -> None:
    class Faulty(Script):
        async def generate(self, request: GenerateRequest) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(worker(run, http, Faulty(COMMAND, [])).run(), 10)


async def test_a_wrong_token_and_a_silent_coordinator_are_told_apart(run: Run, http: Any) -> None:
    with pytest.raises(BadInput, match="401"):
        await CoordinatorClient(run.url, "wrong", http).recipe()
    run.coordinator.finish_early()
    with pytest.raises(RunOver):
        await CoordinatorClient(run.url, TOKEN, http).tickets("w", 1, [])
    await run.stop()
    with pytest.raises(InfraError, match=r"no answer for 0\.3 s"):
        await CoordinatorClient(run.url, TOKEN, http, deadline=0.3).recipe()


async def test_a_rejected_episode_is_dropped_as_corrupt(run: Run, http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.Episode, "encode", lambda self: b"not a frame")
    loop = asyncio.create_task(worker(run, http, Script(COMMAND, ["submit"]), concurrency=2).run())
    await run.until(lambda status: status["dropped"].get("corrupt", 0) >= 1)
    run.coordinator.finish_early()
    await asyncio.wait_for(loop, 10)


def test_it_needs_no_torch() -> None:
    import subprocess

    code = "import sys, farflung.run.rollout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_the_process_repairs_in_real_sandboxes_and_stops_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to graded episodes; the sampler is a small server with a script."""
    from farflung.tasks.files import save_tasks

    monkeypatch.setattr(coordinator_module, "POLL_SECONDS", 0.2)
    replies = [COMMAND.reply(command) for command in ("cat -n calc/core.py", MEND, "submit")]
    asked: dict[str, int] = {}

    async def generate(request: web.Request) -> web.Response:
        wanted = GenerateRequest.decode(await request.read())
        turn = asked[wanted.session] = asked.get(wanted.session, -1) + 1
        return web.Response(body=complete(replies[turn], wanted).encode())

    async def forget(request: web.Request) -> web.Response:
        return web.Response(status=204)

    sampler = wire.application(TOKEN)
    sampler.router.add_post("/v1/generate", generate)
    sampler.router.add_delete("/v1/sessions/{session}", forget)
    serving, router = await wire.listen(sampler, "127.0.0.1", 0)

    settings = recipe(groups=1, group_size=2).model_copy(update={"sandbox": SandboxConfig(kind="process")})
    save_tasks(tmp_path / "tasks.jsonl", [TASK])
    facts = {"model": str(save(tmp_path / "model")), "tasks": str(tmp_path / "tasks.jsonl"), "run_id": "r", "store": ""}
    run = Run(tmp_path / "run", settings, facts=facts)
    await run.start()
    (tmp_path / "token").write_text(TOKEN)
    argv = ["--run", run.url, "--router", router, "--token-file", str(tmp_path / "token"), "--worker", "w"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "farflung.run.rollout", *argv, env=os.environ | {"FARFLUNG_PARENT": str(os.getpid())}
    )
    try:
        await run.until(lambda status: status["episodes"] == 4)
        assert run.coordinator.status()["reward"] == 1.0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await run.stop()
        await serving.cleanup()
    assert json.loads(json.dumps(asked)) == dict.fromkeys(asked, 2)
    assert len(asked) == 4
