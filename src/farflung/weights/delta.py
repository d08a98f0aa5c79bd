"""The codec: what becomes of some pieces of a stream, exactly, as one object.

An object is a frame (``core/frame.py``) whose header is ``{"kind": "delta-2", "pieces": N}``. Its arrays are zstd frames:

    table      per piece: its number in the schema less that of the piece before it, less one (uint32), its form (uint8),
               how many of its elements changed (uint32); three columns, one after the other
    (hashes)   per piece: xxh3-128 of its bits afterwards, 16 bytes, plain
    planes     of the changes of form 0 (``planes.py``), and for forms 1 and 2 dense1.0, whole2.1 ...: all elements of
               the pieces of that form and that width in bytes, by byte of an item, lowest first; dense ones zigzagged
    classes    per piece of form 3: elements and changes of each class (uint32, 16 and 16), and under 0.control, 15.low0 ...
               the planes of each class

Forms: 0 sparse, gaps and steps of the elements that changed; 1 dense, a step for every element, where more than 60 %
changed; 2 whole, the bits themselves, for a piece without a base; 3 ranked, as 0, told of classes of old weights
(``ranked.py``). 0 and 1 can be taken back and folded; 3 becomes 0 where the old weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.weights import changes as sparse
from farflung.weights.changes import Changes
from farflung.weights.elements import ELEMENT_TYPES, Bits, Bytes, ElementType
from farflung.weights.planes import (
    Packed,
    Planes,
    Span,
    compress,
    decompress,
    entropy_bytes,
    pack,
    symbols_bytes,
    unpack,
)
from farflung.weights.ranked import CLASSES, WORTH_SIZE, Ranked, place, rank
from farflung.weights.schema import PIECE_BYTES, Piece, Schema

KIND = "delta-2"
DENSE_SHARE = 0.6
"""Where more of a piece changed, it gets a step for every element. Gaps are fewer bytes up to some 80 %, but take more memory."""
HASH = 16
SPARSE, DENSE, WHOLE, RANKED = range(4)
_BF16 = ELEMENT_TYPES["BF16"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A step for every element, packed as the array is."""

    steps: Bits


@dataclass(frozen=True, slots=True)
class Whole:
    """The bits themselves."""

    bits: Bits


Content = Changes | Packed | Dense | Whole | Ranked


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one piece: its number, the hash of its bits afterwards, and how it gets there."""

    piece: int
    after: bytes
    content: Content


@dataclass(frozen=True, slots=True)
class Encoded:
    """An object's bytes, how many elements changed in it, and the fewest bytes that their positions and steps need.

    Steps of form 1 count by their entropy, and form 2 as it is: what its elements need at least is not known.
    """

    raw: bytes
    changed: int
    bound: float


def compare(number: int, piece: Piece, before: Bits, after: Bits, room: sparse.Room | None = None) -> Change | None:
    """What turns a piece's bits into others; None if they are the same. ``room``: where to write that."""
    hasher = xxhash.xxh3_128()
    changes = sparse.find(
        before, after, piece.kind, room=room, look=lambda part: hasher.update(part.view(np.uint8).data)
    )
    if not len(changes):
        return None
    hash = hasher.digest()
    if len(changes) <= DENSE_SHARE * piece.size:
        return Change(number, hash, changes)
    return Change(number, hash, Dense(_difference(after, before, piece.kind)))


def smaller(change: Change, piece: Piece, before: Bits) -> Change:
    """The same in fewer bytes, for those who have the old bits; what cannot be told in fewer stays as it is."""
    content = change.content
    if isinstance(content, Changes) and piece.kind.name == "BF16" and piece.size >= WORTH_SIZE:
        return Change(change.piece, change.after, rank(before, content))
    return change


def apply(array: Bits, content: Content, kind: ElementType) -> None:
    """Bring a piece's bits to what they become, in place. Raises Corrupt for ranked changes of other bits, and half way for
    packed ones that do not fit."""
    match content:
        case Ranked():
            sparse.apply(array, place(array, content, "delta"), kind)
        case Changes():
            sparse.apply(array, content, kind)
        case Packed():
            content.apply(array)
        case Dense(steps):
            array[...] = _difference(array, _difference(np.zeros_like(steps), steps, kind), kind)
        case Whole(bits):
            array[...] = bits


