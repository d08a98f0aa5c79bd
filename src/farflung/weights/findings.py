"""What verification reads, each object once and checked against its name, and what it finds wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from farflung.core.errors import Corrupt
from farflung.weights import delta
from farflung.weights.delta import Change
from farflung.weights.history import History
from farflung.weights.manifest import Gone, Part, object_key, read_part
from farflung.weights.schema import Schema

THREADS = 4
BRING_BACK = "bring it back from a copy of the store or a mirror's cache: any file whose SHA-256 is its name is right"
NEXT_ANCHOR = "the publisher stored it so; versions are right again from the next whole copy on"


class Pruned(Exception):
    """What is looked at was pruned meanwhile."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` is wrong with ``where``, and how to mend it."""

    where: str
    what: str
    mend: str


@dataclass
class Findings:
    """``read``: bytes of sound objects by hash; ``complete``: all that names objects was read."""

    history: History
    faults: list[Fault] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    _schemas: dict[str, Schema] = field(default_factory=dict)

    def note(self, fault: Fault) -> None:
        if not any((known.where, known.what) == (fault.where, fault.what) for known in self.faults):
            self.faults.append(fault)  # formats share objects

    def fault(self, error: Corrupt, mend: str) -> None:
        self.note(Fault(error.where, error.what, error.mend or mend))

    def missing(self, where: str, owner: str, mend: str) -> None:
        """A fault, unless what names it went too."""
        if not self.history.store.exists(owner):
            raise Pruned
        self.note(Fault(where, "it is needed and not there", mend))

    def schema(self, part: Part, owner: str) -> Schema | None:
        """Read and checked, None when it is not sound, which is noted. ``owner``: the key of what names it."""
        if part.sha256 in self._schemas:
            return self._schemas[part.sha256]
        where = f"schema {object_key(self.history.run, part)}"
        try:
            raw = read_part(self.history.store, self.history.run, part)
            self.read[part.sha256] = part.nbytes
            self._schemas[part.sha256] = Schema.decode(raw, where)
            return self._schemas[part.sha256]
        except Gone:
            self.missing(where, owner, BRING_BACK)
        except Corrupt as error:
            self.fault(error, BRING_BACK)
        return None

    def decoded(
        self, parts: Sequence[Part], schema: Schema, owner: str, mend: str = BRING_BACK, *, ranked: bool = False
    ) -> Iterator[tuple[Part, list[Change] | None]]:
        """Each object with its changes, or with None when it is not sound, which is noted. A few are read at a time.

        ``owner``: the key of what names them.
        """
        run, seen = self.history.run, set[int]()

        def read(part: Part) -> list[Change] | Corrupt:
            where = f"object {object_key(run, part)}"
            try:
                return delta.decode(read_part(self.history.store, run, part), schema, where=where, ranked=ranked)
            except Corrupt as error:
                return error

        with ThreadPoolExecutor(THREADS) as pool:
            for at in range(0, len(parts), THREADS):
                batch = parts[at : at + THREADS]
                for part, found in zip(batch, pool.map(read, batch), strict=True):
                    if isinstance(found, Gone):
                        self.missing(f"object {object_key(run, part)}", owner, mend)
                        yield part, None
                    elif isinstance(found, Corrupt):
                        self.fault(found, mend)
                        yield part, None
                    elif seen & (pieces := {change.piece for change in found}) or len(pieces) < len(found):
                        what = "it holds a piece a second time"
                        self.note(Fault(f"object {object_key(run, part)}", what, NEXT_ANCHOR))
                        yield part, None
                    else:
                        seen |= pieces
                        self.read[part.sha256] = part.nbytes
                        yield part, found
