"""The codec: what changed between two sets of BF16 tensors, exactly, as one object.

Bits in, bits out (uint16 arrays of the tensors' shapes), so NaN payloads and negative zeros survive. An object is a
frame (``core/frame.py``) whose header lists, for each tensor in it, ``[name, shape, form, count]``:

- ``gaps``: ``count`` elements changed. Each is a gap (elements between it and the changed one before it, or the tensor's
  start) and the difference of its bits, new minus old modulo 2^16, zigzagged so that small steps are small numbers.
- ``whole``: all ``count`` elements, for a tensor without a base and for one of which more than a quarter changed.

Numbers of all the object's tensors are laid end to end and split into byte planes, each compressed by zstd: ``gap0``
(lowest bytes) and up, ``ulp0`` and ``ulp1``, ``whole0`` and ``whole1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zstandard

from farflung.core import frame
from farflung.core.errors import Corrupt

KIND = "bf16-delta-1"
DENSE_SHARE = 0.25

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]
Form = Literal["gaps", "whole"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an object; ``count`` is the number of values it takes from the planes."""

    name: str
    shape: tuple[int, ...]
    form: Form
    count: int


def encode(after: Mapping[str, Bits], before: Mapping[str, Bits]) -> tuple[bytes, dict[str, int]]:
    """One object that turns ``before`` into ``after``, and how many elements of each tensor changed.

    A tensor that ``before`` lacks is sent whole. Both sides of a pair have the same shape.
    """
    entries: list[Entry] = []
    changed: dict[str, int] = {}
    gaps: list[Unsigned] = []
    steps: list[Bits] = []
    whole: list[Bits] = []
    for name, new in after.items():
        flat = new.reshape(-1)
        positions = None
        if name in before:
            old = before[name].reshape(-1)
            positions = np.flatnonzero(old != flat)
        changed[name] = flat.size if positions is None else positions.size
        if positions is None or positions.size > DENSE_SHARE * flat.size:
            whole.append(flat)
            entries.append(Entry(name, new.shape, "whole", flat.size))
        else:
            gaps.append((np.diff(positions, prepend=-1) - 1).astype(np.uint64))
            steps.append(_zigzag(flat[positions] - old[positions]))
            entries.append(Entry(name, new.shape, "gaps", positions.size))
    gap = np.concatenate(gaps) if gaps else np.zeros(0, np.uint64)
    planes = _split("gap", gap, _width(int(gap.max(initial=0))))
    planes |= _split("ulp", np.concatenate(steps) if steps else np.zeros(0, np.uint16), 2)
    planes |= _split("whole", np.concatenate(whole) if whole else np.zeros(0, np.uint16), 2)
    header = {"kind": KIND, "tensors": [[e.name, list(e.shape), e.form, e.count] for e in entries]}
    return frame.encode(header, planes), changed


def decode(
    raw: bytes, base: Mapping[str, Bits], shapes: Mapping[str, tuple[int, ...]], *, where: str = "delta"
) -> dict[str, Bits]:
    """The object's tensors after the change, as new arrays; ``base`` stays as it is.

    ``shapes`` says which tensors may occur and how large they are: nothing larger is ever allocated. Raises Corrupt with
    the object and, where one is at fault, the tensor.
    """
    header, planes = frame.decode(raw, where=where)
    entries = _entries(header, shapes, where)
    for entry in entries:
        if entry.form == "gaps" and (entry.name not in base or base[entry.name].shape != entry.shape):
            raise Corrupt("the change has no base of its shape", where=f"{where}, tensor {entry.name}")
    sparse = sum(entry.count for entry in entries if entry.form == "gaps")
    dense = sum(entry.count for entry in entries if entry.form == "whole")
    gap = _join(planes, "gap", sparse, np.dtype(np.uint64), where)
    ulp = _join(planes, "ulp", sparse, np.dtype(np.uint16), where)
    whole = _join(planes, "whole", dense, np.dtype(np.uint16), where)
    if planes:
        raise Corrupt(f"planes that are no part of the form: {sorted(planes)}", where=where)
    tensors: dict[str, Bits] = {}
    at = at_whole = 0
    for entry in entries:
        if entry.form == "whole":
            tensors[entry.name] = whole[at_whole : at_whole + entry.count].reshape(entry.shape).copy()
            at_whole += entry.count
            continue
        positions = _positions(gap[at : at + entry.count], math.prod(entry.shape), f"{where}, tensor {entry.name}")
        flat = base[entry.name].reshape(-1).copy()
        flat[positions] += _unzigzag(ulp[at : at + entry.count])
        tensors[entry.name] = flat.reshape(entry.shape)
        at += entry.count
    return tensors


