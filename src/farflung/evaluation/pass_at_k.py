"""pass@k with its error bars. The task is the unit of sampling, so standard errors are over tasks.

Sources: the unbiased estimator is that of Chen et al. 2021 (arXiv 2107.03374, eq. 1); standard errors over tasks and
paired differences follow Miller 2024 (arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Tally:
    """Attempts at one task that came to a result, and how many of them solved it."""

    samples: int
    solved: int

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.samples:
            raise ValueError(f"{self.solved} of {self.samples} samples solved")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``tasks`` tasks and its standard error; an error needs two tasks, a mean needs one."""

    mean: float | None
    se: float | None
    tasks: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        n = len(values)
        if n == 0:
            return cls(None, None, 0)
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, 1)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        return cls(mean, math.sqrt(variance / n), n)

    def __str__(self) -> str:
        if self.mean is None:
            return "no result"
        return f"{100 * self.mean:.1f} %" + ("" if self.se is None else f" ± {100 * self.se:.1f}")


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The chance that k of the samples, drawn without replacement, hold a solution: 1 - C(n - c, k) / C(n, k), n >= k."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} in {samples}")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def estimate(tallies: Mapping[str, Tally], k: int) -> Estimate:
    """pass@k over the tasks that have at least k samples."""
    return Estimate.over([pass_at_k(t.samples, t.solved, k) for t in tallies.values() if t.samples >= k])


def paired_difference(before: Mapping[str, Tally], after: Mapping[str, Tally], k: int) -> Estimate:
    """How much pass@k rose, over the tasks that both have at least k samples of."""
    common = [name for name, t in before.items() if t.samples >= k and name in after and after[name].samples >= k]
    return Estimate.over(
        [
            pass_at_k(after[name].samples, after[name].solved, k)
            - pass_at_k(before[name].samples, before[name].solved, k)
            for name in common
        ]
    )
