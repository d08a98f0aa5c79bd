"""What stops the weight codec: the least that memory, hashing and zstd take, beside what XOR + zstd-1 takes, in one run.

    python benchmarks/delta_limits.py [--shares 0.06 0.03 0.01 0.001] [--params 126e6] [--threads 1] [--rounds 15]

BF16 images of 12.6M elements each (random bits), of which a share moves by a few units in the last place. All are done in turns,
over the same images, by the same threads:

    compare    the loop that finds changes, alone; "and hash": with xxh3-128 of each block while it is in the cache
    zstd       undoing the planes, alone
    touch      adding known steps at known places, alone: what memory takes for changing these elements
    copy       every image once
    apply      from the planes to changed weights
    XOR        encoding (with the same hash) and decoding (in chunks of 2 MB), as in delta.py

"encode": a third of XOR's time, over that of comparing and hashing; "decode": an eighth of XOR's time, over that of zstd and
the shorter of touching and applying (touching reads places from memory, applying works them out). Well below 1, three (eight) times
XOR's speed is out of reach here with these planes even if all else took no time. Medians of rounds:
processor time at one thread, wall time at more. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from delta_sides import Xor, pool

from farflung.weights import changes as sparse
from farflung.weights.changes import Changes, Room
from farflung.weights.elements import Bits
from farflung.weights.planes import Bytes, Packed, Span, decompress, pack, unpack
from farflung.weights.streams import BF16

SIZE = 6144 * 2048
ENCODE, DECODE = 3, 8
"""How many times as fast as XOR + zstd-1 is asked for."""


@dataclass(frozen=True)
class Sample:
    """Two images, a third one to change, and the changes: as found, as planes, and as planes under zstd with their sizes."""

    before: Bits
    after: Bits
    image: Bits
    changes: Changes
    packed: Packed
    coded: list[tuple[Bytes, int]]

    def look(self, room: Room, *, hashes: bool) -> None:
        room.clear()
        hasher = xxhash.xxh3_128()
        update = (lambda part: hasher.update(part.view(np.uint8).data)) if hashes else None
        sparse.find(self.before, self.after, BF16, room=room, look=update)

    def undo(self) -> None:
        for plane, size in self.coded:
            decompress(plane, size, "benchmark")


def sample(share: float, rng: np.random.Generator) -> Sample:
    before = rng.integers(0, 1 << 16, SIZE, dtype=np.uint16)
    steps = (rng.geometric(0.6, SIZE) * rng.choice([-1, 1], SIZE)).astype(np.int16).view(np.uint16)
    after = before + steps * (rng.random(SIZE, dtype=np.float32) < share)
    changes = sparse.find(before, after, BF16)
    span = Span(SIZE, BF16, len(changes))
    planes, _ = pack([span], [changes])
    (packed,) = unpack(dict(planes), [span], "benchmark")
    sizes = {"control": len(packed.control)} | {f"low{i}": len(plane) for i, plane in enumerate(packed.low)}
    return Sample(
        before, after, before.copy(), changes, packed, [(planes[name], size) for name, size in sizes.items() if size]
    )


def measure(samples: list[Sample], threads: int, rounds: int) -> dict[str, float]:
    clock = time.process_time if threads == 1 else time.perf_counter
    rooms = [Room(samples[0].before.nbytes) for _ in range(threads)]
    by_thread = [samples[thread::threads] for thread in range(threads)]
    images = {str(i): one.image for i, one in enumerate(samples)}
    peer = Xor(
        {str(i): one.before for i, one in enumerate(samples)}, {str(i): one.after for i, one in enumerate(samples)}
    )
    masks = peer.encode(threads)

    def over_all(work: Callable[[Sample, int], object]) -> Callable[[], object]:
        """On its threads, which are those of XOR."""

        def run(thread: int) -> None:
            for one in by_thread[thread]:
                work(one, thread)

        def all_threads() -> None:
            list(pool(threads).map(run, range(threads)))

        return all_threads

    works: dict[str, Callable[[], object]] = {
        "compare": over_all(lambda one, thread: one.look(rooms[thread], hashes=False)),
        "compare and hash": over_all(lambda one, thread: one.look(rooms[thread], hashes=True)),
        "XOR encode": lambda: peer.encode(threads),
        "zstd": over_all(lambda one, _: one.undo()),
        "touch": over_all(lambda one, _: sparse.apply(one.image, one.changes, BF16)),
        "copy": over_all(lambda one, _: np.copyto(one.image, one.before)),
        "apply": over_all(lambda one, _: one.packed.apply(one.image)),
        "XOR decode": lambda: peer.decode(threads, masks, images),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):  # the first one compiles, and finds its memory
        for name, work in works.items():
            began = clock()
            work()
            if turn:
                taken[name].append(clock() - began)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    return {f"{name} ms": 1e3 * each for name, each in seconds.items()} | {
        "encode": seconds["XOR encode"] / ENCODE / seconds["compare and hash"],
        "decode": seconds["XOR decode"] / DECODE / (seconds["zstd"] + min(seconds["touch"], seconds["apply"])),
    }


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
        samples = [sample(share, rng) for _ in range(max(args.threads, round(args.params / SIZE)))]
        count, nbytes = sum(len(one.changes) for one in samples), sum(one.before.nbytes for one in samples)
        one = result[f"{100 * share:g} %"] = measure(samples, args.threads, args.rounds)

        def rate(name: str, one: dict[str, float] = one, nbytes: int = nbytes) -> str:
            return f"{name} {nbytes / one[f'{name} ms'] / 1e6:.1f}"

        def each(name: str, one: dict[str, float] = one, count: int = count) -> str:
            return f"{name} {1e6 * one[f'{name} ms'] / count:.2f}"

        print(
            f"{100 * share:g} %, {args.threads} threads\n"
            f"  GB/s of an image: {', '.join(map(rate, ('compare', 'compare and hash', 'XOR encode', 'copy', 'XOR decode')))}\n"
            f"  ns a change: {', '.join(map(each, ('zstd', 'touch', 'apply')))}\n"
            f"  a third of XOR's time is {one['encode']:.2f} of comparing and hashing; "
            f"an eighth is {one['decode']:.2f} of zstd and touching or applying",
            flush=True,
        )
    print(
        json.dumps({"threads": args.threads} | {s: {k: round(v, 3) for k, v in r.items()} for s, r in result.items()})
    )


if __name__ == "__main__":
    main()
