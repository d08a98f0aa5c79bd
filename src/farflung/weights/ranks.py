"""Processes that publish together, each its own part of the model: who they are and how they tell each other small things."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from farflung.core.errors import InfraError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")


class Ranks(Protocol):
    """``rank`` of ``size`` processes that make the same calls in the same order. Rank 0 writes manifest and pointer."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank; every rank gets it."""
        ...


class Alone:
    """One process that has the whole model."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


ALONE = Alone()


def together(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Every rank's result, which is plain JSON data. What one rank meets, all raise, so that none waits for it."""
    if ranks.size == 1:
        return [work()]
    problem: Exception | None = None
    answer: dict[str, Any] = {}
    try:
        answer = {"result": work()}
    except Exception as error:
        problem, answer = error, {"error": f"{type(error).__name__}: {error}"}
    found = [json.loads(raw) for raw in ranks.gather(json.dumps(answer).encode())]
    if problem is not None:
        raise problem
    for rank, other in enumerate(found):
        if "error" in other:
            raise InfraError(f"rank {rank} could not publish: {other['error']}", where=f"rank {ranks.rank}")
    return [other["result"] for other in found]


class TorchRanks:
    """The ranks of a torch.distributed group. Bytes travel as tensors: nothing is pickled."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch
        import torch.distributed as dist

        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def gather(self, data: bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        length = torch.tensor([len(data)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(max(1, longest), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        mine = mine.to(self._device)
        all_of_them = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [tensor[: int(n)].cpu().numpy().tobytes() for tensor, n in zip(all_of_them, lengths, strict=True)]
