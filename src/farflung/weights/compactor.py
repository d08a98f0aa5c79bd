"""Jumps: many deltas folded into one, so that a reader who is far behind needs few objects.

Version v gets a jump from v - 2^j for every j with 2^j dividing v, up to a level. Then any version is reached from any
earlier one over at most 2 log2 of their distance objects, and from an anchor at a multiple of the widest over log2. Steps
cancel and positions repeat, so a jump is smaller than what it replaces. It is made from deltas alone, without the weights,
by anyone who may write to the store, at any time after its version; nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import changes as sparse
from farflung.weights import delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change, Dense, Whole
from farflung.weights.elements import ElementType
from farflung.weights.history import History, Link, Version
from farflung.weights.manifest import Jump, Part, Seal, jump_key, name_part, object_key, read_jump, read_part
from farflung.weights.schema import Schema
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
            try:
                version = self._history.find(number)
            except Missing:
                continue  # pruned
            for format in version.manifest.streams:
                yield from self._make(version, format)
            self._done = number

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


def fold(first: Changes | Dense | Whole, second: Changes | Dense | Whole, kind: ElementType) -> Changes | Dense | Whole:
    """Both, one after the other, as one. Neither is changed."""
    match first, second:
        case _, Whole():
            return second
        case Changes(), Changes():
            return sparse.fold(first, second, kind)
        case Changes(), Dense(steps):
            added = steps.copy()
            delta.apply(added, first, kind)
            return Dense(added)
        case Dense(steps), _:
            added = steps.copy()
            delta.apply(added, second, kind)
            return Dense(added)
        case Whole(bits), _:
            added = bits.copy()
            delta.apply(added, second, kind)
            return Whole(added)
    raise AssertionError("unreachable")


def _folded(history: History, links: Sequence[Link], schema: Schema) -> Iterator[list[Change]]:
    """Groups of pieces with all that became of them, in order. Memory holds one group's changes of every link.

    A version's objects hold pieces in rising order, and every version's groups are cut in the same places.
    """
    heads = [_Objects(history, link.parts, schema) for link in links]
    while any(head.changes for head in heads):
        last = max(change.piece for change in min((h.changes for h in heads if h.changes), key=lambda c: c[0].piece))
        group: dict[int, Change] = {}
        for head in heads:
            for change in head.take(last):
                before = group.get(change.piece)
                content = change.content
                if before is not None:
                    content = fold(before.content, content, schema.pieces[change.piece].kind)
                group[change.piece] = Change(change.piece, change.after, content)
        yield [group[number] for number in sorted(group) if not _nothing(group[number])]


class _Objects:
    """A link's objects, one decoded at a time."""

    def __init__(self, history: History, parts: Sequence[Part], schema: Schema) -> None:
        self._history, self._parts, self._schema = history, list(parts), schema
        self.changes: list[Change] = []
        self._next()

    def take(self, last: int) -> Iterator[Change]:
        """Changes of pieces up to ``last``."""
        while self.changes and self.changes[0].piece <= last:
            taken = [change for change in self.changes if change.piece <= last]
            self.changes = [change for change in self.changes if change.piece > last]
            yield from taken
            if not self.changes:
                self._next()

    def _next(self) -> None:
        while self._parts and not self.changes:
            part = self._parts.pop(0)
            where = f"object {object_key(self._history.run, part)}"
            try:
                raw = read_part(self._history.store, self._history.run, part)
            except Missing:
                raise Corrupt("a version needs it and it is not there", where=where) from None
            self.changes = delta.decode(raw, self._schema, where=where)


def _nothing(change: Change) -> bool:
    return isinstance(change.content, Changes) and not len(change.content)
