"""From a section of this version and of the last one to objects: compared, encoded and stored, groups of pieces side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from farflung.weights import delta
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import digest
from farflung.weights.manifest import Part
from farflung.weights.schema import Schema, groups
from farflung.weights.streams import Section


@dataclass(slots=True)
class Work:
    """What a section came to: hashes of all its pieces, objects, and what changed."""

    hashes: list[bytes]
    parts: list[Part] = field(default_factory=list)
    anchor: list[Part] = field(default_factory=list)
    small: list[Part] = field(default_factory=list)
    changed: int = 0
    bound: float = 0.0

    def data(self) -> list[Any]:
        """As plain data, for the other ranks."""
        parts = [
            [[part.sha256, part.nbytes, part.first] for part in parts]
            for parts in (self.parts, self.anchor, self.small)
        ]
        return [[hash.hex() for hash in self.hashes], *parts, self.changed, self.bound]

    @staticmethod
    def of(ranks: Sequence[Sequence[Any]]) -> Work:
        """All ranks' work on a section, in the order of ranks."""
        work = Work([])
        for hashes, parts, anchor, small, changed, bound in ranks:
            work.hashes += [bytes.fromhex(hash) for hash in hashes]
            work.parts += [Part(*part) for part in parts]
            work.anchor += [Part(*part) for part in anchor]
            work.small += [Part(*part) for part in small]
            work.changed += changed
            work.bound += bound
        return work


@dataclass(frozen=True, slots=True)
class Job:
    """A section, and what it was in the last version with the hashes of its pieces (None: it was not there).

    Its pieces have the ``numbers`` in the schema. ``whole``: store all of them as they are, too; ``small``: and what changed in
    fewer bytes.
    """

    section: Section
    before: Section | None
    hashes: Sequence[bytes] | None
    schema: Schema
    numbers: range
    whole: bool
    small: bool = False


def encode_section(job: Job, put: Callable[[bytes], Part], threads: int) -> Work:
    """The job's objects, stored by ``put``, which is called from several threads."""
    section, before, schema, numbers = job.section, job.before, job.schema, job.numbers
    overlaps = (range(max(g.start, numbers.start), min(g.stop, numbers.stop)) for g in groups(schema))
    cut = [group for group in overlaps if len(group)]

    def keep(raw: bytes, first: int) -> Part:
        return replace(put(raw), first=first)

    def delta_of(group: Sequence[int]) -> tuple[list[Change], Part | None, Part | None, int, float]:
        assert before is not None
        changes: list[Change] = []
        for number in group:
            piece = schema.pieces[number]
            change = delta.compare(number, piece, before.bits(piece), section.bits(piece))
            if change is not None:
                changes.append(change)
        if not changes:
            return [], None, None, 0, 0.0
        encoded, small = delta.encode(changes, schema), None
        if job.small:
            pieces = [(change, schema.pieces[change.piece]) for change in changes]
            ranked = [delta.smaller(change, piece, before.bits(piece)) for change, piece in pieces]
            small = keep(delta.encode(ranked, schema).raw, changes[0].piece)
        return changes, keep(encoded.raw, changes[0].piece), small, encoded.changed, encoded.bound

    def whole_of(group: Sequence[int]) -> Part:
        changes = [Change(n, work.hashes[n - numbers.start], Whole(section.bits(schema.pieces[n]))) for n in group]
        return keep(delta.encode(changes, schema).raw, group[0])

    with ThreadPoolExecutor(threads) as pool:
        if before is None or job.hashes is None:
            pieces = (schema.pieces[number] for number in numbers)
            work = Work(list(pool.map(lambda piece: digest(section.bits(piece)), pieces)))
        else:
            work = Work(list(job.hashes))
            for changes, part, small, changed, bound in pool.map(delta_of, cut):
                for change in changes:
                    work.hashes[change.piece - numbers.start] = change.after
                if part is not None:
                    work.parts.append(part)
                if small is not None:
                    work.small.append(small)
                work.changed += changed
                work.bound += bound
        if job.whole:
            work.anchor = list(pool.map(whole_of, cut))
    return work
