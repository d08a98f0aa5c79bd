"""What the router's and the replica's processes do alike: start, say where they are, wait for the signal to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

from farflung.core.process import die_with_parent

PARENT_VARIABLE = "FARFLUNG_PARENT"


def start_process() -> None:
    """Log to stderr; die with the parent if the parent said so by naming its pid in FARFLUNG_PARENT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parent = os.environ.get(PARENT_VARIABLE)
    if parent and parent.isdigit():
        die_with_parent(int(parent))


def announce(role: str, url: str, **more: str) -> None:
    """One JSON line on stdout: the server listens at ``url``."""
    print(json.dumps({"role": role, "url": url, "pid": os.getpid(), **more}), flush=True)


async def stop_signal(broken: asyncio.Event | None = None) -> bool:
    """Wait for SIGTERM or SIGINT (a second one ends the process in the usual way); false if ``broken`` came first."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.create_task(event.wait()) for event in (stop, broken) if event is not None]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return stop.is_set()