def invert(content: Content, kind: ElementType) -> Changes | Dense:
    """What takes it back. Raises BadInput for forms 2 and 3, which need what was there before."""
    match _plain(content):
        case Changes() as changes:
            return sparse.invert(changes, kind)
        case Dense(steps):
            return Dense(_difference(np.zeros_like(steps), steps, kind))
        case Whole() | Ranked():
            raise BadInput("without the bits that were there before it cannot be taken back", where="delta")


def fold(first: Change, second: Change, kind: ElementType) -> Change:
    """Both, one after the other, as one. Neither is altered."""
    return Change(second.piece, second.after, _fold(first.content, second.content, kind))


def fold_all(rows: Iterable[Iterable[Change]], schema: Schema) -> dict[int, Change]:
    """Changes of one row after the other, by piece. Rows of like weight are folded first, so that each change is moved as
    often as the logarithm of the rows says."""
    done: list[tuple[int, dict[int, Change]]] = []
    for row in rows:
        weight, folded = 1, {change.piece: change for change in row}
        while done and done[-1][0] <= weight:
            more, before = done.pop()
            weight += more
            folded = _both(before, folded, schema)
        done.append((weight, folded))
    result: dict[int, Change] = {}
    for _, folded in reversed(done):
        result = _both(folded, result, schema)
    return result


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
    planes |= _pack_ranked([c.content for c in changes if isinstance(c.content, Ranked)])
    for name, form in (("dense", DENSE), ("whole", WHOLE)):
        for width in (1, 2, 4):
            arrays = [_bits(c.content) for c, p in zip(changes, pieces, strict=True) if _takes(c, p, form, width)]
            if sum(map(len, arrays)):
                items = np.concatenate(arrays)
                rows = (_zigzag(items) if form == DENSE else items).view(np.uint8).reshape(-1, width)
                packed = {f"{name}{width}.{i}": compress(np.ascontiguousarray(rows[:, i])) for i in range(width)}
                dense = form == DENSE and width <= 2
                bound += symbols_bytes(np.bincount(items)) if dense else sum(map(len, packed.values()))
                planes |= packed
    table = {"table": compress(np.concatenate([column.view(np.uint8) for column in columns]))}
    table["hashes"] = np.frombuffer(b"".join(change.after for change in changes), np.uint8)
    raw = frame.encode({"kind": KIND, "pieces": len(changes)}, (table if changes else {}) | planes)
    return Encoded(raw, sum(counts), bound)


@dataclass(frozen=True, slots=True)
class Object:
    """An object whose table was read and checked, and whose planes are as they came. ``counts``: elements that changed."""

    where: str
    schema: Schema
    numbers: Sequence[int]
    forms: Sequence[int]
    counts: Sequence[int]
    hashes: Sequence[bytes]
    planes: Mapping[str, Bytes]

    def changes(self, *, packed: bool = False) -> list[Change]:
        """Decoded anew each time; ``packed``: sparse ones only so far that they can be applied.

        Raises Corrupt with the object and, where one is at fault, the tensor.
        """
        arrays, where, forms = dict(self.planes), self.where, self.forms
        pieces = [self.schema.pieces[number] for number in self.numbers]
        spans = [p.span(c) for p, form, c in zip(pieces, forms, self.counts, strict=True) if form == SPARSE]
        found = iter(unpack(arrays, spans, where))
        ranked_pieces = [p for p, form in zip(pieces, forms, strict=True) if form == RANKED]
        ranked = iter(_unpack_ranked(arrays, ranked_pieces, where))
        take = Planes(arrays, where)
        items = Counter[tuple[int, int]]()
        for piece, form in zip(pieces, forms, strict=True):
            if form in (DENSE, WHOLE):
                items[form, piece.kind.dtype.itemsize] += piece.items.stop - piece.items.start
        values = {
            (form, width): _rows(take, f"{'dense' if form == DENSE else 'whole'}{width}", n, width)
            for (form, width), n in items.items()
        }
        if arrays:
            raise Corrupt(f"planes that are no part of the form: {sorted(arrays)}", where=where)
        at = dict.fromkeys(values, 0)
        changes: list[Change] = []
        for number, piece, form, after in zip(self.numbers, pieces, forms, self.hashes, strict=True):
            if form in (SPARSE, RANKED):
                content: Content = next(found) if form == SPARSE else next(ranked)
                changes.append(Change(number, after, content if packed else _plain(content)))
                continue
            key, length = (form, piece.kind.dtype.itemsize), piece.items.stop - piece.items.start
            bits = values[key][at[key] : at[key] + length]
            at[key] += length
            changes.append(Change(number, after, Dense(_unzigzag(bits)) if form == DENSE else Whole(bits)))
        return changes


