"""Publishing beside training: a version is compared, encoded, stored and reported while the next step is already made."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace

from farflung.config import Recipe
from farflung.core.errors import FarflungError
from farflung.core.metrics import UpdateMetrics
from farflung.run.client import RunClient
from farflung.weights.compactor import Compactor
from farflung.weights.history import History
from farflung.weights.manifest import Seal
from farflung.weights.publisher import Publisher
from farflung.weights.retention import prune
from farflung.weights.store import Store
from farflung.weights.streams import Snapshot

IDLE_SECONDS = 5.0
PRUNE_SECONDS = 60.0
"""Between prunings, each of which lists the whole run."""


class Publishing:
    """One version at a time. ``settle`` before the next checkpoint is written, so that a trainer that dies has at most
    one version to publish again: that of its newest checkpoint."""

    def __init__(self, publisher: Publisher, client: RunClient) -> None:
        self._publisher = publisher
        self._client = client
        self._thread = ThreadPoolExecutor(1, "publishing")
        self._under_way: Future[None] | None = None

    def start(self, version: int, snapshot: Snapshot, metrics: UpdateMetrics) -> None:
        """Publish and report in the background."""
        self.settle()
        self._under_way = self._thread.submit(self._publish, version, snapshot, metrics)

    def settle(self) -> None:
        """Wait for the version under way. Raises what it met."""
        done, self._under_way = self._under_way, None
        if done is not None:
            done.result()

    def _publish(self, version: int, snapshot: Snapshot, metrics: UpdateMetrics) -> None:
        """Make the version visible, then report it: a sampler may serve a version before the ledger knows it."""
        published = self._publisher.publish(version, snapshot)
        parts = dict(metrics.seconds) | {
            "publish": published.seconds,
            "cast": published.cast_seconds,
            "encode": published.encode_seconds,
            "store": published.store_seconds,
        }
        report = replace(metrics, seconds=parts)
        self._client.post("/v1/updates", {"metrics": report.to_dict(), "published": asdict(published)})
        print(
            f"update {metrics.update}: reward {metrics.all.reward:.3f}, kl {metrics.all.kl:.5f}, "
            f"gradient norm {metrics.grad_norm:.3f}, {json.dumps({k: round(v, 2) for k, v in parts.items()})}",
            flush=True,
        )


class Upkeep:
    """A thread that folds deltas into jumps and removes what nobody needs. What it meets is printed, and tried again."""

    def __init__(self, store: Store, run_id: str, recipe: Recipe, key: bytes) -> None:
        levels, self._keep = recipe.weights.levels, recipe.weights.keep
        self._compactor = Compactor(store, run_id, key=key, levels=levels) if levels else None
        self._history = History(store, run_id, Seal(key))
        self._pruned, self._pruned_at = -1, float("-inf")
        self._stop = threading.Event()
        self._said = ""
        threading.Thread(target=self._run, name="upkeep", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(IDLE_SECONDS):
            try:
                if self._compactor is not None:
                    self._compactor.step()
                if self._keep is not None:
                    self._prune(self._keep)
            except (FarflungError, OSError) as error:
                if str(error) != self._said:
                    print(f"upkeep of the weight store: {error}", flush=True)
                self._said = str(error)

    def _prune(self, keep: int) -> None:
        """When there is a version since the last pruning, and not at once after that one."""
        if time.monotonic() - self._pruned_at < PRUNE_SECONDS:
            return
        newest = self._history.newest()
        if newest is not None and newest.number != self._pruned:
            self._pruned_at = time.monotonic()
            prune(self._history, keep)
            self._pruned = newest.number
