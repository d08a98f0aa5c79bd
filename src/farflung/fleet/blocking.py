"""Blocking calls beside an event loop, in threads that cannot keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def beside(call: Callable[[], T], *, seconds: float | None) -> T:
    """What ``call`` returns, from a daemon thread of its own. Raises what it raises, and TimeoutError after ``seconds`` (None: never).

    A call that outlives its deadline, or whose caller is cancelled, runs on unheard.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(cast(T, value))

    def work() -> None:
        value: T | None = None
        problem: Exception | None = None
        try:
            value = call()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=work, daemon=True, name="blocking").start()
    async with asyncio.timeout(seconds):
        return await answer
