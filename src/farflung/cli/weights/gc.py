"""farflung weights gc: remove old versions."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_run, at_least, open_place, refuse_mirror

DESCRIPTION = """Remove old versions from a store. The newest N stay, and so do those of the last ten minutes and all that a live
subscriber holds, down to the whole copy that they start from. Leases that nobody renewed go, and objects that nothing names,
once they are old enough. Publishing and sampling may go on meanwhile."""
EXAMPLES = """  farflung weights gc runs/my --keep 10 --dry-run      what would go?
  farflung weights gc runs/my --keep 10
  farflung weights gc runs/my --keep 1 --live-seconds 0 --orphan-hours 0      only while nobody publishes or follows
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights gc", DESCRIPTION, EXAMPLES)
    add_run(parser)
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="how many of the newest versions stay")
    parser.add_argument(
        "--live-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="how long a lease counts after it was last renewed (subscribers renew it every minute); versions and objects that are "
        "younger stay, too "
        "(%(default)g)",
    )
    parser.add_argument(
        "--orphan-hours",
        type=float,
        default=6.0,
        metavar="H",
        help="how long an object that nothing names may still belong to a version that is being published (%(default)g)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    args = parser.parse_args(argv)
    at_least(args.keep, 1, "--keep")
    at_least(args.live_seconds, 0, "--live-seconds")
    at_least(args.orphan_hours, 0, "--orphan-hours")
    place = open_place(args, "gc")
    refuse_mirror(place, "gc")

    from farflung.weights.retention import prune

    gone = prune(
        place.history(),
        args.keep,
        live_seconds=args.live_seconds,
        orphan_seconds=3600 * args.orphan_hours,
        dry_run=args.dry_run,
    )
    print(
        f"run {place.run}: {'would remove' if args.dry_run else 'removed'} {gone.versions} versions, {gone.jumps} jumps, "
        f"{gone.objects} objects, {gone.leases} leases; the oldest version left is {gone.floor}"
    )
    return 0
