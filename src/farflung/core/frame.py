"""The one wire and file format for arrays: a JSON header and flat little-endian buffers.

    magic "FFR1" | u32 header length | header (UTF-8 JSON) | buffers, each padded to 8 bytes

The header holds the caller's plain data under ``data`` and, under ``arrays``, one ``[name, dtype, shape]`` per buffer in
order. Every length is checked before it is used, so a hostile frame costs an error and no memory. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.core.errors import Corrupt

MAGIC = b"FFR1"
MAX_HEADER = 64 << 20
MAX_DIMS = 16
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float32",
        "float64",
    )
}

Array = npt.NDArray[Any]


def encode(data: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    """Pack plain JSON data and named arrays. Raises TypeError for a dtype outside DTYPES."""
    table: list[tuple[str, str, list[int]]] = []
    buffers: list[memoryview | bytes] = []
    for name, array in (arrays or {}).items():
        dtype = array.dtype.newbyteorder("=").name
        if dtype not in DTYPES:
            raise TypeError(f"array {name!r} has dtype {dtype}; a frame carries {', '.join(DTYPES)}")
        raw = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8).data
        table.append((name, dtype, list(array.shape)))
        buffers += [raw, b"\0" * (-len(raw) % 8)]
    header = json.dumps({"data": data, "arrays": table}, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-(len(MAGIC) + 4 + len(header)) % 8)
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, *buffers))


def decode(raw: bytes | bytearray | memoryview, *, where: str = "frame") -> tuple[dict[str, Any], dict[str, Array]]:
    """Unpack a frame into its plain data and its arrays (read-only views into ``raw``). Raises Corrupt."""
    view = memoryview(raw)
    if len(view) < 8 or bytes(view[:4]) != MAGIC:
        raise Corrupt(f"not a frame: it starts with {bytes(view[:4])!r}, not {MAGIC!r}", where=where)
    length = int.from_bytes(view[4:8], "little")
    if length > min(MAX_HEADER, len(view) - 8):
        raise Corrupt(f"the header claims {length} bytes, {len(view) - 8} are there", where=where)
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        data, table = header["data"], header["arrays"]
        entries = [(str(name), str(dtype), [int(n) for n in shape]) for name, dtype, shape in table]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"the header is not what a frame holds: {error}", where=where) from None
    if not isinstance(data, dict):
        raise Corrupt("the header's data is not an object", where=where)
    arrays: dict[str, Array] = {}
    at = 8 + length
    for name, dtype, shape in entries:
        if dtype not in DTYPES or len(shape) > MAX_DIMS or any(n < 0 for n in shape):
            raise Corrupt(f"array {name[:100]!r} has dtype {dtype[:20]!r} and shape {shape[:MAX_DIMS]}", where=where)
        count = math.prod(shape)
        size = count * DTYPES[dtype].itemsize
        if size > len(view) - at:
            raise Corrupt(f"array {name!r} claims {size} bytes, {max(0, len(view) - at)} are left", where=where)
        try:
            arrays[name] = np.frombuffer(view, dtype=DTYPES[dtype], count=count, offset=at).reshape(shape)
        except (ValueError, OverflowError) as error:
            raise Corrupt(f"array {name!r} cannot have shape {shape}: {error}", where=where) from None
        at += size + -size % 8
    if at != len(view):
        raise Corrupt(f"{len(view) - at} bytes follow the last array", where=where)
    return data, arrays
