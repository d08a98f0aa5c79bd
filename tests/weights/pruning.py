"""A run that was published long ago, and what pruning takes from it."""

from __future__ import annotations

from typing import Any

from farflung.weights import Compactor
from farflung.weights.history import History
from farflung.weights.manifest import Seal
from farflung.weights.retention import ORPHAN_SECONDS, Removed, prune
from tests.weights.parts import (
    RUN,
    MemoryStore,
    Policy,
    publish,
    walk,
)


def pruned(store: Any, keep: int, **options: Any) -> Removed:
    return prune(History(store, RUN, Seal(None)), keep, **options)


def old_run(versions: int = 9, **options: Any) -> tuple[MemoryStore, list[Policy]]:
    """A run with an anchor every three versions and jumps, published long ago."""
    store, history = MemoryStore(), walk(versions)
    publish(store, history, anchor_every=3, **options)
    Compactor(store, RUN).step()
    store.now += 2 * ORPHAN_SECONDS
    return store, history
