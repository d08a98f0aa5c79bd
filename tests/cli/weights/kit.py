"""``farflung weights`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60.0
RECIPE = Path(__file__).parents[3] / "src/farflung/assets/recipes/quickstart.toml"
Run = Callable[..., tuple[int, str, str]]


@contextmanager
def process(*argv: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``farflung weights ...`` in a process of its own, which is killed at the end, or when it takes too long."""
    command = [sys.executable, "-u", "-m", "farflung.cli.main", "weights", *map(str, argv)]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    too_late = threading.Timer(SECONDS, started.kill)
    too_late.start()
    try:
        yield started
    finally:
        too_late.cancel()
        started.kill()
        started.communicate()


def read_line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
