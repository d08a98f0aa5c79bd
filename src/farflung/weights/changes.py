"""Which elements of an array changed and by how much: found, applied, inverted, folded.

A step is new bits minus old bits modulo 2^bits. Steps form a group, so a change can be taken back by its negative, and
two changes in a row are one whose steps are their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farflung.weights.elements import Bits, ElementType

Positions = npt.NDArray[np.int64]
WORDS = 1 << 15
"""Eight-byte words that are compared at a time: both sides and the result stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Changes:
    """``positions`` of the changed elements, strictly rising, and their ``steps``, none zero (uint8 for 4 bits, too)."""

    positions: Positions
    steps: Bits

    def __len__(self) -> int:
        return len(self.positions)


def find(before: Bits, after: Bits, kind: ElementType) -> Changes:
    """What turns ``before`` into ``after``: contiguous arrays of the same length."""
    items = _differing(before, after)
    old, new = before[items], after[items]
    if kind.bits == 4:
        low, high = ((new & 15) - (old & 15)) & 15, ((new >> 4) - (old >> 4)) & 15
        steps = np.stack([low, high], 1).reshape(-1).astype(np.uint8)
        positions = np.stack([2 * items, 2 * items + 1], 1).reshape(-1)
        changed = steps != 0
        return Changes(positions[changed], steps[changed])
    return Changes(items, new - old)


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


def _differing(before: Bits, after: Bits) -> Positions:
    """Indices of items that differ. Whole words first: most are equal, and one comparison settles several items."""
    per_word = 8 // before.itemsize
    aligned = len(before) // per_word * per_word
    old, new = before[:aligned].view(np.uint64), after[:aligned].view(np.uint64)
    found: list[Positions] = []
    differs = np.empty(WORDS, np.bool_)
    for start in range(0, len(old), WORDS):
        a, b = old[start : start + WORDS], new[start : start + WORDS]
        words = np.flatnonzero(np.not_equal(a, b, out=differs[: len(a)]))
        if len(words):
            odd = np.flatnonzero((a[words] ^ b[words]).view(before.dtype))
            found.append((words[odd // per_word] + start) * per_word + odd % per_word)
    found.append(np.flatnonzero(before[aligned:] != after[aligned:]) + aligned)
    return np.concatenate(found)
