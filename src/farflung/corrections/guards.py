"""Sequence guards: factors for whole sequences that are too far from the trainer's policy. All are off by default.

A guard looks at the sampled tokens of a sequence that teach, those with an advantage, so it depends on what was drawn; it
multiplies the whole update of every token of the sequence, the centring term too. A sequence with factor 0 teaches nothing
and stays in the denominator. Whole sequences must come in one call: of a part, a guard knows the mean of that part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Guards:
    """Which guards are on. l is the mean of log p - log q over a sequence's sampled tokens with an advantage A.

    - gspo (low, high): the factor exp(l), but 0 where A > 0 and exp(l) > 1 + high, or A < 0 and exp(l) < 1 - low (GSPO,
      arXiv 2507.18071, equations 5 and 7, with about 3e-4 and 4e-4). It stands in for token weights: use it with f = 1.
    - geometric (low, high): 0 where exp(l) is outside, about [0.99, 1.01] (geometric sequence masking: Liu, Li et al.
      2025, "When speed kills stability").
    - opsm delta: 0 where A < 0 and -l > delta (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, equation 9).
    - max_staleness: 0 where a token was sampled more than this many versions ago.
    """

    gspo: tuple[float, float] | None = None
    geometric: tuple[float, float] | None = None
    opsm: float | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.gspo is not None and not (0 <= self.gspo[0] <= 1 and self.gspo[1] >= 0):
            raise BadInput(f"gspo is {list(self.gspo)}; it needs 0 <= low <= 1 and high >= 0", where="guard")
        if self.geometric is not None and not 0 <= self.geometric[0] < self.geometric[1]:
            raise BadInput(f"geometric is {list(self.geometric)}; it needs 0 <= low < high", where="guard")
        if self.opsm is not None and not self.opsm >= 0:
            raise BadInput(f"opsm is {self.opsm}; it must be at least 0", where="guard")
        if self.max_staleness is not None and not self.max_staleness >= 0:
            raise BadInput(f"max_staleness is {self.max_staleness}; it must be at least 0", where="guard")

    def __bool__(self) -> bool:
        return self != Guards()

    @torch.no_grad()
    def factors(self, log_ratio: Tensor, sequences: Tensor, advantages: Tensor, staleness: Tensor | None) -> Tensor:
        """Each token's factor, [N], from its sequence.

        log_ratio [N]: log p - log q of the sampled tokens; sequences [N] int64: to which each belongs, counted from 0;
        advantages [N]: 0 for tokens that must not teach, of one sign within a sequence; staleness [N] int, needed by
        ``max_staleness`` alone, which looks at all tokens. Raises BadInput.
        """
        count = int(sequences.max()) + 1 if len(sequences) else 0
        taught = advantages != 0
        lengths = torch.bincount(sequences[taught], minlength=count).clamp(min=1)
        mean = log_ratio.new_zeros(count).index_add_(0, sequences[taught], log_ratio[taught]) / lengths
        least, most = (
            advantages.new_zeros(count).scatter_reduce_(0, sequences, advantages, f"a{m}") for m in ("min", "max")
        )
        mixed = (least < 0) & (most > 0)
        if mixed.any():
            at = int(torch.nonzero(mixed)[0])
            raise BadInput(
                f"sequence {at} has advantages {least[at]:g} and {most[at]:g}; a guard needs one sign", where="guard"
            )
        advantage = least + most
        factor = torch.ones_like(mean)
        if self.gspo is not None:
            ratio, (low, high) = mean.exp(), self.gspo
            clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
            factor = torch.where(clipped, 0.0, ratio)
        if self.geometric is not None:
            ratio, (low, high) = mean.exp(), self.geometric
            factor = torch.where((ratio < low) | (ratio > high), 0.0, factor)
        if self.opsm is not None:
            factor = torch.where((advantage < 0) & (-mean > self.opsm), 0.0, factor)
        if self.max_staleness is not None:
            if staleness is None:
                raise BadInput("max_staleness needs each token's staleness", where="guard")
            oldest = staleness.new_zeros(count).scatter_reduce_(0, sequences, staleness, "amax")
            factor = torch.where(oldest > self.max_staleness, 0.0, factor)
        return factor[sequences]
