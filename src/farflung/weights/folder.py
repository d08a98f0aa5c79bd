"""A folder as a store: what it holds survives a crash of the machine, and its writers may be many."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farflung.core.errors import BadInput, Corrupt
from farflung.core.process import patience
from farflung.weights.store import MAX_POINTER, SEGMENT, Conflict, Missing, StoreError, check_key, check_pointer, is_key

LOCK_SECONDS = 60.0
"""How long a writer waits for the others; each has the lock for a few file operations."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderStore:
    """A folder on a local or shared file system with flock.

    Not one of objects.py: a library for object stores has a backend for local folders too, but that neither syncs what
    it writes nor compares before it replaces, and a version that the pointer names must survive a crash of the machine.

    Bytes go to ``.tmp``, are synced, and take their name by a rename under ``.lock``, so a crash or a full disk at any
    moment leaves an object whole or absent. Each temporary file is locked by its writer for as long as that lives; what
    a crashed writer left is unlocked and is swept by the next write.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise BadInput("the store is not a folder", where=str(self.root))

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._explained(key, len(data)):
            if self._same(path, key, data):
                with self._locked():
                    if self._renewed(path, key, data):
                        return
            with self._staged(data) as staged, self._locked():
                if not self._renewed(path, key, data):
                    self._publish(staged, path)

    def get(self, key: str, max_bytes: int) -> bytes:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read(size + 1) if size <= max_bytes else b""
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise Missing("there is no such object", where=str(path)) from None
        except OSError as error:
            raise StoreError(f"cannot read: {error.strerror}", where=str(path)) from error
        if max(size, len(data)) > max_bytes:
            raise Corrupt(f"the object is larger than the {max_bytes} bytes it should have", where=str(path))
        return data

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def folders(self) -> list[str]:
        try:
            found = [entry.name for entry in os.scandir(self.root) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list: {error.strerror}", where=str(self.root)) from error
        return sorted(name for name in found if SEGMENT.fullmatch(name))

    def list(self, folder: str) -> list[str]:
        top = self._path(folder)
        found = (Path(base, name) for base, _, names in os.walk(top) for name in names)
        return sorted(filter(is_key, (path.relative_to(self.root).as_posix() for path in found)))

    def delete(self, key: str) -> None:
        with self._explained(key, 0), suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def read_pointer(self, key: str) -> bytes | None:
        try:
            return self.get(key, MAX_POINTER)
        except Missing:
            return None

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
        path = self._path(check_pointer(key, value))
        with self._explained(key, len(value)), self._staged(value) as staged, self._locked():
            if self.read_pointer(key) != expected:
                raise Conflict("the pointer has moved", where=str(path), mend="another writer is at work on this run")
            self._publish(staged, path)

    def write_note(self, key: str, data: bytes) -> None:
        path = self._path(check_pointer(key, data))
        with self._explained(key, len(data)), self._staged(data) as staged, self._locked():
            self._publish(staged, path)

    def ages(self, folder: str) -> dict[str, float]:
        written = {}
        with self._explained(folder, 0):
            for key in self.list(folder):
                with suppress(FileNotFoundError):
                    written[key] = (self.root / key).stat().st_mtime
        try:
            with self._staged(b"now") as probe:
                now = probe.stat().st_mtime
        except OSError:
            # Full, or read-only: nothing is younger than what was written last, so no age is taken for more than it is.
            now = max(written.values(), default=0.0)
        return {key: max(0.0, now - then) for key, then in written.items()}

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _same(self, path: Path, key: str, data: bytes) -> bool:
        """Whether the object is there with these bytes. Raises Conflict when it has others."""
        if not path.exists():
            return False
        if path.stat().st_size == len(data) and path.read_bytes() == data:
            return True
        raise Conflict("the object exists with other bytes", where=str(path), mend=f"objects never change: {key}")

    def _renewed(self, path: Path, key: str, data: bytes) -> bool:
        """Whether the object is there with these bytes and is young now. Call it under the lock."""
        if not self._same(path, key, data):
            return False
        try:
            os.utime(path)
        except (FileNotFoundError, PermissionError):
            return False  # another user's file is replaced instead
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The store's writers one at a time; held for a few file operations, never while bytes are written."""
        path = self.root / ".lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline, pauses = time.monotonic() + LOCK_SECONDS, patience(0.001, 0.1)
            while not _flocked(fd):
                if time.monotonic() > deadline:
                    mend = "end the process that has it, which may be stopped or on a machine that is gone (fuser, lslocks)"
                    raise StoreError(f"another writer has the lock for {LOCK_SECONDS:g} s", where=str(path), mend=mend)
                time.sleep(next(pauses))
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[Path]:
        """A durable temporary file with ``data``; it is gone afterwards unless it was published."""
        folder = self.root / ".tmp"
        _make_folder(folder)
        path = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        with self._locked():
            _sweep(folder)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _publish(self, staged: Path, path: Path) -> None:
        _make_folder(path.parent)
        os.replace(staged, path)
        _sync_folder(path.parent)

    @contextmanager
    def _explained(self, key: str, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in _FULL
            what = f"no space for {size} bytes" if full else "cannot write"
            mend = "nothing of it is visible; free some space and publish again" if full else ""
            raise StoreError(f"{what}: {error.strerror}", where=str(self.root / key), mend=mend) from error


def _flocked(fd: int) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove what crashed writers left: a live writer holds the lock of its file. Call it under the store's lock."""
    for entry in list(os.scandir(folder)):
        with suppress(FileNotFoundError, BlockingIOError, PermissionError), open(entry.path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
