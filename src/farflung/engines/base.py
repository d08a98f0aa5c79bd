"""The engine port: what turns token ids into more token ids, and says exactly how it drew them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import Completion, GenerateRequest, Source

if TYPE_CHECKING:
    from torch import Tensor

Positions = npt.NDArray[np.int64]
"""Flat positions of elements of one stream tensor, in rising order."""


class EngineError(InfraError):
    """The engine broke while it served; the turn can go to another replica."""


class TooLong(BadInput):
    """The sequence does not fit the engine's context."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is in flight now.

    swap_seconds: how long decoding stood still for new weights; load_seconds: how long they were prepared beside it;
    refreshed: elements of prepared weights that loads wrote, all of them where a version was prepared whole.
    """

    active: int = 0
    waiting: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    swaps: int = 0
    swap_seconds: float = 0.0
    load_seconds: float = 0.0
    refreshed: int = 0


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

    async def load(
        self, version: int, weights: Mapping[str, Tensor], changed: Mapping[str, Positions] | None = None
    ) -> None:
        """Prepare ``weights`` beside the ones in use, then swap between two decode steps.

        weights: the whole version under Hugging Face names: BF16 tensors, which the engine brings into its format itself;
        or codes and scales of its format as formats/checkpoint.py lays them out, beside BF16 tensors that stay as they are.
        They must not change until this returns.

        changed: of every tensor that differs from the version that this engine loaded last, which elements do. A packed
        tensor of 4-bit codes has two positions a byte, the low nibble's first. The arrays must not change any more.
        None: nothing is known, and everything is taken anew.

        Raises BadInput, naming the tensor, and serves on what it served; then it takes the next version whole.
        """
        ...

    def forget(self, session: str) -> None:
        """The session has ended; its keys and values can go."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
