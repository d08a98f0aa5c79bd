"""What a stream's tensors are, and the pieces that are compared, hashed and sent: runs of elements of one tensor.

A tensor is one piece, or several where it is large or where each rank of a sharded trainer holds a part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farflung.core.errors import Corrupt
from farflung.weights.elements import ELEMENT_TYPES, ElementType
from farflung.weights.planes import Span
from farflung.weights.strict import count, items, loads, need, strict_object

FORMAT = 2
MAX_SCHEMA = 64 << 20
"""In bytes as it is stored: what is larger is not read into memory as Python's objects."""
MAX_EMPTY = 4096
"""Empty pieces of one tensor: a rank that holds nothing of it has one."""
PIECE_BYTES = 64 << 20
"""The most that one piece takes, and what the pieces of one object take together."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """``shape`` counts the items of an array of it: bytes where elements are packed."""

    kind: ElementType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In elements."""
        return math.prod(self.shape) * self.kind.per_item

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``start + size`` of a tensor of type ``kind``; both are even where elements are packed."""

    tensor: str
    start: int
    size: int
    kind: ElementType

    @property
    def items(self) -> slice:
        """Its place in the tensor's flat array."""
        return slice(self.start // self.kind.per_item, (self.start + self.size) // self.kind.per_item)

    @property
    def nbytes(self) -> int:
        return self.size * self.kind.bits // 8

    def span(self, changed: int) -> Span:
        return Span(self.size, self.kind, changed)


@dataclass(frozen=True)
class Schema:
    """``tensors`` by name, ``pieces`` in the order that objects number them, ``tied``: another name -> its tensor's."""

    tensors: Mapping[str, TensorType]
    pieces: tuple[Piece, ...]
    tied: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def encode(self) -> bytes:
        """The same schema gives the same bytes."""
        number = {name: i for i, name in enumerate(self.tensors)}
        data = {
            "format": FORMAT,
            "tensors": {name: [t.kind.name, list(t.shape)] for name, t in self.tensors.items()},
            "pieces": [[number[piece.tensor], piece.start, piece.size] for piece in self.pieces],
            "tied": dict(self.tied),
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @staticmethod
    def decode(raw: bytes, where: str) -> Schema:
        """Strict, and the pieces cover each tensor exactly once. Raises Corrupt."""
        if len(raw) > MAX_SCHEMA:
            raise Corrupt(f"not a schema: it has {len(raw)} bytes; at most {MAX_SCHEMA}", where=where)
        try:
            return _parse(loads(raw))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Corrupt(f"not a schema: {error}", where=where) from None

    def root(self, hashes: Sequence[bytes]) -> str:
        """SHA-256 over the schema and every piece's hash: it names a version's bits, all of them."""
        return hashlib.sha256(self._digest + b"".join(hashes)).hexdigest()

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()


def cut(name: str, tensor: TensorType, start: int = 0, size: int | None = None) -> Iterator[Piece]:
    """The pieces of a tensor, or of the run of elements of it that a rank holds."""
    size = tensor.size - start if size is None else size
    most = PIECE_BYTES * 8 // tensor.kind.bits
    if not size:
        yield Piece(name, start, 0, tensor.kind)
    for at in range(0, size, most):
        yield Piece(name, start + at, min(most, size - at), tensor.kind)


def groups(schema: Schema) -> Iterator[range]:
    """All pieces in order, in groups of at most PIECE_BYTES: what is encoded, decoded and applied at a time."""
    first = size = 0
    for number, piece in enumerate(schema.pieces):
        if number > first and size + piece.nbytes > PIECE_BYTES:
            yield range(first, number)
            first, size = number, 0
        size += piece.nbytes
    if schema.pieces:
        yield range(first, len(schema.pieces))


def _parse(data: dict[str, Any]) -> Schema:
    strict_object(data, {"format", "tensors", "pieces", "tied"}, FORMAT)
    tensors = {name: _tensor(name, item) for name, item in items(data["tensors"])}
    names = list(tensors)
    pieces: list[Piece] = []
    covered = dict.fromkeys(names, 0)
    empty = dict.fromkeys(names, 0)
    for number, start, size in data["pieces"]:
        need(count(number) < len(names), f"a piece of tensor {number}, of {len(names)}")
        name = names[number]
        piece = Piece(name, count(start), count(size), tensors[name].kind)
        need(piece.start == covered[name], f"a piece of {name!r} starts at {start}, not at {covered[name]}")
        need(piece.nbytes <= PIECE_BYTES, f"a piece of {piece.nbytes} bytes; at most {PIECE_BYTES}")
        need(start % piece.kind.per_item == 0 == size % piece.kind.per_item, f"a piece of {name!r} cuts a byte")
        empty[name] += not size
        need(empty[name] <= MAX_EMPTY, f"more than {MAX_EMPTY} empty pieces of {name!r}")
        covered[name] += size
        pieces.append(piece)
    for name, tensor in tensors.items():
        need(covered[name] == tensor.size, f"the pieces of {name!r} hold {covered[name]} of its {tensor.size} elements")
    tied = dict(items(data["tied"]))
    for name, owner in tied.items():
        need(isinstance(owner, str) and owner in tensors and name not in tensors, f"{name!r} is tied to {owner!r}")
    return Schema(tensors, tuple(pieces), tied)


def _tensor(name: str, item: Any) -> TensorType:
    kind, shape = item
    need(kind in ELEMENT_TYPES, f"tensor {name!r} has type {kind!r}")
    need(isinstance(shape, list), f"tensor {name!r} has shape {shape!r}")
    tensor = TensorType(ELEMENT_TYPES[kind], tuple(count(n) for n in shape))
    need(len(tensor.shape) <= 32 and tensor.size < 1 << 48, f"tensor {name!r} has shape {shape}")
    return tensor
