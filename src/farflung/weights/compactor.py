"""Jumps: many deltas folded into one, so that a reader who is far behind needs few objects.

Version v gets a jump from v - 2^j for every j with 2^j dividing v, up to j = ``levels``. Then any version is reached from
any earlier one over at most 2 log2 of their distance links, and beyond 2^levels over one more for each 2^levels. Steps
cancel and positions repeat, so a jump is smaller than what it replaces. It is made from deltas alone, without the weights,
by anyone who may write to the store, at any time after its version; nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from farflung.core.errors import BadInput
from farflung.weights import delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change
from farflung.weights.history import History, Link, Version
from farflung.weights.manifest import Jump, Part, Seal, jump_key, name_part, object_key, read_jump, read_part
from farflung.weights.schema import Schema, groups
from farflung.weights.store import Conflict, Missing, Store

LEVELS = 7
"""Up to 128 versions at a stride."""


class Compactor:
    """Makes the jumps of a run's versions as they come. One at a time is enough; two do no harm."""

    def __init__(self, store: Store, run: str, *, key: bytes | None = None, levels: int = LEVELS) -> None:
        if not 1 <= levels <= 30:
            raise BadInput(f"{levels} levels; 1 to 30 make sense", where="compactor")
        self._history = History(store, run, Seal(key))
        self._levels = levels
        self._done = 0

    def step(self) -> list[Jump]:
        """Make what is missing up to the newest version, oldest first. Raises Corrupt, StoreError."""
        return list(self.jumps())

    def jumps(self) -> Iterator[Jump]:
        """As ``step``, each jump when it is stored. One who stops in the middle has lost nothing."""
        newest = self._history.newest()
        if newest is None:
            return
        for number in range(self._done + 1, newest.number + 1):
            yield from self._history.afresh(partial(self._jumps, number))
            self._done = number

    def _jumps(self, number: int) -> list[Jump]:
        try:
            version = self._history.find(number)
        except Missing:
            return []  # pruned
        return [jump for format in version.manifest.streams for jump in self._make(version, format)]

    def _make(self, version: Version, format: str) -> Iterator[Jump]:
        for level in range(1, self._levels + 1):
            span = 1 << level
            if version.number % span:
                return
            history = self._history
            if read_jump(history.store, history.run, format, version.number, span, history.seal) is None:
                jump = make_jump(history, version, format, span)
                if jump is None:
                    return
                yield jump


def make_jump(history: History, version: Version, format: str, span: int) -> Jump | None:
    """Fold the links of a span into one and store it; None when some of them are gone or the schema changed on the way."""
    links = history.links(version.number - span, version, format)
    if links is None:
        return None
    schema = Schema.decode(read_part(history.store, history.run, links[0].schema), "schema")
    changed, parts = 0, []
    for changes in _folded(history, links, schema):
        encoded = delta.encode(changes, schema)
        part = name_part(encoded.raw)
        history.store.put(object_key(history.run, part), encoded.raw)
        changed += encoded.changed
        parts.append(part)
    jump = Jump(history.run, format, version.number, span, links[0].before, links[-1].root, changed, tuple(parts))
    try:
        history.store.put(jump_key(history.run, format, version.number, span), history.seal.sign(jump.encode()))
    except Conflict:
        # Another compactor, whose zstd packs differently, was first: its jump leads to the same root.
        return read_jump(history.store, history.run, format, version.number, span, history.seal)
    return jump


def _folded(history: History, links: Sequence[Link], schema: Schema) -> Iterator[list[Change]]:
    """Groups of pieces with all that became of them, in order. Memory holds one group's changes of every link."""
    rows = [_Changes(history, link.parts, schema) for link in links]
    for numbers in groups(schema, range(len(schema.pieces))):
        group: dict[int, Change] = {}
        for row in rows:
            for change in row.take(numbers[-1]):
                before = group.get(change.piece)
                kind = schema.pieces[change.piece].kind
                group[change.piece] = change if before is None else delta.fold(before, change, kind)
        changes = [group[number] for number in sorted(group) if not _cancelled(group[number])]
        if changes:
            yield changes


class _Changes:
    """A link's changes in order of their pieces, of which one object's are decoded at a time."""

    def __init__(self, history: History, parts: Sequence[Part], schema: Schema) -> None:
        self._history, self._parts, self._schema = history, list(parts), schema
        self._ahead: list[Change] = []

    def take(self, last: int) -> Iterator[Change]:
        """The next ones, up to piece ``last``."""
        while self._ahead or self._parts:
            if not self._ahead:
                self._ahead = self._decode(self._parts.pop(0))
            taken = [change for change in self._ahead if change.piece <= last]
            self._ahead = self._ahead[len(taken) :]
            yield from taken
            if self._ahead:
                return

    def _decode(self, part: Part) -> list[Change]:
        raw = read_part(self._history.store, self._history.run, part)
        return delta.decode(raw, self._schema, where=f"object {object_key(self._history.run, part)}")


def _cancelled(change: Change) -> bool:
    return isinstance(change.content, Changes) and not len(change.content)
