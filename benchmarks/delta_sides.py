"""Ways to send a step of training, for delta.py: each makes bytes of two images, and changes an image by them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import zstandard
from delta_weights import Images

from farflung.weights import delta
from farflung.weights.elements import Bits, digest
from farflung.weights.encoding import Encoder, Job, Work
from farflung.weights.manifest import Part
from farflung.weights.schema import Schema, TensorType
from farflung.weights.streams import BF16, Run, Section, schema_of


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads that stay, for all sides, as a publisher's and a subscriber's do."""
    return ThreadPoolExecutor(threads)


def section_of(images: Images) -> Section:
    """Matrices as publisher and subscriber hold them; flat ones, as their shapes do not matter here."""
    return Section({name: Run(TensorType(BF16, bits.shape), 0, bits) for name, bits in images.items()})


class Ours:
    """The objects that a publisher stores, and what a subscriber does with them."""

    def __init__(self, before: Images, after: Images, *, small: bool = False) -> None:
        held, section = section_of(before), section_of(after)
        self.schema: Schema = schema_of([section], {})
        numbers = range(len(self.schema.pieces))
        hashes = [digest(held.bits(piece)) for piece in self.schema.pieces]
        self._encoders: dict[int, Encoder] = {}
        self._job = Job(section, held, hashes, self.schema, numbers, whole=False, small=small)

    def encode(self, threads: int) -> list[bytes]:
        work, objects = self._encoded(threads)
        return [objects[part.sha256] for part in work.parts]

    def _encoded(self, threads: int) -> tuple[Work, dict[str, bytes]]:
        objects: dict[str, bytes] = {}

        def put(raw: bytes) -> Part:
            part = Part(str(id(raw)), len(raw))  # a publisher hashes here, and stores
            objects[part.sha256] = raw
            return part

        if threads not in self._encoders:  # a publisher has one for life
            self._encoders[threads] = Encoder(threads)
        return self._encoders[threads].encode(self._job, put), objects

    def decode(self, threads: int, objects: Sequence[bytes], image: Images) -> None:
        held = section_of(image)

        def apply(raw: bytes) -> None:
            for change in delta.read(raw, self.schema, where="object", ranked=True).changes(packed=True):
                piece = self.schema.pieces[change.piece]
                delta.apply(held.bits(piece), change.content, piece.kind)

        list(pool(threads).map(apply, objects))


class Small(Ours):
    """The same for subscribers behind slow links, told of classes of old weights; encoding makes both forms."""

    def __init__(self, before: Images, after: Images) -> None:
        super().__init__(before, after, small=True)

    def encode(self, threads: int) -> list[bytes]:
        work, objects = self._encoded(threads)
        return [objects[part.sha256] for part in work.small]


class Xor:
    """Each matrix's bytes XORed, packed by zstd-1; unpacked and XORed in chunks that stay in a core's cache."""

    chunk = 2 << 20

    def __init__(self, before: Images, after: Images) -> None:
        self._before, self._after = before, after

    def encode(self, threads: int) -> list[bytes]:
        def pack(name: str) -> bytes:
            mask = np.bitwise_xor(_words(self._before[name]), _words(self._after[name]))
            digest(self._after[name])
            return zstandard.ZstdCompressor(level=1).compress(mask.data)

        return list(pool(threads).map(pack, self._after))

    def decode(self, threads: int, objects: Sequence[bytes], image: Images) -> None:
        def apply(bits: Bits, raw: bytes) -> None:
            words, at = _words(bits), 0
            reader = zstandard.ZstdDecompressor().stream_reader(raw)
            while len(mask := np.frombuffer(reader.read(self.chunk), np.uint64)):
                words[at : at + len(mask)] ^= mask
                at += len(mask)

        list(pool(threads).map(apply, image.values(), objects))


class WholeXor(Xor):
    """The same, unpacked a whole matrix at a time."""

    def decode(self, threads: int, objects: Sequence[bytes], image: Images) -> None:
        def apply(bits: Bits, raw: bytes) -> None:
            words = _words(bits)
            words ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(raw), np.uint64)

        list(pool(threads).map(apply, image.values(), objects))


class Plain:
    """int32 positions and BF16 values, as they are."""

    def __init__(self, before: Images, after: Images) -> None:
        self._before, self._after = before, after

    def encode(self, threads: int) -> list[bytes]:
        def pack(name: str) -> bytes:
            positions = np.flatnonzero(self._before[name] != self._after[name])
            digest(self._after[name])
            return positions.astype(np.int32).tobytes() + self._after[name][positions].tobytes()

        return list(pool(threads).map(pack, self._after))

    def decode(self, threads: int, objects: Sequence[bytes], image: Images) -> None:
        def apply(bits: Bits, raw: bytes) -> None:
            count = len(raw) // 6
            bits[np.frombuffer(raw, np.int32, count)] = np.frombuffer(raw, np.uint16, count, 4 * count)

        list(pool(threads).map(apply, image.values(), objects))


def _words(bits: Bits) -> Bits:
    return bits.view(np.uint64)


SIDES: dict[str, type[Ours | Xor | Plain]] = {
    "ours": Ours,
    "small": Small,
    "XOR": Xor,
    "XOR all": WholeXor,
    "int32": Plain,
}
