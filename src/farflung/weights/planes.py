"""Changes as byte planes, each of which an entropy coder of bytes takes close to what is in it.

A change is a gap (unchanged elements since the changed one before, or since the piece's start) and a step. Gaps are close
to geometric: their low bits are flat, and what is above them is small. So, with k as in ``Span.low_bits``,

    low0, low1 ...   the low k bits of the gaps, a byte each; flat symbols, which Huffman coding takes in exactly k bits
    control          gap >> k in the upper four bits, the step's code in the lower: one symbol for both, as either alone
                     has less than a bit
    gap0 ... gap3    (gap >> k) - 15 of those whose upper bits are 15
    step0 ...        code - 15 of those whose lower bits are 15

The step's code is its zigzag less one (-1, 1, -2, 2 ... -> 0, 1, 2, 3 ...). Planes of all pieces lie end to end; k follows
from the counts and is not sent. A plane without a number is left out, and so is the tail of planes that are all zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from farflung.core.errors import Corrupt
from farflung.weights import kernels
from farflung.weights.changes import Changes, Positions
from farflung.weights.elements import Bits, Bytes, ElementType

LEVEL = 1
"""Of zstd. Higher levels look for matches, find false ones, and come out larger."""
ESCAPE = 15
CODES = 256

UInt32 = npt.NDArray[np.uint32]
Number = TypeVar("Number", np.uint8, np.uint32)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece's elements: how many, of what type, and how many of them changed."""

    size: int
    kind: ElementType
    count: int

    @property
    def low_bits(self) -> int:
        """k of the gaps' low bits. One less than what is best for a geometric law by itself, as zstd's Huffman codes are
        nearer to it then; a last plane of one or two bits would take a bit and a half or two and a half, so it goes."""
        k = max(0, (self.size // self.count).bit_length() - 2) if self.count else 0
        return k - k % 8 if k % 8 < 3 else k


@dataclass(frozen=True, slots=True)
class Packed:
    """One piece's changes in planes: ``control`` and ``low`` [4] have a byte for each, ``gaps`` and ``codes`` hold what escaped."""

    control: Bytes
    low: Sequence[Bytes]
    gaps: UInt32
    codes: UInt32


def pack(spans: Sequence[Span], changes: Sequence[Changes]) -> tuple[dict[str, Bytes], npt.NDArray[np.int64]]:
    """Compressed planes, and how often each step's code came ([256], the last for all that are larger)."""
    seen = np.zeros(CODES, np.int64)
    packed = [_pack(span, change, seen) for span, change in zip(spans, changes, strict=True) if len(change)]
    planes = {"control": _join([part.control for part in packed], np.uint8)}
    for i in range(4):
        planes[f"low{i}"] = _join([part.low[i] for part in packed], np.uint8)
    planes |= _split("gap", _join([part.gaps for part in packed], np.uint32))
    planes |= _split("step", _join([part.codes for part in packed], np.uint32))
    return {name: compress(plane) for name, plane in planes.items() if len(plane)}, seen


def unpack(planes: dict[str, Bytes], spans: Sequence[Span], where: str) -> list[Changes]:
    """The changes; takes its planes out of ``planes``. Raises Corrupt for sizes and indices that do not fit."""
    take = Planes(planes, where)
    control = take.plane("control", sum(span.count for span in spans))
    widths = [span.low_bits for span in spans]
    low = [
        take.plane(f"low{i}", sum(s.count for s, k in zip(spans, widths, strict=True) if k > 8 * i)) for i in range(4)
    ]
    gaps = take.numbers("gap", int(np.count_nonzero(control >> 4 == ESCAPE)))
    codes = take.numbers("step", int(np.count_nonzero(control & ESCAPE == ESCAPE)))
    changes: list[Changes] = []
    at, at_low, at_gap, at_code = 0, [0] * 4, 0, 0
    for span, width in zip(spans, widths, strict=True):
        here = control[at : at + span.count]
        at += span.count
        parts: list[Bytes] = []
        for i in range(4):
            n = span.count if width > 8 * i else 0
            parts.append(low[i][at_low[i] : at_low[i] + n])
            at_low[i] += n
        n_gaps = int(np.count_nonzero(here >> 4 == ESCAPE))
        n_codes = int(np.count_nonzero(here & ESCAPE == ESCAPE))
        packed = Packed(here, parts, gaps[at_gap : at_gap + n_gaps], codes[at_code : at_code + n_codes])
        at_gap, at_code = at_gap + n_gaps, at_code + n_codes
        changes.append(_unpack(span, packed, where))
    return changes


def _pack(span: Span, changes: Changes, seen: npt.NDArray[np.int64]) -> Packed:
    """Planes of one piece; counts its codes in ``seen``."""
    n, k = len(changes), span.low_bits
    used = (k + 7) // 8
    if kernels.worth(span.size):
        control, low = np.empty(n, np.uint8), np.empty((4, n), np.uint8)
        gaps, codes = np.empty(n, np.uint32), np.empty(n, np.uint32)
        run = kernels.compiled(kernels.pack)
        n_gaps, n_codes = run(changes.positions, changes.steps, span.kind.bits, k, control, low, gaps, codes, seen)
        return Packed(control, [low[i, : n * (i < used)] for i in range(4)], gaps[:n_gaps], codes[:n_codes])
    gap = np.diff(changes.positions, prepend=-1) - 1
    top, code = gap >> k, _zigzag(changes.steps, span.kind)
    seen += np.bincount(np.minimum(code, CODES - 1), minlength=CODES)
    low_parts = [((gap >> (8 * i)) & ((1 << min(8, k - 8 * i)) - 1)).astype(np.uint8) for i in range(used)]
    control = np.minimum(top, ESCAPE).astype(np.uint8) << 4 | np.minimum(code, ESCAPE).astype(np.uint8)
    none = np.zeros(0, np.uint8)
    escaped = (top[top >= ESCAPE] - ESCAPE).astype(np.uint32), code[code >= ESCAPE].astype(np.uint32) - ESCAPE
    return Packed(control, low_parts + [none] * (4 - used), *escaped)


def _unpack(span: Span, packed: Packed, where: str) -> Changes:
    n, k = span.count, span.low_bits
    if kernels.worth(span.size):
        positions, steps, low = np.empty(n, np.int64), np.empty(n, span.kind.dtype), np.zeros((4, n), np.uint8)
        for i in range((k + 7) // 8):
            low[i] = packed.low[i]
        run = kernels.compiled(kernels.unpack)
        found, at = run(packed.control, low, packed.gaps, packed.codes, span.kind.bits, k, span.size, positions, steps)
        if found < 0:
            what = "an index is outside its {} elements" if found == -1 else "a step is outside its type's {} elements"
            raise Corrupt(f"{what.format(span.size)} (change {at} of {n})", where=where)
        return Changes(positions, steps)
    gap, code = (packed.control >> 4).astype(np.int64), (packed.control & ESCAPE).astype(np.int64)
    for numbers, more in ((gap, packed.gaps), (code, packed.codes)):
        numbers[numbers == ESCAPE] += more
    if n and gap.max() > span.size >> k:
        raise Corrupt(f"an index is outside its {span.size} elements", where=where)
    gap <<= k
    for i in range((k + 7) // 8):
        gap |= packed.low[i].astype(np.int64) << (8 * i)
    positions = np.cumsum(gap + 1) - 1
    if n and positions[-1] >= span.size:
        raise Corrupt(f"index {positions[-1]} is outside its {span.size} elements", where=where)
    return Changes(positions, _unzigzag(code, span.kind, where))


@dataclass(frozen=True, slots=True)
class Planes:
    """Takes planes of known sizes; what is left at the end was no part of the form."""

    left: dict[str, Bytes]
    where: str

    def plane(self, name: str, count: int) -> Bytes:
        """Exactly ``count`` bytes. The size that a zstd frame claims is what would be allocated: it is checked first."""
        if not count:
            return np.zeros(0, np.uint8)
        where = f"{self.where}, plane {name}"
        if name not in self.left:
            raise Corrupt("it is missing", where=where)
        return decompress(self.left.pop(name), count, where)

    def numbers(self, name: str, count: int) -> UInt32:
        """``count`` numbers of up to four byte planes; the first is always there."""
        numbers = np.zeros(count, np.uint32)
        for i in range(4):
            if count and (i == 0 or f"{name}{i}" in self.left):
                numbers |= self.plane(f"{name}{i}", count).astype(np.uint32) << (8 * i)
        return numbers


def compress(plane: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(plane.data), np.uint8)


def decompress(plane: Bytes, count: int, where: str) -> Bytes:
    raw = plane.tobytes()
    try:
        claimed = zstandard.frame_content_size(raw)
        if claimed != count:
            raise Corrupt(f"{claimed} bytes where {count} belong", where=where)
        data = zstandard.ZstdDecompressor().decompress(raw, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"not a zstd frame: {error}", where=where) from None
    if len(data) != count:
        raise Corrupt(f"{len(data)} bytes where {count} belong", where=where)
    return np.frombuffer(data, np.uint8)


def _zigzag(steps: Bits, kind: ElementType) -> Bits:
    width = 8 * steps.itemsize
    signed = (steps << (width - kind.bits)).view(steps.dtype.str.replace("u", "i")) >> (width - kind.bits)
    codes: Bits = ((signed << 1) ^ (signed >> (width - 1))).view(steps.dtype) - 1
    return codes


def _unzigzag(codes: Positions, kind: ElementType, where: str) -> Bits:
    if len(codes) and codes.max() >= 2**kind.bits - 1:
        raise Corrupt(f"a step's code is {codes.max()}, in elements of {kind.bits} bits", where=where)
    zigzag = codes + 1
    steps = (zigzag >> 1) ^ -(zigzag & 1)
    bits: Bits = (steps & (2**kind.bits - 1)).astype(kind.dtype)
    return bits


def _split(name: str, numbers: UInt32) -> dict[str, Bytes]:
    """Byte planes, lowest first, without those above the largest number."""
    if not len(numbers):
        return {}
    width = max(1, (int(numbers.max()).bit_length() + 7) // 8)
    return {f"{name}{i}": (numbers >> (8 * i)).astype(np.uint8) for i in range(width)}


def _join(parts: Sequence[npt.NDArray[Number]], dtype: type[Number]) -> npt.NDArray[Number]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def entropy_bytes(spans: Sequence[Span], seen: npt.NDArray[np.int64]) -> float:
    """The bound: sum over pieces of n H2(s) bits for positions without structure, and the entropy of the steps' codes."""
    positions = sum(_binary_entropy(span.count / span.size) * span.size for span in spans if span.size)
    return positions / 8 + symbols_bytes(seen)


def symbols_bytes(seen: npt.NDArray[np.int64]) -> float:
    """What symbols that came so often need at least, each by itself."""
    share = seen[seen > 0] / max(1, seen.sum())
    return float(seen.sum() * -(share * np.log2(share)).sum()) / 8


def _binary_entropy(s: float) -> float:
    return 0.0 if s in (0.0, 1.0) else float(-s * np.log2(s) - (1 - s) * np.log2(1 - s))
