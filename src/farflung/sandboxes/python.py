"""The Python that runs inside sandboxes: found once, with the program inside compiled for it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farflung.sandboxes import inside
from farflung.sandboxes.base import SandboxError

SYSTEM = Path("/usr/bin/python3")
COMPILE = """
import importlib._bootstrap_external as b, os, sys, unittest
code = compile(sys.stdin.read(), "inside.py", "exec", dont_inherit=True, optimize=2)
os.write(1, b._code_to_timestamp_pyc(code))
"""


@dataclass(frozen=True, slots=True)
class Python:
    """``executable`` lies below ``prefix``. ``program`` is a descriptor of the compiled ``inside.py``, open for good."""

    executable: Path
    prefix: Path
    program: int

    def argv(self, tree: str, *, file_size: int, processes: int = 0, memory: int = 0, scratch: str = "") -> list[str]:
        """The command line of the program inside; it must inherit ``program``."""
        start = [str(self.executable), "-I", "-S", "-B", "-X", "utf8", f"/proc/self/fd/{self.program}"]
        return [*start, tree, str(file_size), str(processes), str(memory), scratch]


@cache
def find_python() -> Python:
    """The system's Python where it has our version (distributions build it to start fast), else the one we run on.

    Raises SandboxError when neither runs.
    """
    own = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    choices = [(own / "bin" / "python3", own)]
    if SYSTEM.resolve().name == version:
        choices.insert(0, (SYSTEM, Path("/usr")))
    for executable, prefix in choices:
        if program := _compile(executable):
            fd = os.memfd_create("farflung-inside", os.MFD_CLOEXEC)
            os.write(fd, program)
            return Python(executable, prefix, fd)
    raise SandboxError(f"no {version} with unittest in /usr/bin or {own / 'bin'}", where="sandbox")


def _compile(executable: Path) -> bytes:
    """inside.py as a .pyc for that interpreter: 8 ms less at every start. Empty when it cannot run."""
    source = Path(inside.__file__).read_bytes()
    try:
        done = subprocess.run(
            [executable, "-I", "-S", "-c", COMPILE], input=source, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
