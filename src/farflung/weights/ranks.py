"""Processes that publish together, each its own part of the model: who they are and how they tell each other small things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
