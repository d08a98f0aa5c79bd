"""Two kinds of trouble, told apart by type: bad input (mend it) and failed machinery (retry or drop it)."""

from __future__ import annotations

import errno


class FarflungError(Exception):
    """An error for a person: what is wrong, where, and how to mend it."""

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what = what
        self.where = where
        self.mend = mend
        super().__init__(what)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        mend = f"\n  {self.mend}" if self.mend else ""
        return f"{place}{self.what}{mend}"


class BadInput(FarflungError):
    """Something that came from outside is wrong: configuration, task, model folder, request, store object."""


class InfraError(FarflungError):
    """Machinery failed (a sandbox, a sampler, a store). Never a reward: it is retried, then dropped and counted."""


class Diverged(FarflungError):
    """A loss, a gradient or a weight is not finite: what was trained is no policy any more, and no retry makes it one."""


class Stopped(FarflungError):
    """Somebody stopped it; ``mend`` says how to go on."""


class Corrupt(BadInput):
    """Bytes that do not hash, parse or fit what they claim to be."""


def disk_full(error: BaseException) -> bool:
    """Whether an error of the operating system or of SQLite, or the one it was raised from, says that no room is left."""
    if isinstance(error, FarflungError) and error.__cause__ is not None:
        return disk_full(error.__cause__)
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return type(error).__module__ == "sqlite3" and "full" in str(error)


BAD_INPUT_CODE = 2
"""What a program ends with when its input is wrong, so that whoever started it does not start it again."""

DIVERGED_CODE = 3
"""What a program that trains ends with when its training diverged."""

DISK_FULL = "the disk is full"
