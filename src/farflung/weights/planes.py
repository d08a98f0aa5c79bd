"""Changes as byte planes, each of which an entropy coder of bytes takes close to what is in it.

A change is a gap (unchanged elements since the changed one before, or since the piece's start) and a step. Gaps are close
to geometric: with k = floor(log2(elements / changes)) their low k bits are flat, and what is above them is small. So

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
        return (self.size // self.count).bit_length() - 1 if self.count else 0


def pack(spans: Sequence[Span], changes: Sequence[Changes]) -> tuple[dict[str, Bytes], npt.NDArray[np.int64]]:
    """Compressed planes, and how often each step's code came ([256], the last for all that are larger)."""
    control: list[Bytes] = []
    low: list[list[Bytes]] = [[] for _ in range(4)]
    gaps: list[UInt32] = []
    steps: list[UInt32] = []
    seen = np.zeros(CODES, np.int64)
    for span, change in zip(spans, changes, strict=True):
        if not len(change):
            continue
        gap = np.empty(len(change), np.uint32)
        gap[0] = change.positions[0]
        np.subtract(change.positions[1:], change.positions[:-1], out=gap[1:], casting="unsafe")
        gap[1:] -= 1
        k = span.low_bits
        for plane in range((k + 7) // 8):
            low[plane].append(((gap >> (8 * plane)) & ((1 << min(8, k - 8 * plane)) - 1)).astype(np.uint8))
        top = gap >> k
        code = _zigzag(change.steps, span.kind)
        control.append(np.minimum(top, ESCAPE).astype(np.uint8) << 4 | np.minimum(code, ESCAPE).astype(np.uint8))
        gaps.append((top[top >= ESCAPE] - ESCAPE).astype(np.uint32))
        escaped = code[code >= ESCAPE]
        steps.append(escaped.astype(np.uint32) - ESCAPE)
        seen += np.bincount(control[-1] & ESCAPE, minlength=CODES)
        seen[ESCAPE] -= len(escaped)
        seen += np.bincount(np.minimum(escaped, CODES - 1), minlength=CODES)
    planes = {"control": _join(control, np.uint8)} | {f"low{i}": _join(parts, np.uint8) for i, parts in enumerate(low)}
    planes |= _split("gap", _join(gaps, np.uint32)) | _split("step", _join(steps, np.uint32))
    return {name: compress(plane) for name, plane in planes.items() if len(plane)}, seen


def unpack(planes: dict[str, Bytes], spans: Sequence[Span], where: str) -> list[Changes]:
    """The changes; takes its planes out of ``planes``. Raises Corrupt for sizes and indices that do not fit."""
    take = Planes(planes, where)
    control = take.plane("control", sum(span.count for span in spans))
    low = [take.plane(f"low{i}", sum(s.count for s in spans if s.low_bits > 8 * i)) for i in range(4)]
    top, code = (control >> 4).astype(np.uint32), (control & ESCAPE).astype(np.uint32)
    for numbers, name in ((top, "gap"), (code, "step")):
        escaped = np.flatnonzero(numbers == ESCAPE)
        more = take.numbers(name, len(escaped))
        if len(more) and more.max() > 2**32 - 1 - ESCAPE:
            raise Corrupt(f"a {name} of {more.max()} + {ESCAPE}", where=where)
        numbers[escaped] += more
    changes: list[Changes] = []
    at, at_low = 0, [0] * 4
    for span in spans:
        here = slice(at, at + span.count)
        at += span.count
        gap = top[here].astype(np.int64) << span.low_bits
        for plane in range((span.low_bits + 7) // 8):
            part = low[plane][at_low[plane] : at_low[plane] + span.count]
            at_low[plane] += span.count
            gap |= part.astype(np.int64) << (8 * plane)
        changes.append(Changes(_positions(gap, span.size, where), _unzigzag(code[here], span.kind, where)))
    return changes


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


def _positions(gaps: Positions, size: int, where: str) -> Positions:
    """Indices that rise strictly and lie below ``size``. Every gap is below 2^63 / size first, so that no sum wraps."""
    if len(gaps) and (gaps.max() >= size or gaps.min() < 0):
        raise Corrupt(f"a gap of {gaps.max()} in a piece of {size} elements", where=where)
    gaps += 1
    positions = np.cumsum(gaps, out=gaps)
    positions -= 1
    if len(positions) and positions[-1] >= size:
        raise Corrupt(f"index {positions[-1]} is outside its {size} elements", where=where)
    return positions


def _zigzag(steps: Bits, kind: ElementType) -> Bits:
    width = 8 * steps.itemsize
    signed = (steps << (width - kind.bits)).view(steps.dtype.str.replace("u", "i")) >> (width - kind.bits)
    codes: Bits = ((signed << 1) ^ (signed >> (width - 1))).view(steps.dtype) - 1
    return codes


def _unzigzag(codes: UInt32, kind: ElementType, where: str) -> Bits:
    if len(codes) and codes.max() >= 2**kind.bits - 1:
        raise Corrupt(f"a step's code is {codes.max()}, in elements of {kind.bits} bits", where=where)
    zigzag = codes + 1
    steps = (zigzag >> 1) ^ np.negative(zigzag & 1)
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
    share = seen[seen > 0] / max(1, seen.sum())
    return (positions + float(seen.sum() * -(share * np.log2(share)).sum())) / 8


def _binary_entropy(s: float) -> float:
    return 0.0 if s in (0.0, 1.0) else float(-s * np.log2(s) - (1 - s) * np.log2(1 - s))
