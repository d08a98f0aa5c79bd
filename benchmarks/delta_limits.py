"""What the weight codec's speed is made of: reading both images, hashing, coding; zstd, finding places, writing to them.

    python benchmarks/delta_limits.py [--shares 0.06 0.03 0.01 0.001] [--params 126e6] [--threads 1] [--rounds 15]

BF16 images of 12.6M elements each (random bits), of which a share moves by a few units in the last place. "compare": the loop
that finds changes, alone; "and hash": with xxh3-128 of each block while it is in the cache, as a publisher does; both in GB/s of
one image. "zstd": undoing the planes; "apply": from planes to weights changed in place, image after image, and "in cache", always
in the first one (25 MB): in ns per change, on one thread. Medians of rounds: processor time at one thread, wall time at more. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from farflung.weights.changes import Changes, Room, find
from farflung.weights.elements import Bits
from farflung.weights.planes import Bytes, Packed, Span, decompress, pack, unpack
from farflung.weights.streams import BF16

SIZE = 6144 * 2048


def median(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(rounds + 1):  # the first compiles, and finds its memory
        began = clock()
        work()
        taken.append(clock() - began)
    return statistics.median(taken[1:])


def look(before: Bits, after: Bits, room: Room, *, hashes: bool) -> Changes:
    room.clear()
    hasher = xxhash.xxh3_128()
    update = (lambda part: hasher.update(part.view(np.uint8).data)) if hashes else None
    return find(before, after, BF16, room=room, look=update)


def measure(images: list[tuple[Bits, Bits]], threads: int, rounds: int) -> dict[str, float]:
    clock = time.process_time if threads == 1 else time.perf_counter
    rooms = [Room(images[0][0].nbytes) for _ in range(threads)]

    def all_of(thread: int, hashes: bool) -> None:
        for before, after in images[thread::threads]:
            look(before, after, rooms[thread], hashes=hashes)

    nbytes = sum(before.nbytes for before, _ in images)
    result = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, hashes in (("compare_GBps", False), ("compare_and_hash_GBps", True)):
            seconds = median(lambda h=hashes: list(pool.map(all_of, range(threads), [h] * threads)), rounds, clock)
            result[name] = nbytes / seconds / 1e9
    coded = [coded_of(look(before, after, rooms[0], hashes=False)) for before, after in images]
    count = sum(len(packed) for packed, _ in coded)

    def undo() -> None:
        for _, planes in coded:
            for plane, size in planes:
                decompress(plane, size, "benchmark")

    def apply_all() -> None:
        for (packed, _), (before, _) in zip(coded, images, strict=True):
            packed.apply(before)

    def apply_again() -> None:
        for packed, _ in coded:
            packed.apply(images[0][0])

    parts = {"zstd_ns": undo, "apply_ns": apply_all, "apply_in_cache_ns": apply_again}
    return result | {name: 1e9 * median(part, rounds, time.process_time) / count for name, part in parts.items()}


def coded_of(changes: Changes) -> tuple[Packed, list[tuple[Bytes, int]]]:
    """An image's changes as they are before they are applied, and its planes under zstd with their sizes undone."""
    span = Span(SIZE, BF16, len(changes))
    planes, _ = pack([span], [changes])
    (packed,) = unpack(dict(planes), [span], "benchmark")
    sizes = {"control": len(packed.control)} | {f"low{i}": len(plane) for i, plane in enumerate(packed.low)}
    return packed, [(planes[name], size) for name, size in sizes.items() if size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.06, 0.03, 0.01, 0.001])
    parser.add_argument("--params", type=float, default=126e6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    result = {}
    for share in args.shares:
        images = []
        for _ in range(max(args.threads, round(args.params / SIZE))):
            before = rng.integers(0, 1 << 16, SIZE, dtype=np.uint16)
            steps = (rng.geometric(0.6, SIZE) * rng.choice([-1, 1], SIZE)).astype(np.int16).view(np.uint16)
            images.append((before, before + steps * (rng.random(SIZE, dtype=np.float32) < share)))
        one = result[f"{100 * share:g} %"] = measure(images, args.threads, args.rounds)
        print(
            f"{100 * share:g} %, {args.threads} threads: compare {one['compare_GBps']:.1f} GB/s, and hash "
            f"{one['compare_and_hash_GBps']:.1f} GB/s; zstd {one['zstd_ns']:.2f} ns a change, apply {one['apply_ns']:.2f} ns "
            f"({one['apply_in_cache_ns']:.2f} in cache)",
            flush=True,
        )
    print(
        json.dumps({"threads": args.threads} | {s: {k: round(v, 3) for k, v in r.items()} for s, r in result.items()})
    )


if __name__ == "__main__":
    main()
