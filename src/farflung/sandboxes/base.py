"""The sandbox port: a place where commands of a model run and can hurt nothing outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from farflung.core.errors import InfraError


class SandboxError(InfraError):
    """The sandbox could not start or broke by itself. Try again; never a reward."""


class SandboxDied(Exception):
    """What ran inside used up the sandbox's limits (memory, processes) or killed it: a result of the policy."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that ended. ``output`` is stdout and stderr in order, cut at the asked bytes; a non-zero ``exit_code``
    is a result, not an error. ``killed`` says why the command was stopped, if it was."""

    exit_code: int
    output: str
    seconds: float
    killed: Literal["time", "output"] | None = None


class Sandbox(Protocol):
    """One isolated working tree with its processes; state stays between commands. Safe to close twice."""

    async def exec(self, command: str, *, seconds: float, max_bytes: int) -> CommandResult:
        """Run ``command`` with bash in the working tree. Raises SandboxDied or SandboxError."""
        ...

    async def write(self, files: Mapping[str, str]) -> None:
        """Create or replace files (relative paths) from outside."""
        ...

    async def read_tree(self, *, max_bytes: int = 4 << 20) -> dict[str, bytes]:
        """Regular files of the working tree (relative path -> content), without caches and .git; symlinks are left out."""
        ...

    async def close(self) -> None:
        """Kill everything inside and free it."""
        ...


class SandboxFactory(Protocol):
    async def open(self, files: Mapping[str, str]) -> Sandbox:
        """A fresh sandbox whose working tree is ``files``. Raises SandboxError after ``start_seconds``."""
        ...
