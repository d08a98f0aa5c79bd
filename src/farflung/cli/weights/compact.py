"""farflung weights compact: make the jumps of a run's versions."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_run, at_least, open_place, refuse_mirror
from farflung.core.errors import InfraError
from farflung.core.process import patience

if TYPE_CHECKING:
    from farflung.weights import Compactor

DESCRIPTION = """Fold deltas into jumps: version v gets one from v - 2, v - 4, v - 8 ... as far as these divide v. A sampler that is far
behind, or joins at a whole copy, then needs few objects, and fewer bytes. Jumps are made from deltas alone, need no
accelerator and no model, and nobody waits for them. One compactor for a run is enough; two do no harm."""
EXAMPLES = """  farflung weights compact runs/my                   what is missing now
  farflung weights compact runs/my --follow          and what will be, until Ctrl-C
  farflung weights compact s3://bucket/weights --run-id r1 --key-file token --levels 10 --follow --minutes 600
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights compact", DESCRIPTION, EXAMPLES)
    add_run(parser)
    parser.add_argument(
        "--levels", type=int, default=7, metavar="N", help="jumps span up to 2^N versions (%(default)s)"
    )
    parser.add_argument("--follow", action="store_true", help="go on as versions come, until Ctrl-C")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (%(default)g)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop following after this time")
    args = parser.parse_args(argv)
    at_least(args.interval, 0.05, "--interval")
    at_least(args.minutes, 0, "--minutes")
    place = open_place(args, "compact", signs=True)
    refuse_mirror(place, "compact")

    from farflung.weights import Compactor

    compactor = Compactor(place.store, place.run, key=place.key, levels=args.levels, first=1)
    if not args.follow:
        made = _once(compactor)
        for skipped in compactor.skipped:
            print(f"skipped: {skipped}")
        print(f"{made} jumps made" + (f", {len(compactor.skipped)} faults" if compactor.skipped else ""))
        return 1 if compactor.skipped else 0
    try:
        _follow(compactor, args.interval, float("inf") if args.minutes is None else 60 * args.minutes)
    except KeyboardInterrupt:
        print("stopped; every jump that was named is stored")
    return 0


def _once(compactor: Compactor) -> int:
    """Make what is missing and say each when it is stored."""
    made = 0
    for jump in compactor.jumps():
        size = sum(part.nbytes for part in jump.delta)
        print(f"{jump.format}: {jump.version - jump.span} to {jump.version}, {size} bytes", flush=True)
        made += 1
    return made


def _follow(compactor: Compactor, interval: float, seconds: float) -> None:
    """A store that fails is tried again, with pauses that grow to a minute."""
    deadline, pauses = time.monotonic() + seconds, patience(interval, 60.0)
    while True:
        pause = interval
        try:
            _once(compactor)
            pauses = patience(interval, 60.0)
        except InfraError as error:
            pause = next(pauses)
            print(f"farflung: {error}; next try in {pause:.0f} s", file=sys.stderr, flush=True)
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
