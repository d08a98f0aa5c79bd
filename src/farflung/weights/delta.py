"""The codec: what becomes of some pieces of a stream, exactly, as one object.

An object is a frame (``core/frame.py``) whose header is ``{"kind": "delta-2", "pieces": N}``. Its arrays are zstd frames:

    table      per piece: its number in the schema less that of the piece before it, less one (uint32), its form (uint8),
               how many of its elements changed (uint32); three columns, one after the other
    (hashes)   per piece: xxh3-128 of its bits afterwards, 16 bytes, plain
    planes     of the changes of form 0 (``planes.py``), and for forms 1 and 2 dense1.0, whole2.1 ...: all elements of
               the pieces of that form and that width in bytes, by byte of an item, lowest first

Forms: 0 sparse, gaps and steps of the elements that changed; 1 dense, a step for every element, where more than a quarter
changed; 2 whole, the bits themselves, for a piece without a base. 0 and 1 can be taken back and folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.weights import changes as sparse
from farflung.weights.changes import Changes
from farflung.weights.elements import Bits, Bytes, ElementType, digest
from farflung.weights.planes import Planes, compress, decompress, entropy_bytes, pack, unpack
from farflung.weights.schema import PIECE_BYTES, Piece, Schema

KIND = "delta-2"
DENSE_SHARE = 0.25
HASH = 16
SPARSE, DENSE, WHOLE = range(3)


@dataclass(frozen=True, slots=True)
class Dense:
    """A step for every element, packed as the array is."""

    steps: Bits


@dataclass(frozen=True, slots=True)
class Whole:
    """The bits themselves."""

    bits: Bits


Content = Changes | Dense | Whole


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one piece: its number, the hash of its bits afterwards, and how it gets there."""

    piece: int
    after: bytes
    content: Content


@dataclass(frozen=True, slots=True)
class Encoded:
    """An object's bytes, how many elements changed in it, and the fewest bytes that their positions and steps need.

    Forms 1 and 2 count as they are: what their elements need at least is not known.
    """

    raw: bytes
    changed: int
    bound: float


def compare(number: int, piece: Piece, before: Bits, after: Bits) -> Change | None:
    """What turns a piece's bits into others; None if they are the same."""
    changes = sparse.find(before, after, piece.kind)
    if not len(changes):
        return None
    hash = digest(after)
    if len(changes) <= DENSE_SHARE * piece.size:
        return Change(number, hash, changes)
    return Change(number, hash, Dense(_difference(after, before, piece.kind)))


def apply(array: Bits, content: Content, kind: ElementType) -> None:
    """Bring a piece's bits to what they become, in place."""
    match content:
        case Changes():
            sparse.apply(array, content, kind)
        case Dense(steps):
            array[...] = _difference(array, _difference(np.zeros_like(steps), steps, kind), kind)
        case Whole(bits):
            array[...] = bits


def invert(content: Content, kind: ElementType) -> Changes | Dense:
    """What takes it back. Raises BadInput for a piece that came whole: what was there before is not known."""
    match content:
        case Changes():
            return sparse.invert(content, kind)
        case Dense(steps):
            return Dense(_difference(np.zeros_like(steps), steps, kind))
        case Whole():
            raise BadInput("a piece that came whole cannot be taken back", where="delta")


def fold(first: Change, second: Change, kind: ElementType) -> Change:
    """Both, one after the other, as one. Neither is altered."""
    return Change(second.piece, second.after, _fold(first.content, second.content, kind))


def encode(changes: Sequence[Change], schema: Schema) -> Encoded:
    """One object of changes to different pieces, in rising order of their numbers."""
    pieces = [schema.pieces[change.piece] for change in changes]
    forms = np.array([_form(change.content) for change in changes], np.uint8)
    counts = [_count(change, piece) for change, piece in zip(changes, pieces, strict=True)]
    numbers = np.array([change.piece for change in changes], np.int64)
    columns = (np.diff(numbers, prepend=-1) - 1).astype("<u4"), forms, np.array(counts, "<u4")
    found = [c.content for c in changes if isinstance(c.content, Changes)]
    spans = [p.span(n) for p, n, form in zip(pieces, counts, forms, strict=True) if form == SPARSE]
    planes, seen = pack(spans, found)
    bound = entropy_bytes(spans, seen)
    for name, form in (("dense", DENSE), ("whole", WHOLE)):
        for width in (1, 2, 4):
            arrays = [_bits(c.content) for c, p in zip(changes, pieces, strict=True) if _takes(c, p, form, width)]
            if sum(map(len, arrays)):
                rows = np.concatenate(arrays).view(np.uint8).reshape(-1, width)
                packed = {f"{name}{width}.{i}": compress(np.ascontiguousarray(rows[:, i])) for i in range(width)}
                bound += sum(map(len, packed.values()))
                planes |= packed
    table = {"table": compress(np.concatenate([column.view(np.uint8) for column in columns]))}
    table["hashes"] = np.frombuffer(b"".join(change.after for change in changes), np.uint8)
    raw = frame.encode({"kind": KIND, "pieces": len(changes)}, (table if changes else {}) | planes)
    return Encoded(raw, sum(counts), bound)


