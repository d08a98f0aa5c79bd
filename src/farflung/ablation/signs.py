"""What a run's rows say: where it started, how far it came, where it ended, and whether and when it collapsed.

Three signs, each on means over a window of updates:

    kl         the KL stands above three times its start
    reward     the reward stands below its start
    gradient   the gradient norm stands above twenty times its start, or the share of malformed answers above its start
               by a fifth of all answers

A run has collapsed at the first update at which two of the three stand. One alone is no collapse: a policy that learns
becomes surer of itself and moves away from its samplers, and a reward may dip. A run that comes back has collapsed all the same;
what became of it is in its final reward. A run that diverged (a loss, gradient or weight is not finite) ended there: it has
collapsed at the update that it could not make, unless the signs stood before.
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
    """One run. Rewards are shares of right answers, NaN without an update; a KL is NaN where no token was measured; steps are
    None for never.

    start: over the batches that the first policy sampled; best and final: over a window of updates.
    """

    updates: int
    start: float
    best: float
    final: float
    kl_start: float
    kl_final: float
    kl_peak: float
    kl_step: int | None
    reward_step: int | None
    gradient_step: int | None
    collapse_step: int | None
    diverged_step: int | None = None

    @property
    def kl_growth(self) -> float:
        """The last window's over the first's."""
        return self.kl_final / self.kl_start if self.kl_start else math.nan

    @property
    def kl_peak_growth(self) -> float:
        """The highest window's over the first's."""
        return self.kl_peak / self.kl_start if self.kl_start else math.nan


def read_signs(rows: Sequence[UpdateMetrics], *, fresh: int, window: int, diverged: bool = False) -> Signs:
    """rows: a run's updates from the first on, at least one unless it ``diverged`` after them; the first policy sampled the
    first one and the ``fresh`` after.

    The start of KL, gradient and format errors is the window that begins with the last of these: before, batches are
    younger than they will ever be again.
    """
    diverged_step = len(rows) + 1 if diverged else None
    if not rows:
        none = math.nan
        return Signs(0, none, none, none, none, none, none, None, None, None, diverged_step, diverged_step)
    settled = min(fresh + window - 1, len(rows) - 1)
    start = mean([row.all.reward for row in rows[: fresh + 1]])
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

    def first(holds: Callable[[tuple[bool, bool, bool]], bool]) -> int | None:
        return next((rows[settled + at].update for at, sign in enumerate(signs) if holds(sign)), None)

    return Signs(
        updates=len(rows),
        start=start,
        best=max(reward[settled:]),
        final=reward[-1],
        kl_start=kl[settled],
        kl_final=kl[-1],
        kl_peak=max((value for value in kl[settled:] if not math.isnan(value)), default=math.nan),
        kl_step=first(lambda sign: sign[0]),
        reward_step=first(lambda sign: sign[1]),
        gradient_step=first(lambda sign: sign[2]),
        collapse_step=first(lambda sign: sum(sign) >= 2) or diverged_step,
        diverged_step=diverged_step,
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean over each value and those before it, ``window`` at most, NaN left out."""
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def mean(values: Sequence[float]) -> float:
    """Of what is not NaN; NaN if nothing is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
