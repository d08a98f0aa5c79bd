"""From a section of this version and of the last one to objects: compared, encoded and stored, groups of pieces side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from farflung.weights import delta
from farflung.weights.changes import Room
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import digest
from farflung.weights.manifest import Part
from farflung.weights.schema import PIECE_BYTES, Schema, groups
from farflung.weights.streams import Section
from farflung.weights.workers import Workers

KEPT_BYTES = 32 << 20
"""What a room for changes may have taken to be kept: those of a group of which a sixth changed."""


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
        for hashes, *objects, changed, bound in ranks:
            parts, anchor, small = ([Part(*part) for part in listed] for listed in objects)
            work.add(Work([bytes.fromhex(hash) for hash in hashes], parts, anchor, small, changed, bound))
        return work

    def add(self, more: Work) -> None:
        """The work on the pieces that follow."""
        self.hashes += more.hashes
        self.parts += more.parts
        self.anchor += more.anchor
        self.small += more.small
        self.changed += more.changed
        self.bound += more.bound


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


class Encoder:
    """Threads, each with room for what changed, which stays for the next section unless much was written: memory is there then."""

    def __init__(self, threads: int) -> None:
        self._workers = Workers(threads)
        self._rooms = SimpleQueue[Room]()
        for _ in range(threads):
            self._rooms.put(Room(PIECE_BYTES))

    def encode(self, job: Job, put: Callable[[bytes], Part]) -> Work:
        """The job's objects, stored by ``put``, which is called from several threads."""
        numbers, section, pieces = job.numbers, job.section, job.schema.pieces
        overlaps = (range(max(g.start, numbers.start), min(g.stop, numbers.stop)) for g in groups(job.schema))
        cut = [group for group in overlaps if len(group)]

        def changed(group: range) -> Work:
            room = self._rooms.get()
            room.clear()
            try:
                return _changed(job, group, put, room)
            finally:
                self._rooms.put(room if room.nbytes <= KEPT_BYTES else Room(PIECE_BYTES))

        if job.before is None or job.hashes is None:
            work = Work(self._workers.all(lambda number: digest(section.bits(pieces[number])), numbers))
        else:
            work = Work([])
            for one in self._workers.all(changed, cut):
                work.add(one)
        if job.whole:
            work.anchor = self._workers.all(lambda group: _whole(job, group, work.hashes, put), cut)
        return work


def _changed(job: Job, group: range, put: Callable[[bytes], Part], room: Room) -> Work:
    """What changed in some pieces."""
    assert job.before is not None
    assert job.hashes is not None
    schema, first = job.schema, job.numbers.start
    work = Work(list(job.hashes[group.start - first : group.stop - first]))
    changes: list[Change] = []
    for number in group:
        piece = schema.pieces[number]
        change = delta.compare(number, piece, job.before.bits(piece), job.section.bits(piece), room)
        if change is not None:
            changes.append(change)
            work.hashes[number - group.start] = change.after
    if changes:
        encoded = delta.encode(changes, schema)
        work.parts = [replace(put(encoded.raw), first=changes[0].piece)]
        work.changed, work.bound = encoded.changed, encoded.bound
    if changes and job.small:
        pieces = [(change, schema.pieces[change.piece]) for change in changes]
        ranked = [delta.smaller(change, piece, job.before.bits(piece)) for change, piece in pieces]
        work.small = [replace(put(delta.encode(ranked, schema).raw), first=changes[0].piece)]
    return work


def _whole(job: Job, group: range, hashes: Sequence[bytes], put: Callable[[bytes], Part]) -> Part:
    """Some pieces as they are."""
    pieces = ((number, hashes[number - job.numbers.start], job.schema.pieces[number]) for number in group)
    changes = [Change(number, hash, Whole(job.section.bits(piece))) for number, hash, piece in pieces]
    return replace(put(delta.encode(changes, job.schema).raw), first=group.start)
