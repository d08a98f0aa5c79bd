"""Advantages from the rewards of one group (the trajectories of one prompt)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Baseline = Literal["group", "others"]


def group_advantages(rewards: Sequence[float], *, std: bool = False, baseline: Baseline = "group") -> list[float]:
    """Each reward minus a baseline, over the group's (population) standard deviation if asked.

    - "group": the mean of all, as in GRPO (Shao et al., arXiv 2402.03300, section 4.1.2, with ``std``) and, without
      ``std``, Dr. GRPO (Liu et al., arXiv 2503.20783).
    - "others": the mean of the other members, leave-one-out (Kool et al. 2019; RLOO, Ahmadian et al., arXiv 2402.14740):
      G / (G - 1) times the former, unbiased for G members.

    Exactly 0 for every member when all rewards are equal: such a group has nothing to teach and needs no forward pass.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = sum(rewards) / count
    centred = [reward - mean for reward in rewards]
    scale = count / (count - 1) if baseline == "others" else 1.0
    if std:
        scale /= math.hypot(*centred) / math.sqrt(count)  # hypot: no square of a small reward underflows
    return [scale * c for c in centred]
