"""Advantages from the rewards of one group (the trajectories of one prompt)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from farflung.core.errors import BadInput

Baseline = Literal["group", "others"]

EQUAL = 1e-9
"""Rewards whose spread is at most this part of the largest are equal: dividing by it would make rounding an advantage."""

LARGEST = 1e300
"""A sum of larger rewards could overflow."""


def group_advantages(rewards: Sequence[float], *, std: bool = False, baseline: Baseline = "group") -> list[float]:
    """Each reward minus a baseline, over the group's (population) standard deviation if asked.

    - "group": the mean of all, as in GRPO (Shao et al., arXiv 2402.03300, section 4.1.2, with ``std``) and, without
      ``std``, Dr. GRPO (Liu et al., arXiv 2503.20783).
    - "others": the mean of the other members, leave-one-out (Kool et al. 2019; RLOO, Ahmadian et al., arXiv 2402.14740):
      G / (G - 1) times the former, unbiased for G members.

    Exactly 0 for every member when all rewards are equal, but for rounding: such a group has nothing to teach and needs no
    forward pass. Rewards are any sequence of numbers, a tensor [G] too. Raises BadInput for one that is not finite.
    """
    if baseline not in ("group", "others"):
        raise BadInput(f"unknown baseline {baseline!r}", where="advantages", mend="valid baselines: group, others")
    try:
        values = [float(reward) for reward in rewards]
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"rewards must be a sequence of numbers: {error}", where="advantages") from error
    for place, value in enumerate(values):
        if not abs(value) <= LARGEST:
            raise BadInput(f"reward {place} is {value}; rewards must be finite", where="advantages")
    if not values or max(values) - min(values) <= EQUAL * max(map(abs, values)):
        return [0.0] * len(values)
    count = len(values)
    mean = math.fsum(values) / count
    centred = [value - mean for value in values]
    scale = count / (count - 1) if baseline == "others" else 1.0
    if std:
        scale /= math.hypot(*centred) / math.sqrt(count)  # hypot: no square of a small reward underflows
    return [scale * c for c in centred]
