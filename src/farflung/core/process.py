"""A child process that must not outlive the process which started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent dies, however that happens. ``parent`` is the pid that is expected to be it.

    Linux tells the kernel (PR_SET_PDEATHSIG); elsewhere a thread looks once a second.
    """
    expected = parent if parent is not None else os.getppid()
    if sys.platform == "linux":
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
