"""Threads that stay: results in order, and nothing at work once a call has ended, however it ended."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count

import pytest

from farflung.weights.workers import Workers

Run = Callable[[Callable[[int], int], list[int]], list[int]]


@pytest.fixture(params=["all", "ahead"])
def run(request: pytest.FixtureRequest) -> Run:
    """Either way to have work done by two threads."""
    workers = Workers(2)
    if request.param == "all":
        return workers.all
    return lambda work, items: list(workers.ahead(work, items))


def test_results_come_in_the_order_of_items(run: Run) -> None:
    second = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second.wait(30)
        elif item == 1:
            second.set()
        return 10 * item

    assert run(work, [0, 1, 2, 3]) == [0, 10, 20, 30]
    assert run(work, []) == []


def test_after_an_error_nothing_is_at_work_and_the_threads_go_on(run: Run) -> None:
    begun, going, done = [], threading.Event(), []

    def work(item: int) -> int:
        begun.append(item)
        if item == 0:
            assert going.wait(30)
            raise ValueError("of the first")
        if item == 1:
            going.set()
            time.sleep(0.2)
            done.append(item)
        time.sleep(0.02)
        return item

    with pytest.raises(ValueError, match="of the first"):
        run(work, list(range(100)))
    assert done == [1]
    seen = list(begun)
    assert len(seen) < 100
    assert run(lambda item: item, [5, 6, 7]) == [5, 6, 7]
    assert begun == seen


def test_of_several_errors_the_first_item_s_is_raised(run: Run) -> None:
    second = threading.Event()

    def work(item: int) -> int:
        if item == 1:
            second.set()
        assert second.wait(30)
        raise ValueError(str(item))

    with pytest.raises(ValueError, match=r"^0$"):
        run(work, [0, 1])


def test_no_more_is_taken_ahead_than_there_are_threads() -> None:
    taken = count()
    results = Workers(3).ahead(lambda item: item, (next(taken) for _ in range(100)))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert next(taken) <= 5 + 3


def test_what_is_left_half_way_is_not_at_work() -> None:
    going, done = threading.Event(), []

    def work(item: int) -> int:
        if item:
            going.set()
            time.sleep(0.2)
            done.append(item)
        return item

    results = Workers(2).ahead(work, range(10))
    assert next(results) == 0
    assert going.wait(30)
    results.close()
    seen = list(done)
    assert 1 in seen
    time.sleep(0.3)
    assert done == seen


def test_a_failure_holds_on_to_nothing() -> None:
    class Held:
        pass

    def fails(_: Held) -> None:
        raise ValueError("as asked")

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="as asked"):
            Workers(2).all(fails, [held])
        del held
        assert gone() is None
    finally:
        gc.enable()


def test_threads_stay_and_go_with_their_workers() -> None:
    workers, meet = Workers(2), threading.Barrier(2)

    def work(_: int) -> threading.Thread:
        meet.wait(30)
        return threading.current_thread()

    threads = {*workers.all(work, [0, 1]), *workers.all(work, [0, 1])}
    assert len(threads) == 2
    del workers
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
