"""Three ways to send a step of training, for delta.py: each makes bytes of two images, and changes an image by them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard
from delta_weights import Images

from farflung.weights import delta
from farflung.weights.delta import Change
from farflung.weights.elements import Bits, digest
from farflung.weights.schema import Piece, Schema, TensorType, groups
from farflung.weights.streams import BF16, Run, Section, schema_of

CHUNK = 2 << 20


def section(images: Images) -> Section:
    """Matrices as publisher and subscriber hold them; flat ones, as their shapes do not matter here."""
    return Section({name: Run(TensorType(BF16, bits.shape), 0, bits) for name, bits in images.items()})


class Ours:
    """The objects that a publisher stores, and what a subscriber does with them."""

    def __init__(self, before: Images, after: Images) -> None:
        self._before, self._after = section(before), section(after)
        self.schema: Schema = schema_of([self._after], {})

    def encode(self, pool: ThreadPoolExecutor) -> list[bytes]:
        return list(pool.map(self._object, groups(self.schema)))

    def _object(self, group: Sequence[int]) -> bytes:
        changes = []
        for number in group:
            piece = self.schema.pieces[number]
            change = delta.compare(number, piece, self._before.bits(piece), self._after.bits(piece))
            if change is not None:
                changes.append(self._told(change, piece))
        return delta.encode(changes, self.schema).raw

    def _told(self, change: Change, piece: Piece) -> Change:
        return change

    def decode(self, pool: ThreadPoolExecutor, objects: Sequence[bytes], image: Images) -> None:
        held = section(image)

        def apply(raw: bytes) -> None:
            for change in delta.decode(raw, self.schema, where="object"):
                piece = self.schema.pieces[change.piece]
                delta.apply(held.bits(piece), change.content, piece.kind)

        list(pool.map(apply, objects))


class Small(Ours):
    """The same for subscribers behind slow links, told of classes of old weights."""

    def _told(self, change: Change, piece: Piece) -> Change:
        return delta.smaller(change, piece, self._before.bits(piece))


class Xor:
    """Each matrix's bytes XORed, packed by zstd-1; unpacked and XORed in chunks that stay in a core's cache."""

    def __init__(self, before: Images, after: Images) -> None:
        self._before, self._after = before, after

    def encode(self, pool: ThreadPoolExecutor) -> list[bytes]:
        def pack(name: str) -> bytes:
            mask = np.bitwise_xor(_words(self._before[name]), _words(self._after[name]))
            digest(self._after[name])
            return zstandard.ZstdCompressor(level=1).compress(mask.data)

        return list(pool.map(pack, self._after))

    def decode(self, pool: ThreadPoolExecutor, objects: Sequence[bytes], image: Images) -> None:
        def apply(bits: Bits, raw: bytes) -> None:
            words, at = _words(bits), 0
            reader = zstandard.ZstdDecompressor().stream_reader(raw)
            while len(mask := np.frombuffer(reader.read(CHUNK), np.uint64)):
                words[at : at + len(mask)] ^= mask
                at += len(mask)

        list(pool.map(apply, image.values(), objects))


class Plain:
    """int32 positions and BF16 values, as they are."""

    def __init__(self, before: Images, after: Images) -> None:
        self._before, self._after = before, after

    def encode(self, pool: ThreadPoolExecutor) -> list[bytes]:
        def pack(name: str) -> bytes:
            positions = np.flatnonzero(self._before[name] != self._after[name])
            digest(self._after[name])
            return positions.astype(np.int32).tobytes() + self._after[name][positions].tobytes()

        return list(pool.map(pack, self._after))

    def decode(self, pool: ThreadPoolExecutor, objects: Sequence[bytes], image: Images) -> None:
        def apply(bits: Bits, raw: bytes) -> None:
            count = len(raw) // 6
            bits[np.frombuffer(raw, np.int32, count)] = np.frombuffer(raw, np.uint16, count, 4 * count)

        list(pool.map(apply, image.values(), objects))


def _words(bits: Bits) -> Bits:
    return bits.view(np.uint64)


SIDES: dict[str, type[Ours] | type[Xor] | type[Plain]] = {"ours": Ours, "small": Small, "XOR": Xor, "int32": Plain}
