"""What becomes of an image over one or several links, kept as the objects that came until their pieces are due.

Objects are some bytes for each changed element, and take several times that once they are decoded. Their tables say at once
which pieces change and what hashes these will have; the changes themselves are decoded group by group of pieces, used and
dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farflung.core.errors import Corrupt
from farflung.weights import changes as sparse
from farflung.weights import delta
from farflung.weights.changes import Changes
from farflung.weights.delta import WHOLE, Change, Content, Dense, Object
from farflung.weights.planes import Packed
from farflung.weights.schema import Piece, Schema, groups

Flat = npt.NDArray[np.int64]
"""Positions of elements in a tensor's flat array."""

Told = dict[int, Flat]
"""By piece, the elements of its tensor that changed in it."""

MOST_CHANGED = 1 / 16
"""Of a version's elements: where more may differ, an engine prepares most of its matrices whole, and positions take memory."""


class Staged:
    """Links' objects. ``after``: the hash that each changed piece has after all of them; ``whole``: whether any comes whole;
    ``changed``: elements, those that change in several links once for each; ``shortcut``: there may be plainer links."""

    def __init__(
        self, schema: Schema, links: Iterable[tuple[str, Iterable[Object]]], *, shortcut: bool = False
    ) -> None:
        """``links``: of each, what it is called and its objects. Raises Corrupt when two of a link hold the same piece."""
        self.after: dict[int, bytes] = {}
        self.whole = False
        self.changed = 0
        self.shortcut = shortcut
        numbers = list(groups(schema))
        firsts = [group.start for group in numbers]
        by_link: list[dict[int, list[Object]]] = []
        for name, objects in links:
            seen = 0
            by_group: dict[int, list[Object]] = {}
            after: dict[int, bytes] = {}
            for one in objects:
                seen += len(one.numbers)
                after.update(zip(one.numbers, one.hashes, strict=True))
                self.whole |= WHOLE in one.forms
                self.changed += sum(one.counts)
                # One or two: who publishes cuts objects where groups end.
                for group in sorted({bisect_right(firsts, number) - 1 for number in one.numbers}):
                    by_group.setdefault(group, []).append(one)
            if seen != len(after):
                raise Corrupt("two objects hold the same piece", where=name)
            self.after |= after
            by_link.append(by_group)
        due = sorted({group for by_group in by_link for group in by_group})
        self.groups = [
            Group(schema, numbers[group], [by_group.get(group, ()) for by_group in by_link]) for group in due
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """Some pieces, and by link the objects in which changes of them are."""

    schema: Schema
    numbers: range
    links: Sequence[Sequence[Object]]

    def changes(self) -> list[Change]:
        """What becomes of the group's pieces over all links, decoded now; of a single link as far as that it can be applied."""
        packed = len(self.links) == 1
        rows = (
            [c for one in objects for c in one.changes(packed=packed) if c.piece in self.numbers]
            for objects in self.links
        )
        return list(delta.fold_all(rows, self.schema).values())


def by_tensor(schema: Schema, told: Told) -> dict[str, Flat]:
    """Rising, under every name that a tensor has."""
    found: dict[str, list[Flat]] = {}
    for number in sorted(told):
        found.setdefault(schema.pieces[number].tensor, []).append(told[number])
    flat = {tensor: parts[0] if len(parts) == 1 else np.concatenate(parts) for tensor, parts in found.items()}
    return flat | {name: flat[owner] for name, owner in schema.tied.items() if owner in flat}


def changed_elements(content: Content, piece: Piece) -> Flat | None:
    """Of the piece's tensor; None for a piece that came whole."""
    match content:
        case Packed():
            return changed_elements(content.changes(), piece)
        case Changes(positions):
            return positions.astype(np.int64) + piece.start
        case Dense(steps):
            return sparse.find(np.zeros_like(steps), steps, piece.kind).positions.astype(np.int64) + piece.start
        case _:
            return None
