"""Between the engine's threads and the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


def answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T | Exception) -> None:
    """Resolve a future of the event loop from another thread; one that nobody waits for any more is left alone."""

    def resolve() -> None:
        if future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(resolve)


async def in_background(work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Run ``work`` on a thread of its own that yields the processor to the engine's and the loop's threads."""
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        # On Linux niceness belongs to a thread, and cannot be taken back: hence a new thread every time.
        if hasattr(os, "setpriority"):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
        try:
            with torch.inference_mode():
                result = work()
        except Exception as error:
            answer(loop, future, error)
        else:
            answer(loop, future, result)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await future
