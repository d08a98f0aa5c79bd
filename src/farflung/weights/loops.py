"""The loops of the codec as machine code: one pass over memory instead of several, without the interpreter's lock.

``changes.py``, ``planes.py`` and ``ranked.py`` say what they compute. Importing this needs numba (``kernels.py``); each is
compiled when it is first called and kept on the disk for the next process.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BURST = 4
"""Changes that ``find`` writes of each 64 items, wherever more than one in 256 changes."""
AHEAD = 256
"""Changes between asking for a place in memory and writing to it; a power of two."""
RUN = 64
"""Words of 64 items after which ``find`` looks again how many of them change."""


def compiled(function):
    """Kept on the disk, where there is a place for it that may be written to."""
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:
        return numba.njit(nogil=True, boundscheck=False)(function)


@intrinsic
def differing(context, before, after, at):
    """Which of 64 items from ``at`` on differ, a bit for each: vector instructions on any processor that LLVM knows."""
    width = before.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), 64)

    def generate(context, builder, signature, arguments):
        loaded = []
        for type, array in zip(signature.args[:2], arguments[:2], strict=True):
            first = context.make_array(type)(context, builder, array).data
            place = builder.bitcast(builder.gep(first, [arguments[2]]), vector.as_pointer())
            loaded.append(builder.load(place, align=width // 8))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(before, after, types.int64), generate


@intrinsic
def lowest(context, word):
    """The number of a word's lowest bit, 64 for none."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def ones(context, word):
    """How many bits of a word are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def prefetch(context, array, item):
    """Begin to bring an item into the second cache, for reading: more such requests are under way at a time than those that go
    on to the first, or that ask to write at once."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(32)
        first = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(first, [arguments[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        to_read, second, data = number(0), number(2), number(1)
        ask = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(ask, [place, to_read, second, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@compiled
def find(before, after, first, items, steps):
    """Where items differ and by how much; returns how many. ``items``, which count from ``first``, and ``steps`` have room
    for all.

    64 items are compared by vector instructions, into a word with a bit for each. Where many words have some bits, as many
    as most have are written without a look at how many there are: a wrong guess of the processor costs more than that.
    """
    n = block = 0
    blocks = before.size // 64
    dense = False
    while block < blocks:
        stop, begun = min(blocks, block + RUN), n
        for at in range(64 * block, 64 * stop, 64):
            word = differing(before, after, at)
            k, end = n, n + ones(word)
            if dense and n + BURST <= items.size:
                for _ in range(BURST):
                    item = at + (lowest(word) & 63)
                    items[k] = first + item
                    steps[k] = after[item] - before[item]
                    k += 1
                    word &= word - np.uint64(1)
            while word:
                item = at + lowest(word)
                items[k] = first + item
                steps[k] = after[item] - before[item]
                k += 1
                word &= word - np.uint64(1)
            n = end
        block, dense = stop, n - begun > RUN // 4
    for item in range(64 * blocks, before.size):
        items[n] = first + item
        steps[n] = after[item] - before[item]
        n += before[item] != after[item]
    return n


@compiled
def add(array, positions, steps):
    """``array[positions] += steps``, modulo its width. Memory is asked for AHEAD changes before it is needed: no processor
    foresees such places by itself.
    """
    foreseen = max(0, positions.size - AHEAD)
    for i in range(foreseen):
        prefetch(array, np.int64(positions[i + AHEAD]))
        array[positions[i]] += steps[i]
    for i in range(foreseen, positions.size):
        array[positions[i]] += steps[i]


@compiled
def merge(first, first_steps, second, second_steps, mask, positions, steps):
    """Positions of both, rising, and the sums of their steps, without those that are zero under the mask; returns how many.

    Which of two is next is for no processor to guess, so nothing branches on it.
    """
    n = i = j = 0
    while i < first.size and j < second.size:
        a, b = first[i], second[j]
        step = (first_steps[i] * (a <= b) + second_steps[j] * (b <= a)) & mask
        positions[n] = min(a, b)
        steps[n] = step
        n += step != 0
        i += a <= b
        j += b <= a
    for k in range(i, first.size):
        positions[n] = first[k]
        steps[n] = first_steps[k]
        n += 1
    for k in range(j, second.size):
        positions[n] = second[k]
        steps[n] = second_steps[k]
        n += 1
    return n


@compiled
def pack(positions, steps, bits, low_bits, control, low, gaps, codes, seen):
    """One piece's planes; ``low`` are three. Returns how many gaps and codes did not fit in the control plane.

    ``seen`` counts the codes, the last of it all that are larger.
    """
    escaped_gaps = escaped_codes = 0
    before = -1
    sign, mask = 1 << (bits - 1), (1 << bits) - 1
    first, last = (1 << min(8, low_bits)) - 1, seen.size - 1
    low0, low1, low2 = low
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        if low_bits > 0:
            low0[i] = gap & first
        if low_bits > 8:
            low1[i] = (gap >> 8) & ((1 << min(8, low_bits - 8)) - 1)
        if low_bits > 16:
            low2[i] = (gap >> 16) & ((1 << min(8, low_bits - 16)) - 1)
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


@compiled
def unpack(control, low, gaps, codes, bits, low_bits, size, array, positions, steps, adds):
    """The way back: into positions and steps, or ``adds``: into an array of ``size`` items, each change once AHEAD more were asked
    for; nothing is written to positions and steps then.

    Returns how many gaps and codes were taken, or -1 (an index) or -2 (a step) and which change is out of range.
    """
    taken_gaps = taken_codes = 0
    at = -1
    limit = (1 << bits) - 1
    low0, low1, low2 = low
    if adds:
        positions, steps = np.empty(AHEAD, np.int32), np.empty(AHEAD, array.dtype)
    step_of = np.empty(16, steps.dtype)
    for code in range(16):
        step_of[code] = (((code + 1) >> 1) ^ -((code + 1) & 1)) & limit
    for i in range(control.size):
        top = int(control[i]) >> 4
        small = int(control[i]) & 15
        if top == 15:
            top += gaps[taken_gaps]
            taken_gaps += 1
        if small == 15:
            code = 15 + codes[taken_codes]
            taken_codes += 1
            if code >= limit:
                return -2, i
            step_of[15] = (((code + 1) >> 1) ^ -((code + 1) & 1)) & limit
        gap = top << low_bits  # at most 2^56, as gaps have 32 bits and k is at most 24
        if low_bits > 0:
            gap |= int(low0[i])
        if low_bits > 8:
            gap |= int(low1[i]) << 8
        if low_bits > 16:
            gap |= int(low2[i]) << 16
        at += gap + 1
        if at >= size:
            return -1, i
        slot = i
        if adds:
            prefetch(array, at)
            slot = i & (AHEAD - 1)
            if i >= AHEAD:
                array[positions[slot]] += steps[slot]
        positions[slot] = at
        steps[slot] = step_of[small]
    if adds:
        for i in range(max(0, control.size - AHEAD), control.size):
            slot = i & (AHEAD - 1)
            array[positions[slot]] += steps[slot]
    return taken_gaps, taken_codes


@compiled
def rank(before, table, positions, at, ranks, sizes):
    """Each change's place among the elements of its class, class by class from ``at`` on; ``sizes`` counts elements."""
    k = 0
    for i in range(before.size):
        c = table[(before[i] >> 7) & 255]
        if k < positions.size and positions[k] == i:
            ranks[at[c]] = sizes[c]
            at[c] += 1
            k += 1
        sizes[c] += 1


@compiled
def place(before, table, ranks, steps, begins, ends, positions, ordered, sizes):
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


@compiled
def top_exponent(before):
    """Of BF16 bits."""
    top = before[0] & 0
    for i in range(before.size):
        top = max(top, before[i] & 0x7F80)
    return top >> 7
