"""Advantages from the rewards of one group (the trajectories of one prompt)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], *, std: bool = False) -> list[float]:
    """Each reward minus the group's mean, over the group's (population) standard deviation if asked.

    Exactly 0 for every member when all rewards are equal: such a group has nothing to teach and needs no forward pass.
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not std:
        return centred
    spread = math.hypot(*centred) / math.sqrt(len(centred))  # hypot: no square of a small reward underflows
    return [c / spread for c in centred]
