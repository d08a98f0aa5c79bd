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
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import zstandard

from farflung.core.errors import Corrupt
from farflung.weights import kernels
from farflung.weights.changes import Changes, Positions, apply
from farflung.weights.elements import Bits, Bytes, ElementType

LEVEL = 1
"""Of zstd. Higher levels look for matches, find false ones, and come out larger."""
ESCAPE = 15
CODES = 256
LOW = 3
"""Planes of the gaps' low bits: a piece has at most 2^27 elements, so k is at most 24."""

UInt32 = npt.NDArray[np.uint32]


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
    """One piece's changes as they came: ``control`` and ``low`` [3] have a byte for each, ``gaps`` and ``codes`` hold what escaped.

    Whether they lie in the piece is known once they are used, which raises Corrupt.
    """

    span: Span
    control: Bytes
    low: Sequence[Bytes]
    gaps: UInt32
    codes: UInt32
    where: str

    def __len__(self) -> int:
        return self.span.count

    def changes(self) -> Changes:
        n, k, kind = self.span.count, self.span.low_bits, self.span.kind
        if kernels.worth(self.span.size):
            positions, steps = np.empty(n, np.int32), np.empty(n, kind.dtype)
            self._run(steps, positions, steps, adds=False)
            return Changes(positions, steps)
        gap, code = (self.control >> 4).astype(np.int64), (self.control & ESCAPE).astype(np.int64)
        for numbers, more in ((gap, self.gaps), (code, self.codes)):
            numbers[numbers == ESCAPE] += more
        if n and gap.max() > self.span.size >> k:
            raise Corrupt(f"an index is outside its {self.span.size} elements", where=self.where)
        gap <<= k
        for i in range((k + 7) // 8):
            gap |= self.low[i].astype(np.int64) << (8 * i)
        at = np.cumsum(gap + 1) - 1
        if n and at[-1] >= self.span.size:
            raise Corrupt(f"index {at[-1]} is outside its {self.span.size} elements", where=self.where)
        return Changes(at.astype(np.int32), _unzigzag(code, kind, self.where))

    def apply(self, array: Bits) -> None:
        """Make the changes in place, as far as the first that does not fit."""
        if self.span.kind.bits == 4 or not kernels.worth(self.span.size):
            apply(array, self.changes(), self.span.kind)
            return
        self._run(array, np.empty(0, np.int32), np.empty(0, array.dtype), adds=True)

    def _run(self, array: Bits, positions: Positions, steps: Bits, *, adds: bool) -> None:
        span, planes = self.span, (self.control, tuple(self.low), self.gaps, self.codes)
        numbers = span.kind.bits, span.low_bits, span.size
        found, at = kernels.loops().unpack(*planes, *numbers, array, positions, steps, adds)
        if found < 0:
            what = "an index is outside its {} elements" if found == -1 else "a step is outside its type's {} elements"
            raise Corrupt(f"{what.format(span.size)} (change {at} of {span.count})", where=self.where)


def pack(spans: Sequence[Span], changes: Sequence[Changes]) -> tuple[dict[str, Bytes], npt.NDArray[np.int64]]:
    """Compressed planes, and how often each step's code came ([256], the last for all that are larger)."""
    seen = np.zeros(CODES, np.int64)
    control, *low = (np.empty(sum(s.count for s in spans if s.low_bits > bits), np.uint8) for bits in (-1, 0, 8, 16))
    gaps, codes = [], []
    at, at_low = 0, [0] * LOW
    for span, change in zip(spans, changes, strict=True):
        own = [low[i][at_low[i] : at_low[i] + span.count * (span.low_bits > 8 * i)] for i in range(LOW)]
        escaped = _pack(span, change, control[at : at + span.count], own, seen)
        at, at_low = at + span.count, [a + len(part) for a, part in zip(at_low, own, strict=True)]
        gaps.append(escaped[0])
        codes.append(escaped[1])
    planes = {"control": control} | {f"low{i}": plane for i, plane in enumerate(low)}
    planes |= _split("gap", _join(gaps)) | _split("step", _join(codes))
    return {name: compress(plane) for name, plane in planes.items() if len(plane)}, seen


def unpack(planes: dict[str, Bytes], spans: Sequence[Span], where: str) -> list[Packed]:
    """Each piece's planes; takes them out of ``planes``. Raises Corrupt for sizes that do not fit."""
    take = Planes(planes, where)
    control = take.plane("control", sum(span.count for span in spans))
    widths = [span.low_bits for span in spans]
    low = [
        take.plane(f"low{i}", sum(s.count for s, k in zip(spans, widths, strict=True) if k > 8 * i)) for i in range(LOW)
    ]
    controls = [control[end - s.count : end] for s, end in zip(spans, accumulate(s.count for s in spans), strict=True)]
    n_gaps = [int(np.count_nonzero(part >= ESCAPE << 4)) for part in controls]
    n_codes = [int(np.count_nonzero(part & ESCAPE == ESCAPE)) for part in controls]
    gaps, codes = take.numbers("gap", sum(n_gaps)), take.numbers("step", sum(n_codes))
    found: list[Packed] = []
    at_low, at_gap, at_code = [0] * LOW, 0, 0
    for i, (span, width) in enumerate(zip(spans, widths, strict=True)):
        parts: list[Bytes] = []
        for plane in range(LOW):
            n = span.count if width > 8 * plane else 0
            parts.append(low[plane][at_low[plane] : at_low[plane] + n])
            at_low[plane] += n
        own = gaps[at_gap : at_gap + n_gaps[i]], codes[at_code : at_code + n_codes[i]]
        at_gap, at_code = at_gap + n_gaps[i], at_code + n_codes[i]
        found.append(Packed(span, controls[i], parts, *own, where))
    return found


def _pack(
    span: Span, changes: Changes, control: Bytes, low: Sequence[Bytes], seen: npt.NDArray[np.int64]
) -> tuple[UInt32, UInt32]:
    """Write one piece's planes; count its codes in ``seen``. Gaps and codes that escaped."""
    n, k = len(changes), span.low_bits
    if kernels.worth(span.size):
        gaps, codes = np.empty(n, np.uint32), np.empty(n, np.uint32)
        pack = kernels.loops().pack
        taken = pack(changes.positions, changes.steps, span.kind.bits, k, control, tuple(low), gaps, codes, seen)
        return gaps[: taken[0]], codes[: taken[1]]
    gap = np.diff(changes.positions, prepend=-1) - 1
    top, code = gap >> k, _zigzag(changes.steps, span.kind)
    seen += np.bincount(np.minimum(code, CODES - 1), minlength=CODES)
    for i in range((k + 7) // 8):
        low[i][:] = (gap >> (8 * i)) & ((1 << min(8, k - 8 * i)) - 1)
    control[:] = np.minimum(top, ESCAPE).astype(np.uint8) << 4 | np.minimum(code, ESCAPE).astype(np.uint8)
    return (top[top >= ESCAPE] - ESCAPE).astype(np.uint32), code[code >= ESCAPE].astype(np.uint32) - ESCAPE


@dataclass(frozen=True, slots=True)
class Planes:
    """Takes planes of known sizes; what is left at the end was no part of the form."""

    left: dict[str, Bytes]
    where: str

    def plane(self, name: str, count: int) -> Bytes:
        """Exactly ``count`` bytes. The size that a zstd frame claims is what would be allocated: it is checked first."""
        if not count:
            return np.frombuffer(b"", np.uint8)  # read-only, as all planes are: compiled code is made for either kind
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
        numbers.setflags(write=False)
        return numbers


def compress(plane: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(plane.data), np.uint8)


def decompress(plane: Bytes, count: int, where: str) -> Bytes:
    raw = plane.data
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


def _unzigzag(codes: npt.NDArray[np.int64], kind: ElementType, where: str) -> Bits:
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


def _join(parts: Sequence[UInt32]) -> UInt32:
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


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
