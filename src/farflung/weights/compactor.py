"""Jumps: many deltas folded into one, so that a reader who is far behind needs few objects.

Version v gets a jump from v - 2^j for every j with 2^j dividing v, up to j = ``levels``. Then any version is reached from
any earlier one over at most 2 log2 of their distance links, and beyond 2^levels over one more for each 2^levels. Steps
cancel and positions repeat, so a jump is smaller than what it replaces. It is made from deltas alone, without the weights,
by anyone who may write to the store, at any time after its version; nobody waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change
from farflung.weights.history import Detour, History, Link, Version
from farflung.weights.manifest import Jump, Part, Seal, jump_key, name_part, object_key, read_jump, read_part
from farflung.weights.schema import Schema, groups
from farflung.weights.store import Conflict, Missing, Store

log = logging.getLogger(__name__)

LEVELS = 7
"""Up to 128 versions at a stride."""


class Compactor:
    """Makes the jumps of a run's versions as they come. One at a time is enough; two do no harm.

    It begins 2^``levels`` versions before the newest, which is what one that was stopped may have left to do, or at
    version ``first``. ``skipped``: what could not be read on the way, each said once. Jumps are made of what else there is; those
    that need it are left out.
    """

    def __init__(
        self, store: Store, run: str, *, key: bytes | None = None, levels: int = LEVELS, first: int | None = None
    ) -> None:
        if not 1 <= levels <= 30:
            raise BadInput(f"{levels} levels; 1 to 30 make sense", where="compactor")
        self._history = History(store, run, Seal(key))
        self._levels = levels
        self._done = None if first is None else max(0, first - 1)
        self.skipped: list[str] = []

    def step(self) -> list[Jump]:
        """Make what is missing up to the newest version, oldest first. Raises StoreError, and Corrupt for a bad pointer."""
        return list(self.jumps())

    def jumps(self) -> Iterator[Jump]:
        """As ``step``, each jump when it is stored. One who stops in the middle has lost nothing."""
        newest = self._history.newest()
        if newest is None:
            return
        if self._done is None:
            self._done = max(0, newest.number - (1 << self._levels))
        for number in range(self._done + 1, newest.number + 1):
            yield from self._jumps(number, newest)
            self._done = number

    def _jumps(self, number: int, newest: Version) -> Iterator[Jump]:
        try:
            version = self._history.earlier(number, newest)
        except Missing:
            return  # pruned
        except Corrupt as error:
            self._skip(error)
            return
        for format in version.manifest.streams:
            for level in range(1, self._levels + 1):
                if number % (1 << level):
                    break
                detour = Detour(self._history)
                try:
                    jump, there = detour.tried(partial(self._make, number, newest, format, 1 << level, detour))
                except Missing:
                    break  # pruned meanwhile
                except Corrupt as error:
                    self._skip(error)
                    continue
                finally:
                    if detour.met is not None:
                        self._skip(detour.met)
                if jump is not None:
                    yield jump
                elif not there:
                    break

    def _make(self, number: int, newest: Version, format: str, span: int, detour: Detour) -> tuple[Jump | None, bool]:
        """The jump if it is new, and whether there is one now."""
        history = self._history
        if read_jump(history.store, history.run, format, number, span, history.seal) is not None:
            return None, True
        jump = make_jump(history, history.earlier(number, newest), format, span, detour)
        return jump, jump is not None

    def _skip(self, error: Corrupt) -> None:
        if str(error) not in self.skipped:
            self.skipped.append(str(error))
            log.warning("not jumped over: %s", str(error))


def make_jump(history: History, version: Version, format: str, span: int, detour: Detour) -> Jump | None:
    """Fold the links of a span into one and store it; None when some of them are gone or the schema changed on the way."""
    links = detour.links(version.number - span, version, format)
    if links is None:
        return None
    schema = Schema.decode(read_part(history.store, history.run, links[0].schema), "schema")
    changed, parts = 0, []
    for changes in _folded(history, links, schema, detour):
        encoded = delta.encode(changes, schema)
        part = replace(name_part(encoded.raw), first=changes[0].piece)
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


def _folded(history: History, links: Sequence[Link], schema: Schema, detour: Detour) -> Iterator[list[Change]]:
    """Groups of pieces with all that became of them, in order. Memory holds one group's changes of every link."""
    rows = [_Changes(history, link, schema, detour) for link in links]
    for numbers in groups(schema):
        group = delta.fold_all([row.take(numbers[-1]) for row in rows], schema)
        changes = [group[number] for number in sorted(group) if not _cancelled(group[number])]
        if changes:
            yield changes


class _Changes:
    """A link's changes in order of their pieces, of which one object's are decoded at a time."""

    def __init__(self, history: History, link: Link, schema: Schema, detour: Detour) -> None:
        self._history, self._parts, self._schema = history, list(link.parts), schema
        self._detour, self._jumps = detour, link.jumps
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
        with self._detour.blaming(self._jumps):
            raw = read_part(self._history.store, self._history.run, part)
            return delta.decode(raw, self._schema, where=f"object {object_key(self._history.run, part)}")


def _cancelled(change: Change) -> bool:
    return isinstance(change.content, Changes) and not len(change.content)
