"""The local processes of a run: started with the right threads, restarted when they die, stopped together.

A child gets its own session (Ctrl-C reaches only the coordinator, which stops the children in order) and learns its
parent's pid in FARFLUNG_PARENT, by which it dies with it (core/process.py). Its output goes to logs/NAME.log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from farflung.core.errors import BAD_INPUT_CODE, DIVERGED_CODE, BadInput, Diverged, FarflungError, InfraError

CRASHES = 5
CRASH_WINDOW = 60.0
STOP_SECONDS = 5.0
LOG_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Program:
    """A child process: ``argv`` follows ``python -m``; ``on_death`` hears of every unwanted end before the restart."""

    name: str
    argv: tuple[str, ...]
    on_death: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Child:
    program: Program
    process: asyncio.subprocess.Process | None = None
    crashes: list[float] = field(default_factory=list)


def child_environment() -> dict[str, str]:
    """One thread per process and no spinning: two OpenMP threads beside a busy process cost a factor of 50."""
    return os.environ | {
        "FARFLUNG_PARENT": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


class Processes:
    """Keeps programs alive until ``stop``. ``failed`` holds the error of one that dies again and again: CRASHES times
    within CRASH_WINDOW, or since the run last got on (``progressed``) if that is longer ago."""

    def __init__(self, logs: Path, event: Callable[[str, str], None]) -> None:
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self._event = event
        self._children: dict[str, _Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._progress = time.monotonic()
        self.failed: FarflungError | None = None

    def progressed(self) -> None:
        """The work as a whole gets on: what died before and came back is forgiven."""
        self._progress = time.monotonic()

    async def start(self, program: Program) -> None:
        child = _Child(program)
        self._children[program.name] = child
        await self._spawn(child)
        self._watchers[program.name] = asyncio.create_task(self._watch(child))

    async def ended(self, name: str, seconds: float) -> bool:
        """Whether a program that ends by itself does so within ``seconds``; one that dies in between is started again."""
        await asyncio.wait({self._watchers[name]}, timeout=seconds)
        process = self._children[name].process
        return process is not None and process.returncode == 0

    def pids(self) -> dict[str, int]:
        """Name -> pid of what runs now."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process is not None and child.process.returncode is None
        }

    async def stop(self, order: Sequence[str] = ()) -> None:
        """End everything: SIGTERM, then SIGKILL after STOP_SECONDS; the programs in ``order`` first."""
        for watcher in self._watchers.values():  # from here on nothing is started again
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        names = [n for n in order if n in self._children] + [n for n in self._children if n not in order]
        for name in names:
            _signal(self._children[name], signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name in names:
            process = self._children[name].process
            if process is None:
                continue
            try:
                await asyncio.wait_for(process.wait(), max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                _signal(self._children[name], signal.SIGKILL)
                await process.wait()

    async def _spawn(self, child: _Child) -> None:
        log = (self._logs / f"{child.program.name}.log").open("ab")
        try:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *child.program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,
            )
        finally:
            log.close()

    async def _watch(self, child: _Child) -> None:
        name = child.program.name
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if code == 0:
                return
            now = time.monotonic()
            if code == BAD_INPUT_CODE and not child.crashes:  # it would only say so again
                self.failed = BadInput(
                    f"{name} cannot work with what it was given; its last words:\n{self.log_tail(name)}",
                    mend=f"see {self._logs / name}.log",
                )
                return
            since = min(now - CRASH_WINDOW, self._progress)
            child.crashes = [at for at in child.crashes if at > since] + [now]
            self._event("process_died", f"{name} ended with {_describe(code)}")
            child.program.on_death()
            if len(child.crashes) >= CRASHES:
                tail = self.log_tail(name)
                kind = Diverged if code == DIVERGED_CODE else InfraError
                self.failed = kind(
                    f"{name} died {CRASHES} times within {now - child.crashes[0]:.0f} s; its last words:\n{tail}",
                    mend=f"see {self._logs / name}.log",
                )
                return
            await asyncio.sleep(0.25 * 2 ** (len(child.crashes) - 1))
            try:
                await self._spawn(child)
            except OSError as error:
                self.failed = InfraError(f"{name} cannot be started again: {error}", where=str(self._logs))
                return
            self._event("process_restarted", name)

    def log_tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self._logs / f"{name}.log").read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
        return ""


def free_port() -> int:
    """A port on the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Meter:
    """Resident memory and CPU time of this process and all its descendants, summed; ``peak`` over the looks taken."""

    def __init__(self) -> None:
        self.peak = 0
        self.memory = 0
        self.cpu = 0.0

    def look(self) -> None:
        """Read them now: bytes, and seconds since the processes started, with those of descendants that have ended."""
        memory, cpu = 0, 0.0
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                cpu += sum(process.cpu_times()[:4])  # own user and system, ended children's user and system
        self.memory = memory
        self.cpu = cpu
        self.peak = max(self.peak, memory)


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
