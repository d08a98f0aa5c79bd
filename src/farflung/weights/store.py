"""The store port: immutable objects that appear whole or not at all, and swappable pointers."""

from __future__ import annotations

import re
from typing import Protocol

from farflung.core.errors import BadInput, InfraError

MAX_POINTER = 4096
SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class StoreError(InfraError):
    """The store could not do its work (a full disk, no permission, no network); the same call may succeed later."""


class Missing(BadInput):
    """A key or a version that the store does not hold: never written, or pruned."""


class Conflict(BadInput):
    """Someone else wrote there first: an object with other bytes, or a pointer that has moved."""


class Store(Protocol):
    """Where versions lie. Keys are segments of ``[A-Za-z0-9._-]`` joined by "/"; a segment starts with no dot or dash.

    Objects are immutable and durable when ``put`` returns. A pointer is a small value that moves by compare-and-swap, a
    note one that anybody overwrites; their keys are never used for objects. Every method raises StoreError when the
    machinery fails; a write that raised it may have happened all the same, and can be tried again.
    """

    def put(self, key: str, data: bytes) -> None:
        """Create an object. The same bytes again are fine, and make it young; raises Conflict when it exists with others."""
        ...

    def get(self, key: str, max_bytes: int) -> bytes:
        """Read an object whole. Raises Missing, and Corrupt when it is larger than ``max_bytes``."""
        ...

    def exists(self, key: str) -> bool: ...

    def folders(self) -> list[str]:
        """The names of the store's top folders, sorted: a weight store's runs."""
        ...

    def list(self, folder: str) -> list[str]:
        """Every key below a folder (``"a/b"`` holds ``"a/b/c"`` but not ``"a/bc"``), sorted.

        What others left there under names that are no keys, as file systems and their tools do, is passed over.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is fine."""
        ...

    def read_pointer(self, key: str) -> bytes | None:
        """The pointer's value, None before its first swap."""
        ...

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
        """Set the pointer if it still holds ``expected`` (None: if it does not exist). Raises Conflict otherwise."""
        ...

    def write_note(self, key: str, data: bytes) -> None:
        """Set an advisory value of at most MAX_POINTER bytes, whatever was there; ``read_pointer`` reads it."""
        ...

    def ages(self, folder: str) -> dict[str, float]:
        """Seconds since each key below a folder was last written, all by the store's own clock: no machine's matters."""
        ...


def check_key(key: str) -> str:
    """Returns the key. Raises BadInput for one that could leave the store or clash with its own files."""
    if not is_key(key):
        raise BadInput(f"{key!r} is not a store key", mend="use letters, digits, '_', '-', '.', joined by '/'")
    return key


def is_key(name: str) -> bool:
    return all(SEGMENT.fullmatch(segment) for segment in name.split("/"))


def check_name(name: str, what: str) -> str:
    """Returns the name, of ``what``. Raises BadInput for one that is not a single segment of a key."""
    if not SEGMENT.fullmatch(name):
        mend = "use letters, digits, '_', '-' and '.', and begin with neither dot nor dash"
        raise BadInput(f"{name!r} is not the name of a {what}", mend=mend)
    return name


def check_pointer(key: str, value: bytes) -> str:
    """Returns the key. Raises BadInput for one that is no key, or a value too large for a pointer or a note."""
    if len(value) > MAX_POINTER:
        raise BadInput(f"a pointer of {len(value)} bytes; at most {MAX_POINTER} fit", where=key)
    return check_key(key)
