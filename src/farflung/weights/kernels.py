"""The loops of the codec, compiled where numba is installed (the extra ``fast``): one pass over memory instead of several.

``changes.py`` and ``planes.py`` say what they compute and do it in numpy where numba is missing, and for small arrays, for
which compiling is not worth it. Compiled code is kept on the disk for the next process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

WORTH_ITEMS = 1 << 20
"""Arrays of fewer items are left to numpy."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


@cache
def available() -> bool:
    """Whether numba can be imported."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def worth(items: int) -> bool:
    """Whether the loops over so many items should be compiled ones."""
    return items >= WORTH_ITEMS and available()


@cache
def compiled(function: Kernel) -> Kernel:
    """The function as machine code that runs without the interpreter's lock."""
    import numba

    kernel: Kernel = numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    return kernel


@cache
def finder(per_word: int) -> Callable[..., int]:
    """Finds where items differ and by how much, ``per_word`` items to a word of eight bytes: a constant, as it unrolls a loop.

    ``items`` and ``steps`` have room for one more than there are items: a step is written before it is known to be one.
    """

    def find(words_before, words_after, before, after, items, steps):  # type: ignore[no-untyped-def]
        n = 0
        for word in range(words_before.size):
            if words_before[word] != words_after[word]:
                at = word * per_word
                for item in range(per_word):
                    step = after[at + item] - before[at + item]
                    items[n] = at + item
                    steps[n] = step
                    n += step != 0
        return n

    kernel: Callable[..., int] = compiled(find)
    return kernel


def add(array, positions, steps):  # type: ignore[no-untyped-def]
    """``array[positions] += steps``, modulo its width."""
    for i in range(positions.size):
        array[positions[i]] += steps[i]


def pack(positions, steps, bits, low_bits, control, low, gaps, codes, seen):  # type: ignore[no-untyped-def]
    """One piece's planes; ``low`` is [4, changes]. Returns how many gaps and codes did not fit in the control plane.

    ``seen`` counts the codes, the last of it all that are larger.
    """
    escaped_gaps = escaped_codes = 0
    before = -1
    sign, mask = 1 << (bits - 1), (1 << bits) - 1
    first, last = (1 << min(8, low_bits)) - 1, seen.size - 1
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        low[0, i] = gap & first
        if low_bits > 8:
            for plane in range(1, (low_bits + 7) // 8):
                low[plane, i] = (gap >> (8 * plane)) & ((1 << min(8, low_bits - 8 * plane)) - 1)
        top = gap >> low_bits
        signed = ((int(steps[i]) ^ sign) & mask) - sign
        code = (((signed << 1) ^ (signed >> 63)) & mask) - 1
        seen[min(code, last)] += 1
        if top >= 15:
            gaps[escaped_gaps] = top - 15
            escaped_gaps += 1
            top = 15
        if code >= 15:
            codes[escaped_codes] = code - 15
            escaped_codes += 1
            code = 15
        control[i] = top << 4 | code
    return escaped_gaps, escaped_codes


def unpack(control, low, gaps, codes, bits, low_bits, size, positions, steps):  # type: ignore[no-untyped-def]
    """The way back: positions and steps; ``low`` is [4, changes] of what there is, else zeros.

    Returns how many gaps and codes were taken, or -1 (an index) or -2 (a step) and which change is out of range.
    """
    taken_gaps = taken_codes = 0
    at = -1
    limit, most = (1 << bits) - 1, size >> low_bits
    for i in range(control.size):
        top = int(control[i]) >> 4
        code = int(control[i]) & 15
        if top == 15:
            top += gaps[taken_gaps]
            taken_gaps += 1
        if code == 15:
            code += codes[taken_codes]
            taken_codes += 1
        gap = (top << low_bits) | int(low[0, i])
        if low_bits > 8:
            gap |= (int(low[1, i]) << 8) | (int(low[2, i]) << 16) | (int(low[3, i]) << 24)
        at += gap + 1
        if top > most or at >= size:
            return -1, i
        if code >= limit:
            return -2, i
        positions[i] = at
        steps[i] = (((code + 1) >> 1) ^ -((code + 1) & 1)) & limit
    return taken_gaps, taken_codes


def rank(before, table, positions, at, ranks, sizes):  # type: ignore[no-untyped-def]
    """Each change's place among the elements of its class, class by class from ``at`` on; ``sizes`` counts elements."""
    k = 0
    for i in range(before.size):
        c = table[(before[i] >> 7) & 255]
        if k < positions.size and positions[k] == i:
            ranks[at[c]] = sizes[c]
            at[c] += 1
            k += 1
        sizes[c] += 1


def place(before, table, ranks, steps, begins, ends, positions, ordered, sizes):  # type: ignore[no-untyped-def]
    """The way back, in the order of positions; returns how many changes found their element, and counts in ``sizes``."""
    n = 0
    at = begins.copy()
    left = begins.copy()
    for c in range(at.size):
        left[c] = ranks[at[c]] if at[c] < ends[c] else 1 << 62
    for i in range(before.size):
        c = table[(before[i] >> 7) & 255]
        sizes[c] += 1
        if left[c] == 0:
            positions[n] = i
            ordered[n] = steps[at[c]]
            n += 1
            at[c] += 1
            left[c] = ranks[at[c]] - ranks[at[c] - 1] - 1 if at[c] < ends[c] else 1 << 62
        else:
            left[c] -= 1
    return n


def top_exponent(before):  # type: ignore[no-untyped-def]
    """Of BF16 bits."""
    top = before[0] & 0
    for i in range(before.size):
        top = max(top, before[i] & 0x7F80)
    return top >> 7
