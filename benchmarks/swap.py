"""Loading a version into an engine that serves: how long its turns stand still, and what it costs beside a whole load.

    python benchmarks/swap.py [--model FOLDER] [--formats bf16 nvfp4] [--share 0.008] [--loads 24] [--batch 4]

The model is "random-135m", random weights in the shape of SmolLM2-135M, or a folder. While the embedded engine decodes a batch,
versions that differ in ``--share`` of their BF16 elements go through a publisher and a subscriber over a folder, each in the
engine's own format, and are loaded with the positions of what changed. The last version is then loaded once more, whole. Gaps are
between the ends of two decoding steps; loading happens in another thread. A gap is held against the median of the undisturbed
ones (nothing published, fetched or loaded meanwhile) within a second of it, since steps grow with the sequences, whose cache has
its full size from the start.

``pause_over_step_ms``: the longest gap that holds a swap, over an undisturbed one; ``median_over_step_ms``: their median. What
the machine does by itself stands beside them, and a swap that costs nothing shows it as well: ``blank_over_step_ms`` and
``blank_median_over_step_ms`` are the same of gaps that hold an action that does nothing, posted where a thread that has copied
memory for the time of a load has just ended; ``undisturbed_over_step_ms`` is the longest of as many undisturbed gaps, by their
percentile. ``idle_ms``: the most that the engine's thread did not compute in a gap that holds a swap. The last line is JSON:
these, the limit of 10 ms, the longest swap itself, and whole over partial load, by format.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import argparse
import asyncio
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine import RANDOM
from transformers import LlamaForCausalLM

from farflung.core.sampling import GenerateRequest, SamplingParams, Source
from farflung.engines.embedded import EmbeddedEngine, EngineOptions
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.threads import in_background
from farflung.engines.embedded.weights import read_folder
from farflung.weights import FolderStore, Publisher, Subscriber

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Watched(EmbeddedEngine):
    """Notes when its steps end, what its thread has computed until then, and when it swaps."""

    def __init__(self, *args: Any) -> None:
        self.steps: list[tuple[float, float]] = []
        self.swaps: list[tuple[float, float]] = []
        self.blanks: list[tuple[float, float]] = []
        super().__init__(*args)
        self._batch.cache.reserve(self._options.capacity, 4096)

    def _decode(self) -> None:
        super()._decode()
        self.steps.append((time.perf_counter(), time.thread_time()))

    def _swap(self, *args: Any) -> None:
        began = time.perf_counter()
        super()._swap(*args)
        self.swaps.append((began, time.perf_counter()))

    def blank(self) -> None:
        now = time.perf_counter()
        self.blanks.append((now, now))


def churn(there: torch.Tensor, here: torch.Tensor, seconds: float) -> None:
    """Copy as much memory as goes into these seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        there.copy_(here)


def move(weights: dict[str, torch.Tensor], share: float, rng: np.random.Generator) -> None:
    """Move some elements of each matrix by a unit in the last place."""
    for tensor in weights.values():
        if tensor.ndim > 1:
            some = torch.from_numpy(rng.random(tensor.numel(), dtype=np.float32) < share)
            tensor.view(torch.int16).view(-1)[some] += 1


