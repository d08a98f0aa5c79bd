"""What a run's rows say: where it started, how far it came, where it ended, and whether and when it collapsed.

Three signs, each on means over a window of updates:

    kl         the KL stands above three times its start
    reward     the reward stands below its start
    gradient   the gradient norm stands above twenty times its start, or the share of malformed answers above its start
               by a fifth of all answers

A run has collapsed when two of the three stand until its end; the step is the first update from which they do. One alone is
no collapse: a policy that learns becomes surer of itself and moves away from its samplers, and a reward may dip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farflung.core.metrics import UpdateMetrics

KL_GROWTH = 3.0
GRADIENT_GROWTH = 20.0
MALFORMED = 0.2


@dataclass(frozen=True, slots=True)
class Signs:
    """One run. Rewards are shares of right answers; a KL is NaN where no token was measured; steps are None for never.

    start: over the batches that the first policy sampled; best and final: over a window of updates.
    """

    updates: int
    start: float
    best: float
    final: float
    kl_start: float
    kl_final: float
    kl_step: int | None
    reward_step: int | None
    gradient_step: int | None
    collapse_step: int | None

    @property
    def kl_growth(self) -> float:
        return self.kl_final / self.kl_start if self.kl_start else math.nan


def read_signs(rows: Sequence[UpdateMetrics], *, fresh: int, window: int) -> Signs:
    """rows: a run's updates from the first on, at least one; the first policy sampled the first one and the ``fresh`` after.

    The start of KL, gradient and format errors is the window that begins with the last of these: before, batches are
    younger than they will ever be again.
    """
    first = min(fresh, len(rows) - 1)
    settled = min(first + window - 1, len(rows) - 1)
    start = mean([row.all.reward for row in rows[: first + 1]])
    reward = smooth([row.all.reward for row in rows], window)
    kl = smooth([row.all.kl if row.all.tokens else math.nan for row in rows], window)
    gradient = smooth([row.grad_norm for row in rows], window)
    malformed = smooth([row.format_errors for row in rows], window)
    signs = [
        (
            kl[at] > KL_GROWTH * kl[settled],
            reward[at] < start,
            gradient[at] > GRADIENT_GROWTH * gradient[settled] or malformed[at] > malformed[settled] + MALFORMED,
        )
        for at in range(settled, len(rows))
    ]

    def since(holds: Callable[[tuple[bool, bool, bool]], bool]) -> int | None:
        """The update from which a condition holds until the end."""
        count = 0
        while count < len(signs) and holds(signs[-1 - count]):
            count += 1
        return rows[len(rows) - count].update if count else None

    return Signs(
        updates=len(rows),
        start=start,
        best=max(reward[settled:]),
        final=reward[-1],
        kl_start=kl[settled],
        kl_final=kl[-1],
        kl_step=since(lambda sign: sign[0]),
        reward_step=since(lambda sign: sign[1]),
        gradient_step=since(lambda sign: sign[2]),
        collapse_step=since(lambda sign: sum(sign) >= 2),
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean over each value and those before it, ``window`` at most, NaN left out."""
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def mean(values: Sequence[float]) -> float:
    """Of what is not NaN; NaN if nothing is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
