"""farflung weights ls: the versions that a store holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_run, at_least, open_place, refuse_mirror
from farflung.core.errors import Corrupt, InfraError

if TYPE_CHECKING:
    from farflung.cli.weights.place import Place
    from farflung.weights.history import History, Version

DESCRIPTION = """List a run's newest versions. For each format: the bytes of its delta and the share of elements that it changes, the bytes
of a whole copy where there is one, and its jumps, each by the versions that it spans. Leases say which version a live
subscriber holds; what they hold is not pruned."""
EXAMPLES = """  farflung weights ls runs/my                        a run's folder
  farflung weights ls /shared/weights --run-id r1    a store with several runs, which is signed: FARFLUNG_TOKEN is set
  farflung weights ls runs/my --last 0 --json        all versions, for a program
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A version in one format; ``jumps``: their bytes by how many versions they span."""

    delta_bytes: int
    changed: int
    elements: int
    anchor_bytes: int
    jumps: Mapping[int, int]


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights ls", DESCRIPTION, EXAMPLES)
    add_run(parser)
    parser.add_argument("--last", type=int, default=10, metavar="N", help="how many versions; 0 for all (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    at_least(args.last, 0, "--last")
    place = open_place(args, "ls")
    refuse_mirror(place, "ls")
    history = place.history()
    newest = history.newest()
    assert newest is not None  # a run without a pointer is not opened
    entries: dict[int, dict[str, Entry]] = {}
    fault: Corrupt | None = None
    try:
        for version in islice(history.back(newest), args.last or None):
            entries[version.number] = _entries(history, version)
    except Corrupt as error:
        fault = error
    entries = dict(sorted(entries.items()))
    leases = _leases(place)
    if args.json:
        print(_json(place, newest.number, entries, leases))
    else:
        _print(place, newest.number, entries, leases)
    if fault is not None:
        print(f"farflung: {fault}; versions before it are not shown", file=sys.stderr)
    return 1 if fault else 0


def _entries(history: History, version: Version) -> dict[str, Entry]:
    from farflung.weights.manifest import read_jump

    found = {}
    for format, stream in version.manifest.streams.items():
        jumps = {}
        for ref in version.manifest.ancestors[1:]:
            span = version.number - ref.version
            try:
                jump = read_jump(history.store, history.run, format, version.number, span, history.seal)
            except Corrupt as error:
                print(f"farflung: {error}", file=sys.stderr)
                continue
            if jump is not None:
                jumps[span] = sum(part.nbytes for part in jump.delta)
        delta, anchor = (sum(part.nbytes for part in parts) for parts in (stream.delta, stream.anchor))
        found[format] = Entry(delta, stream.changed, stream.elements, anchor, jumps)
    return found


def _leases(place: Place) -> dict[str, int] | None:
    """None where the store does not let itself be asked: its clock is read by writing to it."""
    from farflung.weights.retention import held

    try:
        return held(place.store, place.run)
    except InfraError:
        return None


def _json(
    place: Place, newest: int, entries: Mapping[int, Mapping[str, Entry]], leases: Mapping[str, int] | None
) -> str:
    versions = [
        {"version": number, "formats": {format: asdict(entry) for format, entry in formats.items()}}
        for number, formats in entries.items()
    ]
    return json.dumps(
        {"run": place.run, "newest": newest, "signed": place.signed, "versions": versions, "leases": leases}, indent=1
    )


def _print(
    place: Place, newest: int, entries: Mapping[int, Mapping[str, Entry]], leases: Mapping[str, int] | None
) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("version", "format", "delta", "changed", "whole", "jumps"):
        table.add_column(name, justify="left" if name in ("format", "jumps") else "right", no_wrap=name != "jumps")
    for number, formats in entries.items():
        for format, entry in formats.items():
            share = f"{100 * entry.changed / max(1, entry.elements):.2f} %"
            whole = decimal(entry.anchor_bytes) if entry.anchor_bytes else ""
            jumps = ", ".join(f"{span}: {decimal(size)}" for span, size in entry.jumps.items())
            table.add_row(str(number), format, decimal(entry.delta_bytes), share, whole, jumps)
    console = Console()
    console.print(table, highlight=False)
    who = "not known" if leases is None else ", ".join(f"{name} at {v}" for name, v in leases.items()) or "none"
    state = "signed" if place.signed else "not signed"
    console.print(f"run {place.run}, newest version {newest}, {state}; leases: {who}", highlight=False, markup=False)
