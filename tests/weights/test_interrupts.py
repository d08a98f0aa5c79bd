"""An interrupt of whoever waits: what was at work has ended by the time that the call does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farflung.weights import Subscriber
from farflung.weights.workers import Workers
from tests.weights.parts import RUN, MemoryStore, equal, publish, walk


class Interrupted(BaseException):
    """As KeyboardInterrupt, which a process in the background may not get."""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt_and_go_on(now: bool) -> None:
    """Of a thread at work: interrupt the one that waits for it, and stay at work for a while."""
    time.sleep(0.2)  # until it is waited for
    if now:
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupted_wait_ends_when_nothing_is_at_work(ahead: bool) -> None:
    workers, done = Workers(2), []

    def work(item: int) -> int:
        interrupt_and_go_on(item == 0)
        time.sleep(0.3 * (item == 0))  # the one that is waited for ends last
        done.append(item)
        return item

    with pytest.raises(Interrupted):
        list(workers.ahead(work, [0, 1]) if ahead else workers.all(work, [0, 1]))
    assert 0 in done
    seen = list(done)
    time.sleep(0.5)
    assert done == seen


@pytest.mark.parametrize("in_folder", [False, True])
def test_an_interrupted_fetch_changes_nothing_behind_the_next_one(
    in_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = MemoryStore(), walk(2)
    publish(store, history)
    subscriber = Subscriber(store, RUN, folder=tmp_path if in_folder else None)
    subscriber.fetch(0)
    settle, once = Subscriber._settle, iter([True])

    def interrupts(*arguments: Any) -> Any:
        interrupt_and_go_on(next(once, False))
        return settle(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Subscriber, "_settle", interrupts)
        with pytest.raises(Interrupted):
            subscriber.fetch(1)
    update = subscriber.fetch(0)
    assert equal(update.tensors, history[0])
    time.sleep(0.5)
    assert equal(update.tensors, history[0])
    subscriber.close()
