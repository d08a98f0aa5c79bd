"""Real child processes: restarted when they die, ended for good when told to."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psutil
import pytest

from farflung.core.errors import BadInput, Diverged
from farflung.run import processes as module
from farflung.run.processes import Processes, Program

FIRST = "from pathlib import Path\nstarts = Path(__file__).with_suffix('.starts')\nstarts.open('a').write('x')\n"
DIE_ONCE = "if len(starts.read_text()) == 1:\n    raise SystemExit(3)\n"
SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
IGNORE = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


class Programs:
    """Modules in a folder, started by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[str, str]] = []
        self.processes = Processes(folder / "logs", lambda kind, detail: self.events.append((kind, detail)))

    async def start(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(FIRST + source)
        await self.processes.start(Program(name, (name,)))

    def starts(self, name: str) -> int:
        path = self.folder / f"{name}.starts"
        return len(path.read_text()) if path.exists() else 0

    async def until_said(self, name: str, word: str) -> None:
        async with asyncio.timeout(30):
            while word not in self.processes.log_tail(name):
                await asyncio.sleep(0.01)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Programs(tmp_path)


async def test_what_dies_is_started_again_and_may_end_by_itself(programs: Programs) -> None:
    await programs.start("once", DIE_ONCE)
    assert await programs.processes.ended("once", 30)
    assert programs.starts("once") == 2
    assert programs.events == [("process_died", "once ended with exit code 3"), ("process_restarted", "once")]
    await programs.processes.stop()


async def test_what_goes_on_has_not_ended(programs: Programs) -> None:
    await programs.start("long", SLEEP)
    await programs.until_said("long", "ready")
    assert not await programs.processes.ended("long", 0.01)
    pid = programs.processes.pids()["long"]
    await programs.processes.stop()
    assert not psutil.pid_exists(pid)
    assert programs.events == []


async def test_nothing_is_started_again_while_the_rest_is_stopped(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 1.0)
    await programs.start("stubborn", IGNORE + SLEEP)
    await programs.until_said("stubborn", "ready")
    await programs.start("once", DIE_ONCE + SLEEP)
    async with asyncio.timeout(30):
        while not programs.events:
            await asyncio.sleep(0.01)
    await programs.processes.stop(order=("once",))
    assert programs.starts("once") == 1
    assert programs.processes.pids() == {}


async def test_what_dies_again_and_again_fails_the_run_with_its_last_words(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CRASHES", 2)
    await programs.start("bad", "raise SystemExit('no such luck')")
    assert not await programs.processes.ended("bad", 30)
    assert "bad died 2 times" in str(programs.processes.failed)
    assert "no such luck" in str(programs.processes.failed)
    await programs.processes.stop()


async def test_a_training_that_diverges_again_and_again_is_told_apart_from_failed_machinery(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CRASHES", 2)
    await programs.start("trainer", "import sys\nprint('error: the loss is not finite')\nsys.exit(3)\n")
    assert not await programs.processes.ended("trainer", 30)
    assert isinstance(programs.processes.failed, Diverged)
    assert "the loss is not finite" in str(programs.processes.failed)
    await programs.processes.stop()


async def test_what_cannot_be_started_again_fails_the_run(programs: Programs) -> None:
    await programs.start("bad", "raise SystemExit(1)")
    shutil.rmtree(programs.folder / "logs")
    assert not await programs.processes.ended("bad", 30)
    assert "bad cannot be started again" in str(programs.processes.failed)
    await programs.processes.stop()


async def test_slow_deaths_count_until_the_run_gets_on(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CRASHES", 3)
    monkeypatch.setattr(module, "CRASH_WINDOW", 0.0)
    await programs.start("bad", "raise SystemExit(1)")
    async with asyncio.timeout(30):
        while programs.starts("bad") < 5:
            if len(programs.events) % 2 == 1:  # it died and waits to be started again
                programs.processes.progressed()
            assert programs.processes.failed is None
            await asyncio.sleep(0.01)
    assert not await programs.processes.ended("bad", 30)
    assert "bad died 3 times" in str(programs.processes.failed)
    await programs.processes.stop()


async def test_what_is_given_wrong_input_is_not_started_again(programs: Programs) -> None:
    await programs.start("bad", "import sys\nprint('error: no such model')\nsys.exit(2)\n")
    assert not await programs.processes.ended("bad", 30)
    assert isinstance(programs.processes.failed, BadInput)
    assert "no such model" in str(programs.processes.failed)
    assert programs.starts("bad") == 1
    assert programs.events == []
    await programs.processes.stop()
