"""A stream's bits on this host: in memory, or in a file that outlives the process and is repaired after a crash."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import psutil

from farflung.core.errors import BadInput, Corrupt
from farflung.weights.delta import HASH
from farflung.weights.elements import Bits, from_bits
from farflung.weights.schema import Schema
from farflung.weights.store import StoreError
from farflung.weights.strict import count, loads, need, sha256

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ALIGN = 64


class Image:
    """A version in one format: an array for each tensor of its schema, and the hash of each piece.

    ``torn``: numbers of the pieces whose bits may not have the hashes that the version has.
    """

    def __init__(
        self, version: int, schema: Schema, arrays: Mapping[str, Bits], hashes: list[bytes], torn: Iterable[int] = ()
    ) -> None:
        self.version = version
        self.schema = schema
        self.arrays = arrays
        self.hashes = hashes
        self.torn = set(torn)

    def piece(self, number: int) -> Bits:
        """A piece's bits, a view."""
        piece = self.schema.pieces[number]
        return self.arrays[piece.tensor][piece.items]

    @property
    def root(self) -> str:
        return self.schema.root(self.hashes)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors under every name, tied ones too, over the same memory: treat them as read-only."""
        found = {name: from_bits(self.arrays[name], t.kind, t.shape) for name, t in self.schema.tensors.items()}
        return found | {name: found[owner] for name, owner in self.schema.tied.items()}


class Room:
    """Where images lie: this process's memory."""

    shared = False
    """Whether all images of a schema lie in the same place."""

    def arrays(self, schema: Schema) -> dict[str, Bits]:
        """Arrays of any content. Raises StoreError when there is no room for them."""
        _check_size(schema)
        return {name: np.zeros(t.nbytes // t.kind.dtype.itemsize, t.kind.dtype) for name, t in schema.tensors.items()}

    def load(self) -> Image | None:
        """What an earlier process left, all of it torn as far as is known; None for nothing."""
        return None

    def save(self, image: Image) -> None:
        """Keep the image for the next process: its bits first, then what they are."""

    def close(self) -> None:
        """Let another subscriber have the place."""


class Folder(Room):
    """A folder for one subscriber. ``bits-ROOT`` holds the arrays, ``state.json`` which version they are when not torn.

    It is locked from its first use for as long as this object lives or until ``close``; a second subscriber that uses it
    meanwhile gets BadInput. Bits are changed in place, so a process that dies half way leaves some pieces as they were and some as they will be;
    ``state.json`` moves only after the bits are synced. Hashes tell afterwards which piece is which.
    """

    shared = True

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._memory: np.memmap[Any, np.dtype[np.uint8]] | None = None
        self._lock: IO[bytes] | None = None

    def arrays(self, schema: Schema) -> dict[str, Bits]:
        _check_size(schema)
        offsets, size = _layout(schema)
        path = self.folder / f"bits-{schema.root([])[:16]}"
        self._take()
        try:
            _take_room(path, max(1, size))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            what = f"no space for {size} bytes of weights" if full else f"cannot write: {error.strerror}"
            raise StoreError(what, where=str(path), mend="free some space" if full else "") from error
        self._memory = np.memmap(path, np.uint8, mode="r+")
        return {
            name: self._memory[offsets[name] : offsets[name] + t.nbytes].view(t.kind.dtype)
            for name, t in schema.tensors.items()
        }

    def load(self) -> Image | None:
        """A state that cannot be read is worth nothing: it is said, and the next version is fetched anew."""
        self._take()
        path = self.folder / "state.json"
        try:
            data = loads(path.read_bytes())
            need(set(data) == {"version", "root", "schema", "hashes"}, f"its fields are {sorted(data)}")
            version, root = count(data["version"]), sha256(data["root"])
            schema = Schema.decode(json.dumps(data["schema"]).encode(), str(path))
            raw = bytes.fromhex(data["hashes"])
            need(len(raw) == HASH * len(schema.pieces), f"{len(raw)} bytes of hashes")
            hashes = [raw[i : i + HASH] for i in range(0, len(raw), HASH)]
            need(schema.root(hashes) == root, "its hashes do not give its root")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, Corrupt) as error:
            log.warning("%s: not an image's state, so the weights are fetched anew: %s", path, str(error))
            return None
        return Image(version, schema, self.arrays(schema), hashes, range(len(hashes)))

    def save(self, image: Image) -> None:
        data = {
            "version": image.version,
            "root": image.root,
            "schema": json.loads(image.schema.encode()),
            "hashes": b"".join(image.hashes).hex(),
        }
        try:
            if self._memory is not None:
                self._memory.flush()
            staged = self.folder / "state.json.new"
            with open(staged, "wb") as file:
                file.write(json.dumps(data).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, self.folder / "state.json")
        except OSError as error:
            raise StoreError(f"cannot write: {error.strerror}", where=str(self.folder)) from error
        for old in self.folder.glob("bits-*"):
            if old.name != f"bits-{image.schema.root([])[:16]}":
                old.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = self._memory = None

    def _take(self) -> None:
        """Have the folder alone: two who change its bits would hand out each other's."""
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / ".lock", "ab")  # noqa: SIM115 (open for as long as this object lives)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise
        except BlockingIOError:
            mend = "give each subscriber a folder of its own, or close the other one"
            raise BadInput("another subscriber uses this folder", where=str(self.folder), mend=mend) from None
        except OSError as error:
            raise StoreError(f"cannot write: {error.strerror}", where=str(self.folder)) from error
        self._lock = lock


def _check_size(schema: Schema) -> None:
    """A schema comes from outside: what it asks for is held against what the machine has."""
    if schema.nbytes > psutil.virtual_memory().total:
        raise StoreError(f"the weights take {schema.nbytes} bytes, more than this machine's memory", where="image")


def _take_room(path: Path, size: int) -> None:
    """Bring a file to a size whose every block is there: a full disk is an error now, and not a signal at a later write."""
    with open(path, "a+b") as file:
        # Asked first, as an allocation that fails half way keeps what it got.
        if size - os.fstat(file.fileno()).st_blocks * 512 > shutil.disk_usage(path).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(file.fileno(), 0, size)
        os.ftruncate(file.fileno(), size)


def _layout(schema: Schema) -> tuple[dict[str, int], int]:
    """Where each tensor begins in the file, and the file's size."""
    offsets: dict[str, int] = {}
    at = 0
    for name, tensor in schema.tensors.items():
        offsets[name] = at
        at += tensor.nbytes + -tensor.nbytes % ALIGN
    return offsets, at
