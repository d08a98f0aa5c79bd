"""Leases: what live subscribers hold stays, and what they cannot write fails nothing."""

from __future__ import annotations

import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from farflung.weights import FolderStore, StoreError, Subscriber
from farflung.weights.objects import Deadlines, MirrorStore
from farflung.weights.retention import LIVE_SECONDS, held
from tests.weights.parts import (
    RUN,
    MemoryStore,
    equal,
    overwrite,
    publish,
    walk,
)
from tests.weights.pruning import old_run, pruned


def test_what_a_live_subscriber_holds_stays_reachable() -> None:
    store, history = old_run()
    slow, gone = Subscriber(store, RUN, name="slow"), Subscriber(store, RUN, name="gone")
    gone.fetch(1)
    store.now += LIVE_SECONDS + 1
    slow.fetch(4)
    assert held(store, RUN) == {"slow": 4}
    done = pruned(store, 1)
    assert (done.floor, done.leases) == (3, 1)
    store.reads.clear()
    update = slow.fetch(9)
    assert equal(update.tensors, history[9])
    assert update.links > 0, "over deltas, and not anew"
    assert equal(gone.fetch(9).tensors, history[9])
    assert held(store, RUN) == {"slow": 9, "gone": 9}
    assert pruned(store, 1).floor == 9


def test_a_lease_is_renewed_for_as_long_as_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = old_run()
    subscriber = Subscriber(store, RUN, name="one")
    subscriber.newest()
    assert held(store, RUN) == {}, "it holds nothing yet"
    subscriber.fetch(4)
    clock = time.monotonic()
    for minutes in range(1, 40):
        store.now += 60
        monkeypatch.setattr(time, "monotonic", lambda minutes=minutes: clock + 61 * minutes)
        subscriber.newest()
        assert held(store, RUN) == {"one": 4}
    store.now += LIVE_SECONDS + 1
    assert held(store, RUN) == {}


class Unwritable(MemoryStore):
    """Credentials that may read alone, for as long as ``closed``."""

    closed = True
    tries = 0

    def write_note(self, key: str, data: bytes) -> None:
        self.tries += 1
        if self.closed:
            raise StoreError("no permission to write", where=key)
        super().write_note(key, data)


def test_a_lease_that_cannot_be_written_is_said_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, history = Unwritable(), walk(5)
    publish(store, history)
    subscriber = Subscriber(store, RUN, name="one")
    clock = time.monotonic()
    for minutes, number in enumerate((1, 2, 4), 1):
        monkeypatch.setattr(time, "monotonic", lambda minutes=minutes: clock + 61 * minutes)
        assert equal(subscriber.fetch(number).tensors, history[number])
        assert subscriber.newest() == 5
        assert store.tries == minutes, "not again before its time"
    assert caplog.text.count("what is held cannot be told to the store") == 1
    assert "no permission to write" in caplog.text
    store.closed = False
    subscriber.newest()
    assert held(store, RUN) == {}
    monkeypatch.setattr(time, "monotonic", lambda: clock + 61 * 5)
    subscriber.newest()
    assert held(store, RUN) == {"one": 4}
    subscriber.fetch(5)
    assert held(store, RUN) == {"one": 5}


def test_any_web_server_is_enough_for_a_named_subscriber(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes no notes."""
    history = walk(2)
    publish(FolderStore(tmp_path), history)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        deadlines = Deadlines(retries=1, retry_seconds=5.0)
        store = MirrorStore(f"http://127.0.0.1:{server.server_port}", deadlines=deadlines)
        subscriber = Subscriber(store, RUN, name="one")
        for number in (0, 2):
            assert equal(subscriber.fetch(number).tensors, history[number])
    finally:
        server.shutdown()
        server.server_close()
    assert caplog.text.count("what is held cannot be told to the store") == 1


def test_a_joiner_holds_its_anchor_before_it_has_its_version() -> None:
    store, history = old_run()
    seen: list[dict[str, int]] = []
    get = store.get

    def watched(key: str, max_bytes: int) -> bytes:
        if "/objects/" in key:
            seen.append(held(store, RUN))
        return get(key, max_bytes)

    store.get = watched  # type: ignore[method-assign]
    assert equal(Subscriber(store, RUN, name="new").fetch(5).tensors, history[5])
    assert seen[0] == {"new": 3}
    assert held(store, RUN) == {"new": 5}


@pytest.mark.parametrize("wrong", [b"", b"{}", b'{"version":-1}', b'{"version":1,"x":1}', b"[" * 4000, b"\xff"])
def test_a_lease_that_cannot_be_read_holds_everything_until_it_is_old(
    wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, history = old_run()
    overwrite(store, f"{RUN}/leases/odd", wrong)
    store.pointers[f"{RUN}/leases/odd"] = store.objects.pop(f"{RUN}/leases/odd")
    before = dict(store.objects)
    assert held(store, RUN) == {"odd": 0}
    assert f"lease {RUN}/leases/odd: not a lease" in caplog.text
    done = pruned(store, 1)
    assert (done.floor, done.versions, done.leases) == (0, 0, 0)
    assert store.objects == before
    store.now += LIVE_SECONDS + 1
    done = pruned(store, 1)
    assert (done.floor, done.versions, done.leases) == (9, 9, 1)
    assert store.read_pointer(f"{RUN}/leases/odd") is None
    assert equal(Subscriber(store, RUN).fetch(9).tensors, history[9])