def read(raw: bytes, schema: Schema, *, where: str, ranked: bool = False) -> Object:
    """The object without its changes, which come later; ``ranked``: form 3 may be among them. Raises Corrupt."""
    header, arrays = frame.decode(raw, where=where)
    if set(header) != {"kind", "pieces"} or header["kind"] != KIND or type(header["pieces"]) is not int:
        raise Corrupt(f"not a {KIND} object: {str(header)[:200]}", where=where)
    n = header["pieces"]
    if not 0 <= n <= len(schema.pieces):
        raise Corrupt(f"it is of {n} pieces, the schema has {len(schema.pieces)}", where=where)
    numbers, forms, counts, hashes = _table(arrays, n, schema, where)
    if RANKED in forms and not ranked:
        raise Corrupt("it is told of the old weights, which is for deltas in fewer bytes alone", where=where)
    if (total := sum(schema.pieces[number].nbytes for number in numbers)) > PIECE_BYTES:
        raise Corrupt(f"its pieces take {total} bytes; at most {PIECE_BYTES}", where=where)
    return Object(where, schema, numbers, forms, counts, hashes, arrays)


def decode(raw: bytes, schema: Schema, *, where: str, ranked: bool = False) -> list[Change]:
    """The object's changes. Every number is checked before it is used, every size before memory is taken for it.

    Raises Corrupt with the object and, where one is at fault, the tensor.
    """
    return read(raw, schema, where=where, ranked=ranked).changes()


def _both(first: Mapping[int, Change], second: Mapping[int, Change], schema: Schema) -> dict[int, Change]:
    both = dict(first)
    for number, change in second.items():
        before = first.get(number)
        both[number] = change if before is None else fold(before, change, schema.pieces[number].kind)
    return both


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
    numbers = (np.cumsum(table[: 4 * n].view("<u4").astype(np.int64) + 1) - 1).tolist()
    forms, counts = table[4 * n : 5 * n].tolist(), table[5 * n :].copy().view("<u4").tolist()
    if numbers[-1] >= len(schema.pieces):
        raise Corrupt(f"piece {numbers[-1]} of a schema of {len(schema.pieces)}", where=where)
    for number, form, count in zip(numbers, forms, counts, strict=True):
        piece = schema.pieces[number]
        odd = form > RANKED or (form == RANKED and piece.kind.name != "BF16")
        if odd or count > piece.size or (form == WHOLE and count != piece.size):
            place = f"{where}, tensor {piece.tensor}"
            raise Corrupt(f"form {form} with {count} of {piece.size} elements", where=place)
    return numbers, forms, counts, [hashes[HASH * i : HASH * (i + 1)] for i in range(n)]


def _pack_ranked(found: Sequence[Ranked]) -> dict[str, Bytes]:
    """Sizes and counts of the classes, and each class's planes."""
    if not found:
        return {}
    table = np.array([[ranked.sizes, list(map(len, ranked.classes))] for ranked in found], "<u4")
    planes = {"classes": compress(table.reshape(-1).view(np.uint8))}
    for c in range(CLASSES):
        spans = [Span(ranked.sizes[c], _BF16, len(ranked.classes[c])) for ranked in found]
        packed, _ = pack(spans, [ranked.classes[c] for ranked in found])
        planes |= {f"{c}.{name}": plane for name, plane in packed.items()}
    return planes


