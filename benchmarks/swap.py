"""Loading a version into an engine that serves: how long its turns stand still, and what it costs beside a whole load.

    python benchmarks/swap.py [--model FOLDER] [--formats bf16 nvfp4] [--share 0.008] [--loads 48] [--batch 4] [--bare 60]

The model is "random-135m", random weights in the shape of SmolLM2-135M, or a folder. While the embedded engine decodes a batch,
versions that differ in ``--share`` of their BF16 elements go through a publisher and a subscriber over a folder, each in the
engine's own format, and are loaded with the positions of what changed. The last version is then loaded once more, whole. Gaps are
between the ends of two decoding steps; loading happens in another thread. A gap is held against the median of the undisturbed
ones (nothing published, fetched or loaded meanwhile) within a second of it, since steps grow with the sequences, whose cache has
its full size from the start.

``pause_over_step_ms``: the longest gap that holds a swap, over an undisturbed step; 10 ms are allowed. ``median_over_step_ms``:
their median. ``swap_ms``: the longest swap itself. ``idle_ms``: the most that the engine's thread did not compute in such a gap.

What makes such a step slow stands beside them: ``over_limit`` is the share of steps that take 10 ms more than those around them,
and ``longest_ms`` the longest, of

    swap         steps that hold a swap, which is the first thing after a load
    after_load   the first step after a load whose swap waits: every second one does, for four steps
    late_swap    the steps that hold those swaps
    after_work   the first step after another process has added numbers for as long as a load takes; it holds nothing of the engine's
    undisturbed  all others, with nothing published, fetched, loaded or worked on meanwhile (second steps after such work are among them)
    bare         the same matrices multiplied by a batch, over and over, before there is an engine

The last line is JSON, by format.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import argparse
import asyncio
import gc
import json
import sys
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
from farflung.engines.embedded.weights import read_folder
from farflung.weights import FolderStore, Publisher, Subscriber

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
LIMIT_SECONDS = 0.010
WAIT_STEPS = 4
REST_SECONDS = 0.7
"""Between two things that happen beside the decoding."""

WORK = """
import sys, time
for line in sys.stdin:
    end = time.perf_counter() + float(line)
    while time.perf_counter() < end:
        sum(range(1000))
    print(flush=True)
"""


class Watched(EmbeddedEngine):
    """Notes when its steps end and what its thread has computed until then, when loads are done, and when it swaps."""

    def __init__(self, *args: Any) -> None:
        self.steps: list[tuple[float, float]] = []
        self.swaps: list[tuple[float, float]] = []
        self.late_swaps: list[tuple[float, float]] = []
        self.loaded: list[float] = []
        """When those loads were done whose swaps wait."""
        self.wait = 0
        """Steps that the next swap waits."""
        super().__init__(*args)
        self._batch.cache.reserve(self._options.capacity, 4096)

    def _decode(self) -> None:
        super()._decode()
        self.steps.append((time.perf_counter(), time.thread_time()))

    def _swap(self, *args: Any) -> None:
        if self.wait:
            self.loaded.append(time.perf_counter())
            self._swap_after(self.wait, *args)
        else:
            self._swap_now(self.swaps, *args)

    def _swap_after(self, steps: int, *args: Any) -> None:
        if steps:
            self._post(lambda: self._swap_after(steps - 1, *args))
        else:
            self._swap_now(self.late_swaps, *args)

    def _swap_now(self, noted: list[tuple[float, float]], *args: Any) -> None:
        began = time.perf_counter()
        super()._swap(*args)
        noted.append((began, time.perf_counter()))


def bare(weights: dict[str, torch.Tensor], batch: int, seconds: float) -> FloatArray:
    """How long it takes to multiply a batch by all matrices, in float32 as the engine does, over and over: [n] in seconds."""
    matrices = [tensor.float() for tensor in weights.values() if tensor.ndim == 2]
    rows = {matrix.shape[1]: torch.ones(batch, matrix.shape[1]) for matrix in matrices}
    ends = [time.perf_counter()]
    while ends[-1] < ends[0] + seconds:
        for matrix in matrices:
            torch.mm(rows[matrix.shape[1]], matrix.t())
        ends.append(time.perf_counter())
    return np.diff(ends)[10:]


def over_around(gaps: FloatArray, counted: BoolArray, ends: FloatArray) -> FloatArray:
    """Each gap over the median of the counted ones that end within a second of it; 0 where there is none."""
    found = np.zeros(len(gaps))
    for i, end in enumerate(ends):
        near = counted & (abs(ends - end) < 1)
        if near.any():
            found[i] = gaps[i] - np.median(gaps[near])
    return found


def move(weights: dict[str, torch.Tensor], share: float, rng: np.random.Generator) -> None:
    """Move some elements of each matrix by a unit in the last place."""
    for tensor in weights.values():
        if tensor.ndim > 1:
            some = torch.from_numpy(rng.random(tensor.numel(), dtype=np.float32) < share)
            tensor.view(torch.int16).view(-1)[some] += 1


class Elsewhere:
    """Another process that works when it is told to."""

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORK, stdin=pipe, stdout=pipe)

    async def work(self, seconds: float) -> tuple[float, float]:
        """From when to when it did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = time.perf_counter()
        self._process.stdin.write(f"{seconds}\n".encode())
        await self._process.stdout.readline()
        return began, time.perf_counter()

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()


