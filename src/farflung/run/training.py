"""The trainer's process: take a batch, step, make it durable, publish it, report it. ``python -m farflung.run.training``.

Killed at any point it goes on without repeating an update: the checkpoint is written whole or not at all and carries the
update's metrics; publishing the same version again changes nothing; the coordinator records a report once. A batch
belongs to its update for good, so an update whose checkpoint was never written is made again from the same groups. A
version is published while the next step is made; the next checkpoint waits for it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from farflung.config import Recipe
from farflung.core.errors import (
    BAD_INPUT_CODE,
    DISK_FULL,
    DIVERGED_CODE,
    BadInput,
    Corrupt,
    Diverged,
    FarflungError,
    InfraError,
    disk_full,
)
from farflung.core.metrics import UpdateMetrics
from farflung.fleet import process, wire
from farflung.run.client import RunClient, RunOver
from farflung.run.coordinator import decode_batch
from farflung.run.publishing import Publishing, Upkeep
from farflung.trainer.step import Trainer
from farflung.weights.manifest import derive_key
from farflung.weights.publisher import Publisher
from farflung.weights.urls import open_store

KEEP_CHECKPOINTS = 2


def checkpoints(run_dir: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    return sorted(p for p in (run_dir / "checkpoints").glob("update-*") if p.is_dir())


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer of a run; started by `farflung train`.")
    parser.add_argument("--run", required=True, help="URL of the coordinator")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="the run's folder")
    args = parser.parse_args()
    process.start_process()
    token = wire.read_token(args.token_file)
    client = RunClient(args.run, token)
    try:
        train(client, client.get("/v1/recipe"), token, args.dir)
    except RunOver:
        print("the run is over", flush=True)
    except (FarflungError, OSError) as error:
        if not disk_full(error) and isinstance(error, InfraError | OSError):
            raise  # starting again may help
        reason = DISK_FULL if disk_full(error) else str(error)
        client.post("/v1/halts", {"reason": f"the trainer cannot go on: {reason}"})
        raise SystemExit(0) from None


def train(client: RunClient, facts: Mapping[str, Any], token: str, run_dir: Path) -> None:
    """Make updates until the coordinator wants no more; the last policy lies in ``run_dir/policy``."""
    recipe, model = Recipe.model_validate(facts["recipe"]), Path(facts["model"])
    trainer, last = _start(recipe, model, run_dir)
    place, key = str(facts["store"]), derive_key(token)
    store, run_id = open_store(place), str(facts["run_id"])
    publisher = Publisher(
        store,
        run_id,
        formats=_formats(recipe),
        exclude=recipe.weights.exclude,
        anchor_every=recipe.weights.anchor_every,
        small=recipe.weights.small,
        key=key,
    )
    if (published := publisher.resume()) is None:
        if trainer.version > 0:
            raise Corrupt(f"the store is empty, the checkpoint is at version {trainer.version}", where=place)
        base = publisher.publish(0, trainer.weights())
        client.post("/v1/updates", {"metrics": None, "published": asdict(base)})
    publishing = Publishing(publisher, client)
    if last is not None and trainer.version >= (published or 0):  # else an older checkpoint makes its update again
        publishing.start(trainer.version, publisher.snapshot(trainer.weights()), last)
        publishing.settle()
    upkeep = Upkeep(store, run_id, recipe, key)
    print(f"trainer ready at version {trainer.version}", flush=True)
    try:
        while True:
            _update(client, trainer, publisher, publishing, run_dir)
    except RunOver:
        publishing.settle()
        trainer.export(run_dir / "policy")
        print("trainer finished", flush=True)
    finally:
        upkeep.close()


def _formats(recipe: Recipe) -> tuple[str, ...]:
    """BF16 first, then those that the pools serve and those that were asked for."""
    served = [pool.weights for pool in recipe.pools if pool.engine != "paced"]
    return tuple(dict.fromkeys(["bf16", *served, *recipe.weights.formats]))


def _start(recipe: Recipe, model: Path, run_dir: Path) -> tuple[Trainer, UpdateMetrics | None]:
    """The newest readable checkpoint with the metrics of its update, or the starting policy."""
    for path in reversed(checkpoints(run_dir)):
        try:
            trainer, extra = Trainer.load(path, model, recipe.train, temperature=recipe.sampling.temperature)
        except Corrupt as error:
            print(f"passing over a checkpoint: {error}", flush=True)
            continue
        return trainer, UpdateMetrics.from_dict(extra["metrics"])
    return Trainer(model, recipe.train, temperature=recipe.sampling.temperature, seed=recipe.run.seed), None


def _update(client: RunClient, trainer: Trainer, publisher: Publisher, publishing: Publishing, run_dir: Path) -> None:
    """One update from batch to a version that is being published. Raises RunOver when there is no further one."""
    update = trainer.version + 1
    waited = time.monotonic()
    while not (raw := client.post("/v1/batches", {"update": update})):
        pass  # an empty answer comes after ten seconds: the batch is still being sampled
    began = time.monotonic()
    metrics = trainer.step(decode_batch(raw))
    stepped = time.monotonic()
    publishing.settle()
    settled = time.monotonic()
    parts = dict(metrics.seconds) | {"wait": began - waited, "step": stepped - began, "settle": settled - stepped}
    metrics = replace(metrics, seconds=parts)
    _checkpoint(trainer, metrics, run_dir)
    saved = dict(parts) | {"save": time.monotonic() - settled}
    snapshot = publisher.snapshot(trainer.weights())
    publishing.start(trainer.version, snapshot, replace(metrics, seconds=saved))


def _checkpoint(trainer: Trainer, metrics: UpdateMetrics, run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    trainer.save(folder / f"update-{trainer.version:06d}", {"metrics": metrics.to_dict()})
    for old in checkpoints(run_dir)[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)


if __name__ == "__main__":
    try:
        main()
    except FarflungError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT_CODE if isinstance(error, BadInput) else DIVERGED_CODE if isinstance(error, Diverged) else 1)
