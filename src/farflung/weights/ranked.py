"""Changes told in the words of the weights that they change: smaller than the bound of positions without structure.

A step of the optimiser is about as large for all weights, and a unit in the last place of a BF16 weight doubles with its
exponent: so the smaller a weight, the likelier it changes. Both sides have the old weights. Elements are put into classes by
the exponent they had, and the positions of a class's changes count elements of that class alone, so that each class is coded
at its own density. It takes a pass over the old weights at either side, which plain changes do without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farflung.core.errors import Corrupt
from farflung.weights import kernels
from farflung.weights.changes import Changes
from farflung.weights.elements import Bits, Bytes

CLASSES = 16
"""Exponents from the largest down, the last class holds all that are smaller."""
WORTH_SIZE = 1 << 16
"""Pieces of fewer elements are left as they are: each class takes some bytes of its own."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranked:
    """By class: how many elements the piece has of it, and the changes at its elements, counted among themselves."""

    sizes: tuple[int, ...]
    classes: tuple[Changes, ...]

    def __len__(self) -> int:
        return sum(map(len, self.classes))


def rank(before: Bits, changes: Changes) -> Ranked:
    """Changes of a BF16 piece in the words of its old bits."""
    table = _classes(before)
    of = table[(before[changes.positions] >> 7) & 255]
    order = np.argsort(of, kind="stable")
    ends = np.cumsum(np.bincount(of, minlength=CLASSES))
    begins = np.concatenate([[0], ends[:-1]])
    if kernels.worth(len(before)):
        ranks, sizes = np.empty(len(changes), np.int32), np.zeros(CLASSES, np.int64)
        kernels.loops().rank(before, table, changes.positions, begins.copy(), ranks, sizes)
    else:
        found = [np.flatnonzero(table[(before >> 7) & 255] == c) for c in range(CLASSES)]
        sizes = np.array(list(map(len, found)))
        positions = changes.positions[order]
        ranks = np.concatenate(
            [np.searchsorted(at, positions[a:b]) for at, a, b in zip(found, begins, ends, strict=True)]
        ).astype(np.int32)
    steps = changes.steps[order]
    classes = tuple(Changes(ranks[a:b], steps[a:b]) for a, b in zip(begins, ends, strict=True))
    return Ranked(tuple(sizes.tolist()), classes)


def place(before: Bits, ranked: Ranked, where: str) -> Changes:
    """The way back. Raises Corrupt when the bits are not those that the changes were told of."""
    table = _classes(before)
    sizes = np.bincount(table[(before >> 7) & 255], minlength=CLASSES) if not kernels.worth(len(before)) else None
    counts = np.array([len(changes) for changes in ranked.classes])
    ranks = np.concatenate([changes.positions for changes in ranked.classes])
    steps = np.concatenate([changes.steps for changes in ranked.classes])
    ends = np.cumsum(counts)
    if sizes is None:
        sizes, positions = np.zeros(CLASSES, np.int64), np.empty(len(ranks), np.int32)
        ordered = np.empty_like(steps)
        n = kernels.loops().place(before, table, ranks, steps, ends - counts, ends, positions, ordered, sizes)
        if n == len(ranks) and tuple(sizes.tolist()) == ranked.sizes:
            return Changes(positions, ordered)
    elif tuple(sizes.tolist()) == ranked.sizes:
        of = table[(before >> 7) & 255]
        positions = np.concatenate(
            [np.flatnonzero(of == c)[ranks[e - n : e]] for c, (e, n) in enumerate(zip(ends, counts, strict=True))]
        )
        order = np.argsort(positions)
        return Changes(positions[order].astype(np.int32), steps[order])
    raise Corrupt("the changes are told of other weights than these", where=where)


def _classes(before: Bits) -> Bytes:
    """Exponent -> class."""
    if kernels.worth(len(before)):
        top = kernels.loops().top_exponent(before)
    else:
        top = int(((before >> 7) & 255).max(initial=0))
    classes: Bytes = np.clip(top - np.arange(256), 0, CLASSES - 1).astype(np.uint8)
    return classes