async def measure(args: argparse.Namespace, format: str, folder: Path) -> dict[str, Any]:
    weights, rng = read_folder(folder), np.random.default_rng(0)
    alone = bare(weights, args.batch, args.bare)
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
        elsewhere = Elsewhere()
        await elsewhere.start()
        loads: list[tuple[float, float]] = []
        spent: list[float] = []
        works: list[tuple[float, float]] = []
        busy: list[tuple[float, float]] = []
        for version in range(1, args.loads + 2):
            whole = version > args.loads
            begun = time.perf_counter()
            if not whole:
                move(weights, args.share, rng)
                publisher.publish(version, weights)
                update = subscriber.fetch(version)
            busy.append((begun, time.perf_counter()))
            await asyncio.sleep(REST_SECONDS)
            engine.wait = 0 if version % 2 or whole else WAIT_STEPS
            began, before = time.perf_counter(), engine.stats().load_seconds
            await engine.load(version, update.tensors, None if whole else update.changed)
            loads.append((began, time.perf_counter()))
            spent.append(engine.stats().load_seconds - before)
            await asyncio.sleep(REST_SECONDS)
            works.append(await elsewhere.work(spent[-1]))
            await asyncio.sleep(REST_SECONDS)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        await engine.close()
        await elsewhere.close()
    elements = sum(map(len, (update.changed or {}).values()))
    return report(format, engine, np.array(loads), spent, np.array(works), np.array(busy), alone, elements)


def report(
    format: str,
    engine: Watched,
    loads: FloatArray,
    spent: list[float],
    works: FloatArray,
    busy: FloatArray,
    alone: FloatArray,
    elements: int,
) -> dict[str, Any]:
    """loads [n, 2], the last one whole, works [n, 2] and busy [m, 2]: from when to when; ``spent``: what loads took by themselves,
    in seconds; ``alone``: what ``bare`` gave."""
    ends, computed = np.array(engine.steps).T
    gaps, idle, begins, ends = np.diff(ends), np.diff(ends) - np.diff(computed), ends[:-1], ends[1:]

    def beside(spans: FloatArray) -> BoolArray:
        return ((ends[:, None] > spans[:, 0]) & (begins[:, None] < spans[:, 1])).any(1)

    swaps, late = np.array(engine.swaps), np.array(engine.late_swaps)
    loaded = np.array(engine.loaded)
    held, after = beside(swaps), np.zeros(len(gaps), bool)
    after[np.searchsorted(begins, works[:, 1])] = True
    still = ~(beside(np.concatenate([loads, works, busy])) | after)
    over = over_around(gaps, still, ends)
    spans = {
        "swap": over[held],
        "after_load": over[beside(np.stack([loaded, loaded], 1))],
        "late_swap": over[beside(late)],
        "undisturbed": over[still],
        "after_work": over[after],
        "bare": over_around(alone, np.ones(len(alone), bool), np.cumsum(alone)),
    }
    shares = {name: float(np.mean(times > LIMIT_SECONDS)) for name, times in spans.items()}
    partial = float(np.median(spent[1:-1]))  # the first one also makes the second set of weights
    found = {
        "pause_over_step_ms": 1e3 * float(spans["swap"].max()),
        "median_over_step_ms": 1e3 * float(np.median(spans["swap"])),
        "swap_ms": 1e3 * float(np.diff(np.concatenate([swaps, late])).max()),
        "idle_ms": 1e3 * float(idle[held].max()),
        "longest_ms": {name: 1e3 * float(times.max()) for name, times in spans.items()},
        "whole_vs_partial": spent[-1] / partial,
    }
    print(
        f"{format}: {elements:,} elements changed; load {partial:.2f} s, whole {spent[-1]:.2f} s; step "
        f"{1e3 * float(np.median(gaps[still])):.1f} ms, while loading {1e3 * float(np.median(gaps[beside(loads)])):.1f} ms"
    )
    for name, times in spans.items():
        longest = ", ".join(f"{1e3 * time:.1f}" for time in np.sort(times)[:-6:-1])
        print(
            f"  {name}: {len(times)} steps, {shares[name]:.2%} of them 10 ms over those around; longest {longest} ms over"
        )
    return found | {"over_limit": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-135m")
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--share", type=float, default=0.008, help="of the BF16 elements that change")
    parser.add_argument("--loads", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bare", type=float, default=60.0, help="seconds of matrices alone")
    args = parser.parse_args()
    if args.loads < 2:
        parser.error("--loads must be at least 2: one swap comes at once, the next one waits")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) if args.model == "random-135m" else Path(args.model)
        if args.model == "random-135m":
            LlamaForCausalLM(RANDOM).to(torch.bfloat16).save_pretrained(folder)
        result = {format: asyncio.run(measure(args, format, folder)) for format in args.formats}
    print(json.dumps({"limit_ms": 1e3 * LIMIT_SECONDS, **result}))


if __name__ == "__main__":
    main()