def decode(raw: bytes, schema: Schema, *, where: str) -> list[Change]:
    """The object's changes. Every number is checked before it is used, every size before memory is taken for it.

    Raises Corrupt with the object and, where one is at fault, the tensor.
    """
    header, arrays = frame.decode(raw, where=where)
    if set(header) != {"kind", "pieces"} or header["kind"] != KIND or type(header["pieces"]) is not int:
        raise Corrupt(f"not a {KIND} object: {str(header)[:200]}", where=where)
    n = header["pieces"]
    if not 0 <= n <= len(schema.pieces):
        raise Corrupt(f"it is of {n} pieces, the schema has {len(schema.pieces)}", where=where)
    numbers, forms, counts, hashes = _table(arrays, n, schema, where)
    pieces = [schema.pieces[number] for number in numbers]
    if (total := sum(piece.nbytes for piece in pieces)) > PIECE_BYTES:
        raise Corrupt(f"its pieces take {total} bytes; at most {PIECE_BYTES}", where=where)
    spans = [p.span(c) for p, form, c in zip(pieces, forms, counts, strict=True) if form == SPARSE]
    found = iter(unpack(arrays, spans, where))
    take = Planes(arrays, where)
    values = {
        (form, width): _rows(
            take, f"{name}{width}", sum(_items(p, f, form, width) for p, f in zip(pieces, forms, strict=True)), width
        )
        for name, form in (("dense", DENSE), ("whole", WHOLE))
        for width in (1, 2, 4)
    }
    if arrays:
        raise Corrupt(f"planes that are no part of the form: {sorted(arrays)}", where=where)
    at = dict.fromkeys(values, 0)
    changes: list[Change] = []
    for number, piece, form, after in zip(numbers, pieces, forms, hashes, strict=True):
        if form == SPARSE:
            changes.append(Change(number, after, next(found)))
            continue
        key, length = (form, piece.kind.dtype.itemsize), piece.items.stop - piece.items.start
        bits = values[key][at[key] : at[key] + length]
        at[key] += length
        changes.append(Change(number, after, Dense(bits) if form == DENSE else Whole(bits)))
    return changes


def _table(
    arrays: dict[str, Bytes], n: int, schema: Schema, where: str
) -> tuple[list[int], list[int], list[int], list[bytes]]:
    """The pieces' numbers, forms, counts and hashes, checked."""
    if not n:
        return [], [], [], []
    if "table" not in arrays or "hashes" not in arrays:
        raise Corrupt("its table is missing", where=where)
    table, hashes = decompress(arrays.pop("table"), 9 * n, f"{where}, table"), arrays.pop("hashes").tobytes()
    if len(hashes) != HASH * n:
        raise Corrupt(f"{len(hashes)} bytes of hashes for {n} pieces", where=where)
    numbers = np.cumsum(table[: 4 * n].view("<u4").astype(np.int64) + 1) - 1
    forms, counts = table[4 * n : 5 * n], table[5 * n :].copy().view("<u4")
    if numbers[-1] >= len(schema.pieces):
        raise Corrupt(f"piece {numbers[-1]} of a schema of {len(schema.pieces)}", where=where)
    for number, form, count in zip(numbers, forms, counts, strict=True):
        piece = schema.pieces[number]
        if form > WHOLE or count > piece.size or (form == WHOLE and count != piece.size):
            place = f"{where}, tensor {piece.tensor}"
            raise Corrupt(f"form {form} with {count} of {piece.size} elements", where=place)
    return numbers.tolist(), forms.tolist(), counts.tolist(), [hashes[HASH * i : HASH * (i + 1)] for i in range(n)]


def _rows(take: Planes, name: str, count: int, width: int) -> Bits:
    """``count`` items of ``width`` bytes out of their planes."""
    columns = [take.plane(f"{name}.{i}", count) for i in range(width)]
    return np.stack(columns, 1).view(f"<u{width}").reshape(-1)


def _difference(after: Bits, before: Bits, kind: ElementType) -> Bits:
    if kind.bits != 4:
        steps: Bits = np.subtract(after, before, dtype=after.dtype)
        return steps
    low, high = ((after & 15) - (before & 15)) & 15, ((after >> 4) - (before >> 4)) & 15
    return (low | (high << 4)).astype(np.uint8)


def _fold(first: Content, second: Content, kind: ElementType) -> Content:
    match first, second:
        case _, Whole():
            return second
        case Changes(), Changes():
            return sparse.fold(first, second, kind)
        case Changes(), Dense(steps):  # steps add up in any order
            return Dense(_applied(steps, first, kind))
        case Dense(steps), _:
            return Dense(_applied(steps, second, kind))
        case Whole(bits), _:
            return Whole(_applied(bits, second, kind))
    raise AssertionError("unreachable")


def _applied(array: Bits, content: Content, kind: ElementType) -> Bits:
    result = array.copy()
    apply(result, content, kind)
    return result


def _form(content: Content) -> int:
    return SPARSE if isinstance(content, Changes) else DENSE if isinstance(content, Dense) else WHOLE


def _bits(content: Content) -> Bits:
    assert not isinstance(content, Changes)
    return content.steps if isinstance(content, Dense) else content.bits


def _takes(change: Change, piece: Piece, form: int, width: int) -> bool:
    return _form(change.content) == form and piece.kind.dtype.itemsize == width


def _items(piece: Piece, of: int, form: int, width: int) -> int:
    return piece.items.stop - piece.items.start if of == form and piece.kind.dtype.itemsize == width else 0


def _count(change: Change, piece: Piece) -> int:
    """Elements that changed; all of a whole piece."""
    match change.content:
        case Changes():
            return len(change.content)
        case Dense(steps):
            halves = (steps & 15, steps >> 4) if piece.kind.bits == 4 else (steps,)
            return sum(int(np.count_nonzero(half)) for half in halves)
        case Whole():
            return piece.size