async def measure(args: argparse.Namespace, format: str, folder: Path) -> dict[str, float]:
    weights, rng = read_folder(folder), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        publisher = Publisher(FolderStore(path), "run", formats=(format,), anchor_every=1000)
        publisher.publish(0, weights)
        subscriber = Subscriber(FolderStore(path), "run", format=format, threads=1)
        source = Source("pool", "replica", format, "bf16")
        engine = Watched(
            Architecture.read(folder),
            subscriber.fetch(0).tensors,
            source,
            EngineOptions(capacity=args.batch, device="cpu"),
        )
        gc.collect()
        gc.freeze()  # as `farflung serve` does
        ids = np.arange(32, dtype=np.int32) + 100
        turns = [
            asyncio.create_task(engine.generate(GenerateRequest(f"s{i}", ids, SamplingParams(max_tokens=4000, seed=i))))
            for i in range(args.batch)
        ]
        while len(engine.steps) < 20:
            await asyncio.sleep(0.1)
        loop, spare = asyncio.get_running_loop(), torch.zeros(2, 1 << 20)
        loads: list[tuple[float, float]] = []
        busy: list[tuple[float, float]] = []
        for version in range(1, args.loads + 2):
            whole = version > args.loads
            begun = time.perf_counter()
            if not whole:
                move(weights, args.share, rng)
                publisher.publish(version, weights)
                update = subscriber.fetch(version)
            busy.append((begun, time.perf_counter()))
            await asyncio.sleep(1.0)
            began = time.perf_counter()
            await engine.load(version, update.tensors, None if whole else update.changed)
            loads.append((began, time.perf_counter()))
            await asyncio.sleep(1.0)
            began = time.perf_counter()
            await in_background(lambda: churn(*spare, 0.15), loop)
            engine._post(engine.blank)
            busy.append((began, time.perf_counter()))
            await asyncio.sleep(1.0)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        await engine.close()
    elements = sum(map(len, (update.changed or {}).values()))
    return report(format, engine, np.array(loads), np.array(busy), elements)


def report(format: str, engine: Watched, loads: FloatArray, busy: FloatArray, elements: int) -> dict[str, float]:
    """loads [n, 2], the last one whole, and busy [m, 2]: from when to when."""
    ends, computed = np.array(engine.steps).T
    gaps, idle, begins, ends = np.diff(ends), np.diff(ends) - np.diff(computed), ends[:-1], ends[1:]

    def beside(spans: FloatArray) -> BoolArray:
        return ((ends[:, None] > spans[:, 0]) & (begins[:, None] < spans[:, 1])).any(1)

    loading, still = beside(loads), ~beside(np.concatenate([loads, busy]))
    # Around the first steps nothing is undisturbed.
    beside_still = [still & (abs(ends - end) < 1) for end in ends]
    over = np.array(
        [gap - np.median(gaps[near]) if near.any() else 0.0 for gap, near in zip(gaps, beside_still, strict=True)]
    )
    swaps, blanks = np.array(engine.swaps), np.array(engine.blanks)
    held, blank = over[beside(swaps)], over[beside(blanks)]
    noise = float(np.percentile(over[still], 100 - 100 / len(swaps)))
    seconds = np.diff(loads)[:, 0]
    partial = float(np.median(seconds[1:-1]))  # the first one also makes the second set of weights
    swap = float(np.diff(swaps).max())
    print(
        f"{format}: {elements:,} elements changed; load {partial:.2f} s, whole {seconds[-1]:.2f} s; "
        f"step {1e3 * float(np.median(gaps[still])):.1f} ms, while loading {1e3 * float(np.median(gaps[loading])):.1f} ms; over an "
        f"undisturbed one: that holds a swap {1e3 * float(np.median(held)):.1f} ms (longest {1e3 * float(held.max()):.1f}), "
        f"a blank {1e3 * float(np.median(blank)):.1f} ms (longest {1e3 * float(blank.max()):.1f}), "
        f"longest of {len(swaps)} undisturbed ones {1e3 * noise:.1f} ms; longest swap {1e3 * swap:.2f} ms"
    )
    return {
        "pause_over_step_ms": 1e3 * float(held.max()),
        "median_over_step_ms": 1e3 * float(np.median(held)),
        "blank_over_step_ms": 1e3 * float(blank.max()),
        "blank_median_over_step_ms": 1e3 * float(np.median(blank)),
        "undisturbed_over_step_ms": 1e3 * noise,
        "idle_ms": 1e3 * float(idle[beside(swaps)].max()),
        "swap_ms": 1e3 * swap,
        "whole_vs_partial": float(seconds[-1]) / partial,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-135m")
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--share", type=float, default=0.008, help="of the BF16 elements that change")
    parser.add_argument("--loads", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) if args.model == "random-135m" else Path(args.model)
        if args.model == "random-135m":
            LlamaForCausalLM(RANDOM).to(torch.bfloat16).save_pretrained(folder)
        result = {format: asyncio.run(measure(args, format, folder)) for format in args.formats}
    print(json.dumps({"limit_ms": 10.0, **result}))


if __name__ == "__main__":
    main()
