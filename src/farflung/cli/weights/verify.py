"""farflung weights verify: whether a store holds what was published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_run, at_least, open_place

if TYPE_CHECKING:
    from farflung.cli.weights.place import Place
    from farflung.weights.verify import Verdict

SHOWN = 20
"""Orphans that are listed by name."""

DESCRIPTION = """Read everything that a run's pointer leads to: signatures, hashes, and whether every delta, whole copy and jump leads to
the weights that were published. Each fault is named with the object and what mends it, and the exit code is then 1. What
nothing names is listed as an orphan: of a publisher that died, or of one at work now. Memory holds one format's weights.
Nothing is written; publishing, pruning and sampling may go on meanwhile."""
EXAMPLES = """  farflung weights verify runs/my
  farflung weights verify /shared/weights --run-id r1 --key-file token --last 20
  farflung weights verify http://mirror:8300 --run-id r1 --token-file token        what a mirror hands out
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights verify", DESCRIPTION, EXAMPLES)
    add_run(parser)
    parser.add_argument("--last", type=int, metavar="N", help="the newest N versions and what they need (all)")
    args = parser.parse_args(argv)
    at_least(args.last, 1, "--last")
    place = open_place(args, "verify")

    from rich.console import Console

    from farflung.weights.verify import verify

    with Console(stderr=True).status("reading the versions") as status:

        def progress(done: int, total: int, what: str) -> None:
            status.update(f"{done} of {total}: {what}")

        verdict = verify(place.history(), last=args.last, orphans=not place.address.mirror, progress=progress)
    _print(place, verdict)
    return 1 if verdict.faults else 0


def _print(place: Place, verdict: Verdict) -> None:
    from rich.filesize import decimal

    for fault in verdict.faults:
        print(f"fault   {fault.where}: {fault.what}\n        → {fault.mend}")
    orphans = verdict.orphans or ()
    for key in orphans[:SHOWN]:
        print(f"orphan  {key}")
    if len(orphans) > SHOWN:
        print(f"orphan  ... and {len(orphans) - SHOWN} more")
    if orphans:
        print("        → if no publisher is at work, farflung weights gc removes objects among them after six hours")
    strays = "orphans not looked for" if verdict.orphans is None else f"{len(orphans)} orphans"
    seen = f"{verdict.versions} versions, {verdict.jumps} jumps, {verdict.objects} objects ({decimal(verdict.nbytes)})"
    print(f"run {place.run}: {seen}; {len(verdict.faults)} faults, {strays}")
    if place.key is None:
        print("signatures were not looked at" if place.signed else "the run is not signed")