def _unpack_ranked(arrays: dict[str, Bytes], pieces: Sequence[Piece], where: str) -> list[Ranked]:
    """The way back, checked as far as that goes without the old bits."""
    if not pieces:
        return []
    if "classes" not in arrays:
        raise Corrupt("its table of classes is missing", where=where)
    n = len(pieces)
    raw = decompress(arrays.pop("classes"), 8 * CLASSES * n, f"{where}, classes")
    table = raw.view("<u4").reshape(n, 2, CLASSES).astype(np.int64)
    for piece, (sizes, counts) in zip(pieces, table, strict=True):
        if sizes.sum() != piece.size or (counts > sizes).any():
            raise Corrupt("its classes do not make the piece", where=f"{where}, tensor {piece.tensor}")
    by_class: list[list[Changes]] = []
    for c in range(CLASSES):
        own = {name: arrays.pop(name) for name in list(arrays) if name.startswith(f"{c}.")}
        planes = {name.partition(".")[2]: plane for name, plane in own.items()}
        spans = [Span(int(s[c]), _BF16, int(m[c])) for s, m in table]
        by_class.append([one.changes() for one in unpack(planes, spans, f"{where}, class {c}")])
        if planes:
            raise Corrupt(f"planes that are no part of the form: {sorted(planes)}", where=f"{where}, class {c}")
    sizes = [tuple(row[0].tolist()) for row in table]
    return [Ranked(sizes[i], tuple(changes[i] for changes in by_class)) for i in range(n)]


def _rows(take: Planes, name: str, count: int, width: int) -> Bits:
    """``count`` items of ``width`` bytes out of their planes."""
    columns = [take.plane(f"{name}.{i}", count) for i in range(width)]
    return np.stack(columns, 1).view(f"<u{width}").reshape(-1)


def _zigzag(steps: Bits) -> Bits:
    """0, -1, 1, -2, 2 ... -> 0, 1, 2, 3, 4 ...: small steps of either sign have no high byte."""
    signed = steps.view(steps.dtype.str.replace("u", "i"))
    codes: Bits = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    return codes


def _unzigzag(codes: Bits) -> Bits:
    steps: Bits = (codes >> 1) ^ np.negative(codes & 1)
    return steps


def _difference(after: Bits, before: Bits, kind: ElementType) -> Bits:
    if kind.bits != 4:
        steps: Bits = np.subtract(after, before, dtype=after.dtype)
        return steps
    low, high = ((after & 15) - (before & 15)) & 15, ((after >> 4) - (before >> 4)) & 15
    return (low | (high << 4)).astype(np.uint8)


def _fold(first: Content, second: Content, kind: ElementType) -> Content:
    match _plain(first), _plain(second):
        case (Ranked(), _) | (_, Ranked()):
            raise BadInput("ranked changes are folded where the old bits are", where="delta")
        case _, Whole() as whole:
            return whole
        case Changes() as one, Changes() as two:
            return sparse.fold(one, two, kind)
        case Changes() as one, Dense(steps):  # steps add up in any order
            return Dense(_applied(steps, one, kind))
        case Dense(steps), then:
            return Dense(_applied(steps, then, kind))
        case Whole(bits), then:
            return Whole(_applied(bits, then, kind))
    raise AssertionError("unreachable")


def _applied(array: Bits, content: Content, kind: ElementType) -> Bits:
    result = array.copy()
    apply(result, content, kind)
    return result


def _plain(content: Content) -> Changes | Dense | Whole | Ranked:
    return content.changes() if isinstance(content, Packed) else content


def _form(content: Content) -> int:
    return {Changes: SPARSE, Dense: DENSE, Whole: WHOLE, Ranked: RANKED}[type(content)]


def _bits(content: Content) -> Bits:
    assert isinstance(content, Dense | Whole)
    return content.steps if isinstance(content, Dense) else content.bits


def _takes(change: Change, piece: Piece, form: int, width: int) -> bool:
    return _form(change.content) == form and piece.kind.dtype.itemsize == width


def _count(change: Change, piece: Piece) -> int:
    """Elements that changed; all of a whole piece."""
    match change.content:
        case Changes() | Ranked():
            return len(change.content)
        case Dense(steps):
            halves = (steps & 15, steps >> 4) if piece.kind.bits == 4 else (steps,)
            return sum(int(np.count_nonzero(half)) for half in halves)
        case Whole():
            return piece.size
    raise AssertionError("packed changes are not encoded again")
