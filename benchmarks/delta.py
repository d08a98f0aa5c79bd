"""Weight deltas against their entropy bound and what others send: sizes and times, in one run.

    python benchmarks/delta.py [--parts codec formats join smollm2] [--params 110e6] [--threads 2] [--smollm2 FOLDER]

Weights are a decoder's matrices (``--width`` 2048: 2,048 to 6,144 rows and columns), w ~ N(0, 0.028 x row scale), in FP32
masters that do not begin on BF16's grid. Their steps are Adam's (0.9, 0.98, no weight decay): a fresh gradient at each step,
whose scale is log-normal over the weights and whose mean is, for each weight, N(0, ``--drift`` x its noise). What is measured
is the step after 20 steps of warm-up, in which Adam's bias correction makes changes denser. All learning rates see the same
gradients. Shares of 3, 1 and 0.1 % come from learning rates in between; the real share is printed.

"codec": our size is that of all objects as they are published, with headers, tables, hashes and escapes. The bound is, per
changed weight, H2(s)/s bits for its position, summed over matrices, and the entropy of the steps in units in the last place.
"small" is the form for slow links, told of classes of old weights. The others: each matrix's bytes XORed and packed by zstd-1 (stitch, slime, miles, SkyRL, ModelExpress), unpacked by chunks of
2 MB as slime does ("XOR") or a matrix at a time as the others do ("XOR all"), and int32 positions with BF16 values (TRL, verl, vLLM). Same arrays, same threads: matrices, or our
objects, are spread over them; they stay, as a publisher's and a subscriber's do. Encoding goes from two byte images to the objects' bytes, and all hash the new weights
(xxh3-128), as stitch and slime do ("small" makes both forms); decoding goes from the objects' bytes to weights changed in place, without hashes. Times
are medians of rounds in which the sides take turns: processor time at one thread, wall time at more. The copy rate is of
copied bytes, of the same arrays by the same threads. The JSON has the figures at 1 %, decoding against the copy rate at
0.1 %, and all under ``cases``.

"formats": the same step at lr 1e-6 through a publisher in every format; matrices alone, whose versions 0 and 1 are the
initial weights and those after the warm-up. Ratios of whole streams are arithmetic for models' shapes, embeddings and LM head
in BF16, at as many bytes a weight as the matrices in BF16. "join": 128 steps of one layer at lr 1e-6 through publisher,
compactor and subscriber over a folder: what a subscriber at version 0 fetches for version 128 (pointer, manifests, jumps,
objects) over the 128 deltas' objects. "smollm2": real steps of the model in FOLDER on English text, masters as they are
stored, every version published in three formats; the JSON has medians of the last half. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from delta_sides import SIDES, pool
from delta_weights import LAYER_SIZE, WARM_UP, Images, Walk, load, matrices, train, train_on_text

from farflung.weights import Compactor, FolderStore, Published, Publisher, Subscriber
from farflung.weights.changes import find
from farflung.weights.elements import from_bits
from farflung.weights.history import History
from farflung.weights.manifest import Seal
from farflung.weights.streams import BF16

RATES = {"lr 1e-5": 1e-5, "lr 1e-6": 1e-6, "lr 1e-7": 1e-7}
SHARES = {"3 %": 4.3e-6, "1 %": 1.175e-6, "0.1 %": 8.6e-8}
"""Learning rates at which about this share of weights changes."""
SPAN, JOIN_WIDTH = 128, 768
FORMATS, TEXT_FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4"), ("bf16", "fp8", "nvfp4")
SHAPES = {"Qwen3-0.6B": (440.4e6, 155.6e6), "Qwen3-8B": (6.946e9, 1.245e9), "Qwen3-30B-A3B": (29.90e9, 0.622e9)}
"""Weights in projection matrices, and in embeddings and LM head."""


@dataclass(frozen=True)
class Case:
    """One step. Sizes in bytes by side, ``seconds`` by what is done and side; ``copy`` for all weights once."""

    weights: int
    changed: int
    bound: float
    sizes: Mapping[str, int]
    seconds: Mapping[str, Mapping[str, float]]
    copy: float

    def rate(self, seconds: float) -> float:
        """GB/s of the weights in BF16."""
        return 2 * self.weights / seconds / 1e9

    def figures(self) -> dict[str, float]:
        ours, encode, decode = self.sizes["ours"], self.seconds["encode"], self.seconds["decode"]
        xor = min(encode["XOR"], encode["XOR all"])  # the same work, timed twice
        return {
            "share": self.changed / self.weights,
            "bytes_per_change": ours / self.changed,
            "bound_ratio": ours / self.bound,
            "small_bound_ratio": self.sizes["small"] / self.bound,
            "dense_ratio": 2 * self.weights / ours,
            "size_vs_xor_zstd": self.sizes["XOR"] / ours,
            "size_vs_int32_bf16": self.sizes["int32"] / ours,
            "encode_vs_xor_zstd": xor / encode["ours"],
            "decode_vs_xor_zstd": decode["XOR"] / decode["ours"],
            "decode_vs_xor_zstd_whole": decode["XOR all"] / decode["ours"],
            "encode_vs_int32_bf16": encode["int32"] / encode["ours"],
            "decode_vs_int32_bf16": decode["int32"] / decode["ours"],
            "decode_vs_memcpy": self.copy / decode["ours"],
        }


def entropy_bound(before: Images, after: Images) -> tuple[int, float]:
    """Weights that changed, and the bytes that their positions (uniform in each matrix) and steps need."""
    positions, seen = 0.0, np.zeros(1 << 16, np.int64)
    for name, old in before.items():
        steps = find(old, after[name], BF16).steps
        positions += len(old) * entropy(np.array([len(steps), len(old) - len(steps)]))
        seen += np.bincount(steps, minlength=1 << 16)
    return int(seen.sum()), (positions + seen.sum() * entropy(seen)) / 8


def entropy(counts: np.ndarray) -> float:
    """In bits."""
    share = counts[counts > 0] / counts.sum()
    return -float((share * np.log2(share)).sum())


def measure(before: Images, after: Images, threads: int, clock: Callable[[], float], rounds: int) -> Case:
    sides = {name: side(before, after) for name, side in SIDES.items()}
    objects = {name: side.encode(threads) for name, side in sides.items()}
    taken: dict[str, dict[str, list[float]]] = {what: {name: [] for name in sides} for what in ("encode", "decode")}
    image, copies = {name: bits.copy() for name, bits in before.items()}, []

    def timed(seconds: list[float], work: Callable[[], object]) -> None:
        start = clock()
        work()
        seconds.append(clock() - start)

    for turn in range(rounds):
        for name, side in sides.items():
            timed(taken["encode"][name], lambda side=side: side.encode(threads))
        for name, side in sides.items():
            timed(copies, lambda: copy(image, before, threads))
            timed(taken["decode"][name], lambda side=side, name=name: side.decode(threads, objects[name], image))
            if not turn:
                assert all(np.array_equal(image[key], bits) for key, bits in after.items()), name
    return Case(
        sum(map(len, before.values())),
        *entropy_bound(before, after),
        {name: sum(map(len, raws)) for name, raws in objects.items()},
        {what: {name: statistics.median(s) for name, s in by.items()} for what, by in taken.items()},
        statistics.median(copies),
    )


def copy(image: Images, before: Images, threads: int) -> None:
    list(pool(threads).map(np.copyto, image.values(), before.values()))


def show_cases(cases: Mapping[str, Case]) -> None:
    sides = " ".join(f"{side:>7}" for side in SIDES)
    print(f"\n{'':>8} {'':>7}  {'bytes per changed weight':^47}  {'x bound':^15}  {'ours x smaller than':^20}")
    print(f"{'':>8} {'share':>7}  {'bound':>7} {sides}  {'ours':>7} {'small':>7}  {'XOR':>6} {'int32':>6} {'dense':>6}")
    for name, case in cases.items():
        f = case.figures()
        each = " ".join(f"{size / case.changed:7.3f}" for size in (case.bound, *case.sizes.values()))
        print(
            f"{name:>8} {f['share']:7.3%}  {each}  {f['bound_ratio']:7.3f} {f['small_bound_ratio']:7.3f}  "
            f"{f['size_vs_xor_zstd']:6.2f} {f['size_vs_int32_bf16']:6.2f} {f['dense_ratio']:6.0f}"
        )
    print(
        f"\n{'':>8} {'':>7}  {'encode, GB/s of BF16':^39}  {'decode + apply, GB/s':^39}  {'ours x as fast as XOR':^21}"
    )
    print(f"{'':>8} {'copy':>7}  {sides}  {sides}  {'encode':>7} {'decode':>7} {'all':>5}  decode / copy rate")
    for name, case in cases.items():
        f = case.figures()
        rates = "  ".join(
            " ".join(f"{case.rate(t):7.2f}" for t in case.seconds[w].values()) for w in ("encode", "decode")
        )
        print(
            f"{name:>8} {case.rate(case.copy):7.2f}  {rates}  {f['encode_vs_xor_zstd']:7.2f} {f['decode_vs_xor_zstd']:7.2f} "
            f"{f['decode_vs_xor_zstd_whole']:5.1f}  "
            f"{f['decode_vs_memcpy']:.2f}",
            flush=True,
        )


def compare_formats(images: Sequence[Images], shapes: Mapping[str, tuple[int, int]], threads: int) -> dict[str, float]:
    """Bytes of the last image's delta in BF16 over those in each other format, matrices alone."""
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(FolderStore(folder), "bench", formats=FORMATS, threads=threads)
        for version, image in enumerate(images):
            weights = {name: from_bits(bits, BF16, shapes[name]) for name, bits in image.items()}
            published = publisher.publish(version, weights)
    bf16 = published.streams["bf16"]
    print(f"\n{'format':>8} {'changed':>9} {'bytes':>11} {'of bound':>9} {'x smaller':>10}  whole streams of ", end="")
    print(", ".join(SHAPES))
    for name, stream in published.streams.items():
        share, more = stream.bytes / bf16.bytes, []
        for inside, outside in SHAPES.values():
            more.append((inside + outside) / (inside * share + outside))
        print(
            f"{name:>8} {stream.changed / stream.elements:9.4%} {stream.bytes:11,} {stream.bytes / stream.bound:9.3f} "
            f"{1 / share:10.1f}  {', '.join(f'{ratio:.1f}' for ratio in more)}",
            flush=True,
        )
    return {f"{name}_vs_bf16": bf16.bytes / published.streams[name].bytes for name in FORMATS[1:]}


