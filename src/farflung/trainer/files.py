"""Folders that are there whole or not at all, and tensors in them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

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


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file of CPU tensors. Raises OSError when the system refuses (a full disk), as other writes do."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
