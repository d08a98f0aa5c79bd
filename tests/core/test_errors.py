"""What an error is, whoever raised it first."""

from __future__ import annotations

import errno
import sqlite3

import pytest

from farflung.core.errors import BadInput, InfraError, disk_full


def raised_from(cause: Exception) -> InfraError:
    try:
        raise InfraError("cannot write") from cause
    except InfraError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        sqlite3.OperationalError("database or disk is full"),
        raised_from(OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_full_disk_is_known_by_all_its_names(error: Exception) -> None:
    assert disk_full(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied"),
        sqlite3.OperationalError("database is locked"),
        raised_from(OSError(errno.EIO, "Input/output error")),
        InfraError("the bucket is full"),
        ValueError("full"),
    ],
)
def test_other_trouble_is_no_full_disk(error: Exception) -> None:
    assert not disk_full(error)


def test_an_error_says_where_what_and_the_mend() -> None:
    assert str(BadInput("it is wrong", where="here", mend="set it right")) == "here: it is wrong\n  set it right"
    assert str(BadInput("it is wrong")) == "it is wrong"