class Counting(FolderStore):
    """A folder that counts the bytes that are read from it."""

    read = 0

    def get(self, key: str, max_bytes: int) -> bytes:
        data = super().get(key, max_bytes)
        self.read += len(data)
        return data


def fetched(folder: str, start: int, stop: int) -> tuple[int, int]:
    """Bytes that a subscriber at version ``start`` reads to get to ``stop``, and over how many links."""
    store = Counting(folder)
    subscriber = Subscriber(store, "bench")
    subscriber.fetch(start)
    before = store.read
    update = subscriber.fetch(stop)
    return store.read - before, update.links


def join(drift: float, threads: int) -> float:
    """What a joiner at version 0 fetches for version 128, over the bytes of the deltas on the way."""
    shapes = matrices(JOIN_WIDTH, 1)
    walks = {name: Walk(shape, [1e-6], drift, seed) for seed, (name, shape) in enumerate(shapes.items())}
    size = sum(rows * columns for rows, columns in shapes.values())
    chain = changed = 0
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder)
        publisher = Publisher(store, "bench", anchor_every=2 * SPAN, threads=threads)
        for step in range(WARM_UP + SPAN + 1):
            for walk in walks.values():
                if step:
                    walk.step()
            if step < WARM_UP:
                continue
            weights = {name: walk.masters[1e-6] for name, walk in walks.items()}
            stream = publisher.publish(step - WARM_UP, weights).streams["bf16"]
            chain, changed = chain + stream.bytes, changed + stream.changed
        every, links = fetched(folder, 0, SPAN)
        jumps = Compactor(store, "bench").step()
        print(
            f"\n{SPAN} steps of {size:,} weights, {changed / SPAN / size:.3%} changed in each: deltas of {chain:,} bytes, "
            f"{every:,} fetched over {links} links without jumps"
        )
        stored = sum(part.nbytes for jump in jumps for part in jump.delta)
        print(f"  {len(jumps)} jumps of {stored:,} bytes ({stored / chain:.2f} of the deltas)")
        ratios = {}
        for start, stop in ((0, SPAN), (1, SPAN - 1), (0, SPAN // 2), (0, SPAN // 8)):
            got, links = fetched(folder, start, stop)
            ratios[start, stop] = got / chain * SPAN / (stop - start)
            print(
                f"  {start:>3} to {stop:>3}: {got:,} bytes over {links} links, {ratios[start, stop]:.3f} of the deltas'"
            )
    return ratios[0, SPAN]


def publish_text_steps(args: argparse.Namespace) -> dict[str, float]:
    """Every version of a model in training; medians of the last half of them."""
    model = load(args.smollm2)
    size = sum(p.numel() for p in model.parameters())
    on_grid = all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    print(
        f"\n{args.smollm2.name}: {size:,} weights, masters {'begin' if on_grid else 'do not begin'} on BF16's grid; "
        f"{args.batch} x {args.length} tokens a step, lr 1e-6"
    )
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = FolderStore(scratch)
        publisher = Publisher(store, "bench", formats=TEXT_FORMATS, threads=args.threads)
        published = publisher.publish(0, model.state_dict())
        whole = ", ".join(f"{name} {stream.anchor_bytes:,}" for name, stream in published.streams.items())
        print(f"version 0, whole: {whole} bytes")
        losses = train_on_text(model, args.smollm2, args.batch, args.length)
        for version, loss in zip(range(1, args.steps + 1), losses, strict=False):
            published = publisher.publish(version, model.state_dict())
            rows.append(text_figures(published, store, size))
            show_text(version, loss, rows[-1])
    return {key: statistics.median(row[key] for row in rows[len(rows) // 2 :]) for key in rows[0]}


def text_figures(published: Published, store: FolderStore, size: int) -> dict[str, float]:
    streams = History(store, "bench", Seal(None)).find(published.version).manifest.streams
    shared = set.intersection(*(set(stream.delta) for stream in streams.values()))
    matrices = {name: sum(p.nbytes for p in stream.delta if p not in shared) for name, stream in streams.items()}
    figures: dict[str, float] = {"shared_bytes": sum(part.nbytes for part in shared)}
    for name, stream in published.streams.items():
        figures |= {
            f"{name}_share": stream.changed / stream.elements,
            f"{name}_bytes": stream.bytes,
            f"{name}_bound_ratio": stream.bytes / stream.bound,
            f"{name}_dense_ratio": 2 * size / stream.bytes,
            f"{name}_matrix_bytes": matrices[name],
            f"{name}_matrices_vs_bf16": matrices["bf16"] / max(1, matrices[name]),
        }
    return figures


def show_text(version: int, loss: float, figures: Mapping[str, float]) -> None:
    columns = {
        "share": "8.4%", "bytes": "10,", "dense_ratio": "7.1f", "matrix_bytes": "10,", "matrices_vs_bf16": "7.1f",
    }  # fmt: skip
    if version == 1:
        print("version   loss   " + "   ".join(f"{key} in {', '.join(TEXT_FORMATS)}" for key in columns))
    cells = (" ".join(format(figures[f"{n}_{key}"], form) for n in TEXT_FORMATS) for key, form in columns.items())
    print(f"{version:>7} {loss:6.3f}   {'   '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("codec", "formats", "join", "smollm2"))
    parser.add_argument("--params", type=float, default=110e6, help="weights of codec and formats, about")
    parser.add_argument("--width", type=int, default=2048, help="of their layers")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drift", type=float, default=0.1, help="spread of gradients' means, in their noise")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="of the model that the part smollm2 trains")
    parser.add_argument("--steps", type=int, default=24, help="of smollm2")
    parser.add_argument("--batch", type=int, default=4, help="of smollm2")
    parser.add_argument("--length", type=int, default=128, help="of smollm2's sequences, in tokens")
    args = parser.parse_args()
    parts = args.parts or ["codec", "formats", "join"] + ["smollm2"] * (args.smollm2 is not None)
    if "smollm2" in parts and args.smollm2 is None:
        parser.error("the part smollm2 needs --smollm2 FOLDER")
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    shapes = matrices(args.width, max(1, round(args.params / (LAYER_SIZE * args.width**2))))
    size = sum(rows * columns for rows, columns in shapes.values())
    results: dict[str, object] = {"weights": size, "threads": args.threads, "drift": args.drift}
    if {"codec", "formats"} & set(parts):
        rates = RATES | SHARES if "codec" in parts else {"lr 1e-6": 1e-6}
        keep = {(rate, step) for rate in rates.values() for step in (WARM_UP, WARM_UP + 1)} | {(1e-6, 0)}
        images = train(shapes, list(rates.values()), args.drift, keep)
        print(
            f"{len(shapes)} matrices, {size:,} weights; step {WARM_UP + 1}, drift {args.drift:g}, {args.threads} threads"
        )
        if "codec" in parts:
            cases = {
                name: measure(images[rate, WARM_UP], images[rate, WARM_UP + 1], args.threads, clock, args.rounds)
                for name, rate in rates.items()
            }
            show_cases(cases)
            results |= codec_results(cases)
        if "formats" in parts:
            results |= compare_formats([images[1e-6, step] for step in (0, WARM_UP, WARM_UP + 1)], shapes, args.threads)
        del images
        gc.collect()
    if "join" in parts:
        results["join_vs_chain"] = join(args.drift, args.threads)
    if "smollm2" in parts:
        results["smollm2"] = publish_text_steps(args)
    print(json.dumps(rounded(results)))


def codec_results(cases: Mapping[str, Case]) -> dict[str, object]:
    figures = {name: case.figures() for name, case in cases.items()}
    one, tenth = figures["1 %"], figures["0.1 %"]
    return {
        "bound_ratio": {name: figures[name]["bound_ratio"] for name in SHARES},
        "dense_ratio": {name: figures[name]["dense_ratio"] for name in RATES},
        **{f"size_vs_{peer}": one[f"size_vs_{peer}"] for peer in ("xor_zstd", "int32_bf16")},
        **{f"{what}_vs_xor_zstd": one[f"{what}_vs_xor_zstd"] for what in ("encode", "decode")},
        "decode_vs_xor_zstd_whole": one["decode_vs_xor_zstd_whole"],
        "decode_vs_memcpy": tenth["decode_vs_memcpy"],
        "cases": figures,
    }


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
