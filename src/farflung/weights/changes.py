"""Which elements of an array changed and by how much: found, applied, inverted, folded.

A step is new bits minus old bits modulo 2^bits. Steps form a group, so a change can be taken back by its negative, and
two changes in a row are one whose steps are their sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.weights import kernels
from farflung.weights.elements import Bits, ElementType

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
WORDS = 1 << 17
"""Eight-byte words that numpy compares at a time, so that the result stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class Changes:
    """``positions`` of the changed elements, strictly rising, and their ``steps``, none zero (uint8 for 4 bits, too)."""

    positions: Positions
    steps: Bits

    def __len__(self) -> int:
        return len(self.positions)


def find(before: Bits, after: Bits, kind: ElementType) -> Changes:
    """What turns ``before`` into ``after``: contiguous arrays of the same length."""
    items, steps = _differing(before, after)
    if kind.bits == 4:
        old, new = before[items], after[items]
        low, high = ((new & 15) - (old & 15)) & 15, ((new >> 4) - (old >> 4)) & 15
        steps = np.stack([low, high], 1).reshape(-1).astype(np.uint8)
        positions = np.stack([2 * items, 2 * items + 1], 1).reshape(-1)
        changed = steps != 0
        return Changes(positions[changed], steps[changed])
    return Changes(items, steps)


def apply(array: Bits, changes: Changes, kind: ElementType) -> None:
    """Make the changes in place. Every position lies in the array."""
    if kind.bits == 4:
        items, high = changes.positions >> 1, (changes.positions & 1).astype(bool)
        # Both codes of a byte may change, and an indexed sum counts an index once: low codes first, then high ones.
        for half, shift in ((~high, 0), (high, 4)):
            at = items[half]
            old = array[at]
            code = ((old >> shift) + changes.steps[half]) & 15
            array[at] = (old & (0xF0 >> shift)) | (code << shift)
        return
    if kernels.worth(len(array)):
        kernels.compiled(kernels.add)(array, changes.positions, changes.steps)
        return
    array[changes.positions] += changes.steps


def invert(changes: Changes, kind: ElementType) -> Changes:
    """What takes the changes back."""
    return Changes(changes.positions, _modulo(np.negative(changes.steps), kind))


def fold(first: Changes, second: Changes, kind: ElementType) -> Changes:
    """Both, one after the other, as one; elements that end where they began are left out."""
    positions = np.concatenate([first.positions, second.positions])
    steps = np.concatenate([first.steps, second.steps])
    order = np.argsort(positions, kind="stable")
    positions, steps = positions[order], steps[order]
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    steps[twice] = _modulo(steps[twice] + steps[twice + 1], kind)
    keep = steps != 0
    keep[twice + 1] = False
    return Changes(positions[keep], steps[keep])


def _modulo(steps: Bits, kind: ElementType) -> Bits:
    return steps & steps.dtype.type(15) if kind.bits == 4 else steps


def _differing(before: Bits, after: Bits) -> tuple[Positions, Bits]:
    """Indices of items that differ, and by how much. Whole words first: most are equal, and one comparison settles several
    items."""
    per_word = 8 // before.itemsize
    aligned = len(before) // per_word * per_word
    old, new = before[:aligned].view(np.uint64), after[:aligned].view(np.uint64)
    look = _compiled if kernels.worth(len(before)) else _plain
    found = list(look(old, new, before.dtype, per_word))
    if aligned < len(before):
        tail = after[aligned:] - before[aligned:]
        odd = np.flatnonzero(tail)
        found.append((odd + aligned, tail[odd]))
    if len(found) == 1:
        return found[0]
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, before.dtype)
    return np.concatenate([items for items, _ in found]), np.concatenate([steps for _, steps in found])


def _plain(old: Words, new: Words, dtype: np.dtype[Any], per_word: int) -> Iterator[tuple[Positions, Bits]]:
    shift = per_word.bit_length() - 1
    differs = np.empty(WORDS, np.bool_)
    for start in range(0, len(old), WORDS):
        a, b = old[start : start + WORDS], new[start : start + WORDS]
        words = np.flatnonzero(np.not_equal(a, b, out=differs[: len(a)]))
        if len(words):
            steps = b[words].view(dtype) - a[words].view(dtype)
            odd = np.flatnonzero(steps != 0)
            yield ((words[odd >> shift] + start) << shift) + (odd & (per_word - 1)), steps[odd]


def _compiled(old: Words, new: Words, dtype: np.dtype[Any], per_word: int) -> Iterator[tuple[Positions, Bits]]:
    # Room for the worst case; memory that is not written to is never taken.
    items, steps = np.empty(len(old) * per_word + 1, np.int64), np.empty(len(old) * per_word + 1, dtype)
    n = kernels.finder(per_word)(old, new, old.view(dtype), new.view(dtype), items, steps)
    # Copies, so that the room goes back and is there, warm, for the next piece.
    yield items[:n].copy(), steps[:n].copy()
