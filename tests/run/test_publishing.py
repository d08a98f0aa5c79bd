"""Publishing beside training: in order, once, and what it meets comes out where the trainer waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import pytest
import torch

from farflung.config import Recipe
from farflung.config.tree import WeightsConfig
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.run import publishing as module
from farflung.run.client import RunClient
from farflung.run.publishing import Publishing, Upkeep
from farflung.weights import FolderStore, Publisher, StoreError, Subscriber
from farflung.weights.retention import LIVE_SECONDS

KEY = b"key"


class Coordinator(RunClient):
    """Takes reports down; ``open`` lets them through."""

    def __init__(self) -> None:
        super().__init__("http://nowhere", "token")
        self.reports: list[Mapping[str, Any]] = []
        self.open = threading.Event()
        self.open.set()

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        assert path == "/v1/updates"
        assert self.open.wait(20)
        self.reports.append(body)
        return b"{}"


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": torch.full((64,), value), "model.layers.0.mlp.up_proj.weight": torch.eye(32) * value}


def metrics(update: int) -> UpdateMetrics:
    return UpdateMetrics(update, TokenStats(), seconds={"step": 1.0})


def test_a_version_is_published_while_the_trainer_goes_on(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    publisher = Publisher(store, "run", formats=("bf16", "nvfp4"), key=KEY)
    publisher.publish(0, weights(1.0))
    client = Coordinator()
    client.open.clear()
    work = Publishing(publisher, client)
    policy = weights(2.0)
    work.start(1, publisher.snapshot(policy), metrics(1))
    policy["model.norm.weight"].fill_(7.0)  # the next step is made already
    client.open.set()
    work.start(2, publisher.snapshot(weights(3.0)), metrics(2))
    work.settle()
    assert [report["metrics"]["update"] for report in client.reports] == [1, 2]
    assert [report["published"]["version"] for report in client.reports] == [1, 2]
    assert {"step", "publish", "encode", "store"} <= client.reports[0]["metrics"]["seconds"].keys()
    assert client.reports[1]["published"]["streams"].keys() == {"bf16", "nvfp4"}
    subscriber = Subscriber(store, "run", key=KEY)
    assert subscriber.fetch(1).tensors["model.norm.weight"].unique().tolist() == [2.0]
    assert subscriber.fetch(2).tensors["model.norm.weight"].unique().tolist() == [3.0]


def test_what_publishing_meets_is_raised_where_the_trainer_waits(tmp_path: Path) -> None:
    class Full(FolderStore):
        def put(self, key: str, data: bytes) -> None:
            raise StoreError("no space", where=key)

    publisher = Publisher(Full(tmp_path), "run")
    client = Coordinator()
    work = Publishing(publisher, client)
    work.start(0, publisher.snapshot(weights(1.0)), metrics(1))
    with pytest.raises(StoreError, match="no space"):
        work.settle()
    assert client.reports == []
    work.settle()


def test_upkeep_folds_deltas_and_removes_old_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    store = FolderStore(tmp_path)
    publisher = Publisher(store, "run", key=KEY, anchor_every=4)
    for version in range(9):
        publisher.publish(version, weights(1.0 + version))
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        os.utime(file, (time() - LIVE_SECONDS - 60,) * 2)
    upkeep = Upkeep(store, "run", Recipe(weights=WeightsConfig(levels=2, keep=2)), KEY)
    deadline = monotonic() + 20
    while monotonic() < deadline:
        sleep(0.05)
        kept = [key for key in store.list("run") if "/manifests/" in key]
        if store.list("run/jumps") and len(kept) == 5:
            break
    upkeep.close()
    assert [int(key.split("/")[-1][:8]) for key in kept] == [4, 5, 6, 7, 8]
    assert "run/jumps/bf16/00000008-4" in store.list("run/jumps")
    newcomer = Subscriber(store, "run", key=KEY)
    assert newcomer.fetch(8).tensors["model.norm.weight"].unique().tolist() == [9.0]


def test_upkeep_prunes_when_there_is_a_new_version_and_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(module, "PRUNE_SECONDS", 0.0)

    class Counted(FolderStore):
        listed = 0
        looks = 0

        def ages(self, folder: str) -> dict[str, float]:
            self.listed += folder == "run"
            return super().ages(folder)

        def read_pointer(self, key: str) -> bytes | None:
            self.looks += 1
            return super().read_pointer(key)

    store = Counted(tmp_path)
    publisher = Publisher(store, "run", key=KEY, anchor_every=1)
    upkeep = Upkeep(store, "run", Recipe(weights=WeightsConfig(levels=1, keep=1)), KEY)

    def wait(ready: Callable[[], bool]) -> None:
        deadline = monotonic() + 20
        while not ready():
            assert monotonic() < deadline
            sleep(0.01)

    for version in range(3):
        publisher.publish(version, weights(1.0 + version))
        wait(lambda version=version: store.listed > version)
        looks = store.looks
        wait(lambda looks=looks: store.looks > looks + 5)
        assert store.listed == version + 1
    monkeypatch.setattr(module, "PRUNE_SECONDS", 1000.0)
    looks = store.looks
    wait(lambda: store.looks > looks + 5)
    publisher.publish(3, weights(9.0))
    looks = store.looks
    wait(lambda: store.looks > looks + 5)
    assert store.listed == 3, "not before its time"
    upkeep.close()
