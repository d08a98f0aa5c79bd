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
    """One run. Rewards are shares of right answers; a KL is None where no token was measured; steps are None for never.

    start: over the batches that the first policy sampled; best and final: over a window of updates.
    """

    updates: int
    start: float
    best: float
    final: float
    kl_start: float | None
    kl_final: float | None
    kl_step: int | None
    reward_step: int | None
    gradient_step: int | None
    collapse_step: int | None

    @property
    def kl_growth(self) -> float | None:
        return self.kl_final / self.kl_start if self.kl_start and self.kl_final is not None else None


def read_signs(rows: Sequence[UpdateMetrics], *, lag: int, window: int) -> Signs:
    """rows: a run's updates from the first on, at least one. The start of KL, gradient and format errors is the window
    that begins when the lag has filled: before, batches are fresher than they will ever be again."""
    first = min(lag, len(rows) - 1)
    start = _mean([row.all.reward for row in rows[: first + 1]])
    reward = smooth([row.all.reward for row in rows], window)
    kl = smooth([row.all.kl if row.all.tokens else None for row in rows], window)
    gradient = smooth([row.grad_norm for row in rows], window)
    malformed = smooth([row.format_errors for row in rows], window)
    settled = min(first + window - 1, len(rows) - 1)
    kl_start, gradient_start, malformed_start = kl[settled], gradient[settled], malformed[settled]

    def stands(update: int) -> tuple[bool, bool, bool]:
        mine = kl[update], gradient[update], malformed[update]
        return (
            mine[0] is not None and kl_start is not None and mine[0] > KL_GROWTH * kl_start,
            reward[update] is not None and reward[update] < start,
            mine[1] > GRADIENT_GROWTH * gradient_start or mine[2] > malformed_start + MALFORMED,
        )

    signs = [stands(update) for update in range(settled, len(rows))]

    def since(holds: Callable[[tuple[bool, bool, bool]], bool]) -> int | None:
        """The update from which a condition holds until the end."""
        count = 0
        while count < len(signs) and holds(signs[-1 - count]):
            count += 1
        return rows[len(rows) - count].update if count else None

    return Signs(
        updates=len(rows),
        start=start,
        best=max(value for value in reward[settled:]),
        final=reward[-1],
        kl_start=kl_start,
        kl_final=kl[-1],
        kl_step=since(lambda sign: sign[0]),
        reward_step=since(lambda sign: sign[1]),
        gradient_step=since(lambda sign: sign[2]),
        collapse_step=since(lambda sign: sum(sign) >= 2),
    )


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """The mean over each value and those before it, ``window`` at most; None where there is none."""
    return [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
