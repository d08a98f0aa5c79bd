"""Real runs for the integration tests: `farflung train` as a process, watched through its ledger, and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

RECIPE = """
[run]
name = "test"
updates = {updates}
[train]
groups = 2
group_size = 4
[eval]
tasks = 4
samples = 2
[[pools]]
name = "nvfp4"
weights = "nvfp4"
kv = "fp8"
capacity = 4
[[pools]]
name = "bf16"
capacity = 4
"""


class Run:
    """One run in its own folder; ``start`` may be called again to resume it."""

    def __init__(self, folder: Path, updates: int, *overrides: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(RECIPE.format(updates=updates))
        self.overrides = overrides
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, resume: bool = False) -> None:
        what = (
            ["--resume", str(self.folder)] if resume else [str(self.recipe), "--dir", str(self.folder), *self.overrides]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farflung.cli.main", "train", *what],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self, seconds: float = 240) -> tuple[int, str]:
        """Exit code and what was printed."""
        assert self.process is not None
        try:
            text, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"the run did not end in {seconds} s; {self.logs()}") from None
        return self.process.returncode, text

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def children(self) -> dict[str, int]:
        """Role -> pid of the run's own programs that are alive now."""
        assert self.process is not None
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    line = child.cmdline()
                    if "farflung.fleet.serve" in line:
                        found[line[line.index("--replica") + 1]] = child.pid
                    elif len(line) > 2 and line[2].startswith("farflung."):
                        found[line[2].rsplit(".", 1)[1]] = child.pid
        return found

    def kill(self, role: str) -> None:
        until(lambda: role in self.children(), f"{role} runs")
        os.kill(self.children()[role], signal.SIGKILL)

    def query(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Rows of the ledger, read beside its writer; none while there is no ledger."""
        path = self.folder / "ledger.sqlite"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as db:
            try:
                return db.execute(sql, arguments).fetchall()
            except sqlite3.OperationalError:
                return []

    def count(self, table: str) -> int:
        rows = self.query(f"SELECT COUNT(*) FROM {table}")
        return int(rows[0][0]) if rows else 0

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(text) for (text,) in self.query("SELECT metrics FROM updates ORDER BY id")]

    def logs(self) -> str:
        parts = []
        for path in sorted((self.folder / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-600:]}")
        return "\n".join(parts)


def until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def running(folder: Path, updates: int, *overrides: str) -> Iterator[Run]:
    run = Run(folder, updates, *overrides)
    run.start()
    try:
        yield run
    finally:
        run.close()
