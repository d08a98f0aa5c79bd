"""Living and waiting: children that must not outlive their parent, and pauses between tries."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
import threading
import time
from collections.abc import Iterator


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent dies, however that happens. ``parent`` is the pid that is expected to be it.

    Linux tells the kernel (PR_SET_PDEATHSIG); elsewhere a thread looks once a second.
    """
    expected = parent if parent is not None else os.getppid()
    if platform.system() == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != expected:  # it died before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()


def patience(first: float, most: float) -> Iterator[float]:
    """Pauses between tries in seconds, without end: doubling from ``first`` to ``most``, each spread by a fifth."""
    pause = first
    while True:
        yield pause * random.uniform(0.8, 1.2)
        pause = min(most, pause * 2)
