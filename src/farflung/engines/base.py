"""The engine port: what turns token ids into more token ids, and says exactly how it drew them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import Completion, GenerateRequest, Source

if TYPE_CHECKING:
    from torch import Tensor


class EngineError(InfraError):
    """The engine broke while it served; the turn can go to another replica."""


class TooLong(BadInput):
    """The sequence does not fit the engine's context."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is in flight now."""

    active: int = 0
    waiting: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    swaps: int = 0
    swap_seconds: float = 0.0


class Engine(Protocol):
    """Serves many sessions at once, one turn of a session at a time.

    ``source`` names pool, replica and formats; ``version`` is the policy version that the next token is sampled from.
    """

    source: Source

    @property
    def version(self) -> int: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Cancelling the call frees its place. Raises EngineError, TooLong."""
        ...

    async def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Prepare ``weights`` (Hugging Face names, BF16) beside the ones in use, then swap between two decode steps."""
        ...

    def forget(self, session: str) -> None:
        """The session has ended; its keys and values can go."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
