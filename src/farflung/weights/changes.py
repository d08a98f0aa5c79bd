"""Which elements of an array changed and by how much: found, applied, inverted, folded.

A step is new bits minus old bits modulo 2^bits. Steps form a group, so a change can be taken back by its negative, and
two changes in a row are one whose steps are their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.weights import kernels
from farflung.weights.elements import Bits, ElementType

Positions = npt.NDArray[np.int32]
"""Of elements in an array; a piece has at most 2^27 of them."""
WORTH_CHANGES = 1 << 16
"""Fewer changes are folded by numpy."""
BLOCK = 2 << 20
"""Bytes that are compared at a time, so that a second look at them need not go to memory."""


@dataclass(frozen=True, slots=True)
class Changes:
    """``positions`` of the changed elements, strictly rising, and their ``steps``, none zero (uint8 for 4 bits, too)."""

    positions: Positions
    steps: Bits

    def __len__(self) -> int:
        return len(self.positions)


class Room:
    """Memory that the changes of several arrays are written into, one after the other.

    Enough for the worst case; what is not written to is never taken. Taking memory anew each time would cost as much as
    finding the changes.
    """

    def __init__(self, nbytes: int) -> None:
        """``nbytes``: of the arrays together."""
        self._positions = np.empty(nbytes, np.int32)
        self._steps = np.empty(nbytes, np.uint8)
        self.clear()

    def clear(self) -> None:
        """Begin again; changes that lie here are no more."""
        self._at = self._byte = 0

    @property
    def nbytes(self) -> int:
        """That were written to."""
        return self._positions.itemsize * self._at + self._byte

    def free(self, count: int, dtype: np.dtype[Any]) -> tuple[Positions, Bits]:
        """Where positions and steps of so many changes may be written; memory of its own where not enough is left."""
        self._byte += -self._byte % dtype.itemsize
        positions = self._positions[self._at : self._at + count]
        steps = self._steps[self._byte : self._byte + count * dtype.itemsize]
        if len(positions) < count or len(steps) < count * dtype.itemsize:
            return np.empty(count, np.int32), np.empty(count, dtype)
        return positions, steps.view(dtype)

    def keep(self, changes: Changes) -> None:
        """These stay, if they were written to what was free here; else that much less is free, which does no harm."""
        self._at += len(changes)
        self._byte += changes.steps.nbytes


def find(
    before: Bits,
    after: Bits,
    kind: ElementType,
    *,
    room: Room | None = None,
    look: Callable[[Bits], object] | None = None,
) -> Changes:
    """What turns ``before`` into ``after``: contiguous arrays of the same length.

    ``look`` is given all of ``after``, part by part, while it is in a core's cache.
    """
    room = room or Room(before.nbytes)
    items, steps = room.free(len(before), before.dtype)
    compiled, n = kernels.worth(len(before)), 0
    block = (BLOCK if compiled else BLOCK // 4) // before.itemsize  # numpy has intermediate results to keep there
    for start in range(0, len(before), block):
        old, new = before[start : start + block], after[start : start + block]
        if compiled:
            n += kernels.loops().find(old, new, start, items[n:], steps[n:])
        else:
            at, by = _compare(old, new)
            items[n : n + len(at)], steps[n : n + len(at)] = at + start, by
            n += len(at)
        if look is not None:
            look(new)
    if kind.bits == 4:
        return _halves(before, after, items[:n])
    changes = Changes(items[:n], steps[:n])
    room.keep(changes)
    return changes


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
        kernels.loops().add(array, changes.positions, changes.steps)
        return
    array[changes.positions.astype(np.intp)] += changes.steps  # numpy would convert them twice


def invert(changes: Changes, kind: ElementType) -> Changes:
    """What takes the changes back."""
    return Changes(changes.positions, _modulo(np.negative(changes.steps), kind))


def fold(first: Changes, second: Changes, kind: ElementType) -> Changes:
    """Both, one after the other, as one; elements that end where they began are left out."""
    total = len(first) + len(second)
    if kernels.worth(total, WORTH_CHANGES):
        positions, steps = np.empty(total, np.int32), np.empty(total, first.steps.dtype)
        mask = first.steps.dtype.type(15 if kind.bits == 4 else np.iinfo(first.steps.dtype).max)
        parts = first.positions, first.steps, second.positions, second.steps
        n = kernels.loops().merge(*parts, mask, positions, steps)
        return Changes(positions[:n], steps[:n])
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


def _halves(before: Bits, after: Bits, items: Positions) -> Changes:
    """Of bytes that differ, the 4-bit elements that do."""
    old, new = before[items], after[items]
    low, high = ((new & 15) - (old & 15)) & 15, ((new >> 4) - (old >> 4)) & 15
    steps = np.stack([low, high], 1).reshape(-1).astype(np.uint8)
    positions = np.stack([2 * items, 2 * items + 1], 1).reshape(-1)
    changed = steps != 0
    return Changes(positions[changed], steps[changed])


def _compare(old: Bits, new: Bits) -> tuple[npt.NDArray[np.int64], Bits]:
    """Which items differ, and by how much. Whole words first: most are equal, and one comparison settles several items."""
    per_word = 8 // old.itemsize
    shift, aligned = per_word.bit_length() - 1, len(old) // per_word * per_word
    a, b = old[:aligned].view(np.uint64), new[:aligned].view(np.uint64)
    words = np.flatnonzero(a != b)
    steps = b[words].view(old.dtype) - a[words].view(old.dtype)
    odd = np.flatnonzero(steps)
    items, steps = (words[odd >> shift] << shift) + (odd & (per_word - 1)), steps[odd]
    if aligned < len(old):
        tail = new[aligned:] - old[aligned:]
        odd = np.flatnonzero(tail)
        items, steps = np.concatenate([items, odd + aligned]), np.concatenate([steps, tail[odd]])
    return items, steps
