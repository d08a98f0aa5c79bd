"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Write into the folder that this yields; on leaving, its bytes are made durable and it takes the name ``path``.

    If the block raises or the process dies in it, ``path`` is as it was before. A folder that was there is deleted just
    before the new one takes its name. One process at a time may write in ``path``'s parent: what a killed one left is cleared.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.chmod(0o755)
        temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