def _entries(header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> list[Entry]:
    if set(header) != {"kind", "tensors"} or header["kind"] != KIND or not isinstance(header["tensors"], list):
        raise Corrupt(f"not a {KIND} object: {str(header)[:200]}", where=where)
    entries: list[Entry] = []
    seen: set[str] = set()
    for item in header["tensors"]:
        if not isinstance(item, list) or len(item) != 4:
            raise Corrupt(f"not a tensor's entry: {str(item)[:200]}", where=where)
        name, shape, form, count = item
        place = f"{where}, tensor {str(name)[:200]}"
        if not isinstance(name, str) or name not in shapes or name in seen:
            raise Corrupt("the tensor is unknown or comes twice", where=place)
        if shape != list(shapes[name]):
            raise Corrupt(f"its shape is {str(shape)[:200]}, not {list(shapes[name])}", where=place)
        size = math.prod(shapes[name])
        if form not in ("gaps", "whole") or type(count) is not int or not 0 <= count <= size:
            raise Corrupt(f"form {form!r} with {count!r} of {size} elements", where=place)
        if form == "whole" and count != size:
            raise Corrupt(f"{count} of {size} elements of a whole tensor", where=place)
        seen.add(name)
        entries.append(Entry(name, shapes[name], form, count))
    return entries


def _positions(gaps: Unsigned, size: int, where: str) -> npt.NDArray[np.int64]:
    """Indices of the changed elements, strictly rising and below ``size``. A float64 sum first, as it cannot wrap."""
    if float(gaps.sum(dtype=np.float64)) + gaps.size > 2.0 * size:
        raise Corrupt(f"an index is outside its {size} elements", where=where)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if positions.size and positions[-1] >= size:
        raise Corrupt(f"index {positions[-1]} is outside its {size} elements", where=where)
    return positions


def _zigzag(steps: Bits) -> Bits:
    """0, -1, 1, -2, 2 ... (modulo 2^16) to 0, 1, 2, 3, 4 ..."""
    signed = steps.view(np.int16)
    codes: Bits = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    return codes


def _unzigzag(codes: Bits) -> Bits:
    steps: Bits = (codes >> 1) ^ np.negative(codes & 1)
    return steps


def _width(largest: int) -> int:
    """Bytes that a number needs."""
    return max(1, (largest.bit_length() + 7) // 8)


def _split(name: str, numbers: Unsigned, width: int) -> dict[str, Bytes]:
    """Numbers as compressed byte planes, lowest first; none for no numbers."""
    if not numbers.size:
        return {}
    pack = zstandard.ZstdCompressor(level=1)
    rows = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(numbers.size, -1)
    return {
        f"{name}{i}": np.frombuffer(pack.compress(np.ascontiguousarray(rows[:, i]).tobytes()), np.uint8)
        for i in range(width)
    }


def _join(planes: dict[str, Bytes], name: str, count: int, dtype: np.dtype[Any], where: str) -> Any:
    """Take a kind's planes out of ``planes`` and put their ``count`` numbers together. Raises Corrupt."""
    numbers = np.zeros(count, dtype.newbyteorder("<"))
    if not count:
        return numbers
    rows = numbers.view(np.uint8).reshape(count, dtype.itemsize)
    for i in range(dtype.itemsize):
        plane = planes.pop(f"{name}{i}", None)
        if plane is None and (i == 0 or name != "gap"):
            raise Corrupt(f"plane {name}{i} is missing", where=where)
        if plane is not None:
            rows[:, i] = _decompress(plane, count, f"{where}, plane {name}{i}")
    return numbers


def _decompress(plane: Bytes, count: int, where: str) -> Bytes:
    """Exactly ``count`` bytes. The size that a zstd frame claims is what would be allocated, so it is checked first."""
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
