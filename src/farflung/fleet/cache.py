"""A bounded folder of files that are named by the SHA-256 of their bytes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from farflung.core.errors import BadInput
from farflung.fleet.blocking import beside

log = logging.getLogger(__name__)

DISK_SECONDS = 300.0
TEMPORARY = ".part-"
CHUNK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
Sums = tuple[int, ...]


@dataclass(slots=True)
class _Entry:
    """``sums``: of its chunks, None before it was hashed in this process."""

    size: int
    sums: Sums | None
    users: int = 0


class Decayed(OSError):
    """A cached file does not have the bytes that were written into it."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A file that is kept while this is in use."""

    size: int
    _fd: int
    _sums: Sums

    def chunk(self, number: int) -> bytes:
        """CHUNK bytes, fewer at the end, and sure to be those that were cached. Raises Decayed, OSError."""
        part = os.pread(self._fd, CHUNK, number * CHUNK)
        if len(part) != min(CHUNK, self.size - number * CHUNK) or xxhash.xxh3_64_intdigest(part) != self._sums[number]:
            raise Decayed(f"chunk {number} is damaged in the cache")
        return part


class HashCache:
    """At most ``limit_bytes`` in one folder; the least recently used go first, none while it is being read.

    A file takes its name by a rename once it is written whole. Nothing is synced: after a restart each file counts only
    once its bytes have been hashed again, and what is read later is held against sums of its chunks. One process has the
    folder; every method is called on one event loop.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Takes the folder and what is in it. Raises BadInput."""
        if limit_bytes < 1:
            raise BadInput(f"a cache of {limit_bytes} bytes", where=str(folder), mend="give it some gigabytes")
        self.limit = limit_bytes
        self.used = 0
        self._folder = folder
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
        except BlockingIOError:
            self.close()
            raise BadInput("another mirror uses this cache", where=str(folder), mend="give each its own") from None
        except OSError as error:
            self.close()
            raise BadInput(f"cannot use the cache: {error.strerror}", where=str(folder)) from error

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    @contextmanager
    def open(self, digest: str) -> Iterator[Cached | None]:
        """The file; None unless it is there and its bytes have been checked."""
        entry = self._entries.get(digest)
        if entry is None or entry.sums is None:
            yield None
            return
        try:
            fd = os.open(self._folder / digest, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            log.warning("%s is gone from the cache: %s", digest, error)
            self.drop(digest)
            yield None
            return
        if os.fstat(fd).st_size != entry.size:
            log.warning("%s has another length in the cache", digest)
            os.close(fd)
            self.drop(digest)
            yield None
            return
        self._entries.move_to_end(digest)
        entry.users += 1
        try:
            with suppress(OSError):
                os.utime(fd)  # so that the order of use outlives a restart
            yield Cached(entry.size, fd, entry.sums)
        finally:
            os.close(fd)
            entry.users -= 1

    async def recheck(self, digest: str) -> bytes | None:
        """The bytes of a file that has not been read since the start. None if there is none; a wrong one is removed."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        entry.users += 1
        try:
            data = await beside((self._folder / digest).read_bytes, seconds=DISK_SECONDS)
            if await digest_of(data) == digest:
                entry.sums = await beside(lambda: _sums(data), seconds=DISK_SECONDS)
                return data
            log.warning("%s is damaged in the cache", digest)
        except OSError as error:
            log.warning("%s cannot be read from the cache: %s", digest, error)
        finally:
            entry.users -= 1
        self.drop(digest)
        return None

    async def add(self, digest: str, data: bytes) -> bool:
        """Keep bytes that have this hash. False if no room is left, on the disk or beside what is being read."""
        if not self._make_room(len(data)):
            return False
        self.used += len(data)
        try:
            sums = await beside(lambda: self._write(digest, data), seconds=DISK_SECONDS)
        except BaseException as error:
            self.used -= len(data)
            if not isinstance(error, OSError):
                raise
            log.warning("%s could not be cached: %s", digest, error)
            return False
        if (before := self._entries.pop(digest, None)) is not None:
            self.used -= before.size
        self._entries[digest] = _Entry(len(data), sums)
        return True

    def drop(self, digest: str) -> None:
        """Remove a file; one that is not there is fine."""
        if (entry := self._entries.pop(digest, None)) is not None:
            self.used -= entry.size
            with suppress(OSError):
                os.unlink(self._folder / digest)

    def _make_room(self, size: int) -> bool:
        for digest in [digest for digest, entry in self._entries.items() if not entry.users]:
            if self.used + size <= self.limit:
                break
            self.drop(digest)
        return self.used + size <= self.limit

    def _write(self, digest: str, data: bytes) -> Sums:
        part = self._folder / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            part.write_bytes(data)
            os.replace(part, self._folder / digest)
            return _sums(data)
        finally:
            part.unlink(missing_ok=True)

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.startswith(TEMPORARY):
                os.unlink(entry.path)
            elif _DIGEST.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                about = entry.stat()
                found.append((about.st_mtime, entry.name, about.st_size))
        for _, name, size in sorted(found):
            self._entries[name] = _Entry(size, None)
            self.used += size
        self._make_room(0)


def _sums(data: bytes) -> Sums:
    """xxh3-64 of each chunk: against decay, not against malice."""
    view = memoryview(data)
    return tuple(xxhash.xxh3_64_intdigest(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK))


async def digest_of(data: bytes) -> str:
    """SHA-256 in hexadecimal, beside the event loop."""
    return await beside(lambda: hashlib.sha256(data).hexdigest(), seconds=DISK_SECONDS)
