"""Supports on a device: for each position, the candidates that the sampler drew from, as compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Supports:
    """Row t holds candidates ``ids[offsets[t]:offsets[t+1]]`` with log-probabilities (base e) that sum to one.

    ids [n] int64, logprobs [n] float, offsets [rows + 1] int64. ``rows`` [n] says which row an entry belongs to.
    """

    ids: Tensor
    logprobs: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.dim() != 1 or self.offsets.dim() != 1:
            raise BadInput(
                f"ids {tuple(self.ids.shape)}, log-probs {tuple(self.logprobs.shape)}, "
                f"offsets {tuple(self.offsets.shape)}",
                where="supports",
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """Candidates per row, [rows] int64."""
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:
        """The row of every entry, [n] int64."""
        return torch.repeat_interleave(self.sizes)

    def select(self, rows: Tensor) -> Supports:
        """The given rows, in the given order, as their own Supports."""
        sizes = self.sizes[rows]
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device=sizes.device)
        torch.cumsum(sizes, 0, out=offsets[1:])
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], sizes)
        entries = torch.arange(len(shift), device=shift.device) + shift
        return Supports(self.ids[entries], self.logprobs[entries], offsets)

    def find(self, sampled: Tensor) -> Tensor:
        """Where each row's sampled token stands among the entries, [rows] int64. Raises BadInput if one is missing."""
        entries = torch.nonzero(self.ids == torch.repeat_interleave(sampled, self.sizes)).squeeze(1)
        found = self.rows[entries]
        if len(found) != len(self) or not torch.equal(found, torch.arange(len(self), device=found.device)):
            seen = torch.bincount(found, minlength=len(self))
            row = int(torch.nonzero(seen != 1)[0])
            raise BadInput(
                f"row {row}'s sampled token {int(sampled[row])} is {int(seen[row])} times among its candidates",
                where="supports",
            )
        return entries
