"""Threads that stay for the next version: to start them costs as much as applying a small delta."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A number of threads for one caller at a time, started when there is work for them, gone with this object. A forked
    process has none of them.

    Whatever ends a call early, an error of ``work``, an interrupt, or a caller who takes no more: what has not begun never
    will, and what has is waited for (until a second interrupt).
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def all(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of items. Raises what ``work`` raises, of the first such item."""
        with self._ended_early():
            return list(self._pool.map(work, items))

    def ahead(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The same as they come, of which no more than there are threads are at work or wait to be taken."""
        running: deque[Future[Result]] = deque()
        with self._ended_early():
            for item in items:
                running.append(self._pool.submit(work, item))
                if len(running) == self._threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()

    @contextmanager
    def _ended_early(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            pool, self._pool = self._pool, ThreadPoolExecutor(self._threads)
            pool.shutdown(cancel_futures=True)  # it knows of work that an interrupt kept from being noted here
            raise
