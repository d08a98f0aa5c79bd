"""Threads that stay for the next version: to start them costs as much as applying a small delta."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A number of threads, started when there is work for them, gone with this object."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def all(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of items. Raises what ``work`` raises, of the first such item; nothing is at work then."""
        running: list[Future[Result]] = []
        try:
            running.extend(self._pool.submit(work, item) for item in items)
            return [future.result() for future in running]
        finally:
            _end(running)

    def ahead(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The same as they come, of which no more than there are threads are at work or wait to be taken."""
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(self._pool.submit(work, item))
                if len(running) == self._threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            _end(running)


def _end(running: Iterable[Future[Result]]) -> None:
    """What has not begun never will; what has is waited for."""
    wait([future for future in running if not future.cancel()])
