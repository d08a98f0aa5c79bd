"""What an agent needs of the fleet: somebody who samples the next turn."""

from __future__ import annotations

from typing import Protocol

from farflung.core.sampling import Completion, GenerateRequest


class Sampler(Protocol):
    async def generate(self, request: GenerateRequest) -> Completion:
        """One turn. Raises InfraError when no sampler could serve it in time, BadInput when none ever will."""
        ...

    async def forget(self, session: str) -> None:
        """The session has ended."""
        ...
