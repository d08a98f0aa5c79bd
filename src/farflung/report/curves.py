"""Which curves a report shows, and how they follow from the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.report.charts import Chart, Series, axis_percent, number
from farflung.report.data import PoolPoint, RunData

ALL = 0  # palette slot of what concerns the whole batch; pools follow
RATE_SECONDS = 6.0


def pool_color(place: int) -> int:
    return 1 + place % 7


def curves(run: RunData) -> list[Chart]:
    """The charts of a report, in reading order."""
    train = run.recipe.train
    banded = train.weight in ("mis", "icepop", "mask")
    masked = "p/q outside [{:g}, {:g}]".format(*train.band) if banded else f"by the weight {train.weight}"
    return [
        Chart("Reward", "Mean over the batch's episodes, skipped groups included.", [_all(run, "", lambda m: m.all.reward)],
              axis_percent, low=0.0, high=1.0),
        Chart("Reward by pool", "Mean over the episodes that each pool sampled.", _pools(run, lambda s: s.reward, "samples"),
              axis_percent, low=0.0, high=1.0),
        Chart("KL(q‖p) by pool", "Exact, over each token's recorded candidates; log scale.",
              _pools(run, lambda s: s.kl), number, log=True),
        Chart("k3 by pool", "One-sample estimate of the KL at the sampled token; log scale.",
              _pools(run, lambda s: s.k3), number, log=True),
        Chart("Tokens out of band by pool", "Share with p/q outside [0.2, 5].",
              _pools(run, lambda s: s.out_of_band), axis_percent, low=0.0),
        Chart("Tokens masked by pool", f"Share with weight 0: {masked}.",
              _pools(run, lambda s: s.masked), axis_percent, low=0.0),
        Chart("Gradient norm", f"Before clipping at {run.recipe.train.clip:g}.", [_all(run, "", lambda m: m.grad_norm)],
              number, low=0.0),
        Chart("Entropy", "Of p over the candidates, in nats per token.", [_all(run, "", lambda m: m.all.entropy)],
              number, low=0.0),
        Chart("Staleness", "Versions between sampling and training; dashed: the oldest token.",
              [_all(run, "mean", lambda m: m.all.staleness),
               _all(run, "oldest", lambda m: m.all.staleness_max, dashed=True)], number, low=0.0),
        Chart("Transcript length", "Tokens per episode.", [_all(run, "", lambda m: m.length)], number, low=0.0),
        Chart("Format errors", "Share of episodes that ended after repeated replies without a call.",
              [_all(run, "", lambda m: m.format_errors)], axis_percent, low=0.0),
        Chart("Groups", "Trained ones had both rewards; dashed: skipped, for they had no variance.",
              [_all(run, "trained", lambda m: m.trained_groups),
               _all(run, "skipped", lambda m: m.skipped_groups, dashed=True)], number, low=0.0),
        Chart("Tokens per second by pool", "Sampled tokens over wall time.", _rates(run), number, low=0.0, x_name="time"),
        Chart("Trainer's time per update", "Seconds: green is the step, grey the wait for its batch.", _seconds(run),
              number, low=0.0),
        Chart("Published bytes", "Size of each version's delta, by format; log scale.", _streams(run), number, log=True),
    ]  # fmt: skip


def total(run: RunData, pool: str | None = None) -> TokenStats:
    """Means over all updates, weighted by tokens (rewards by trajectories); sums of samples and tokens; greatest values."""
    parts = [m.all if pool is None else m.pools[pool] for m in run.updates if pool is None or pool in m.pools]

    def combine(name: str) -> Any:
        values = [(getattr(s, name), s.samples if name == "reward" else s.tokens) for s in parts]
        if name in ("samples", "tokens"):
            return sum(value for value, _ in values)
        if name.endswith("_max"):
            return max((value for value, _ in values), default=0)
        known = [(value, count) for value, count in values if value is not None]
        return sum(value * count for value, count in known) / max(1, sum(count for _, count in known))

    return TokenStats(**{f.name: combine(f.name) for f in fields(TokenStats)})


def rate(points: Sequence[PoolPoint]) -> float:
    """Tokens per second from first to last; a counter that falls (a sampler started again) is bridged."""
    seconds = points[-1].at - points[0].at if len(points) > 1 else 0.0
    return sum(_gains(points)) / seconds if seconds > 0 else 0.0


def _all(run: RunData, name: str, pick: Callable[[UpdateMetrics], float], *, dashed: bool = False) -> Series:
    return Series(name, ALL, [m.update for m in run.updates], [pick(m) for m in run.updates], dashed)


def _streams(run: RunData) -> list[Series]:
    """Bytes of each version by format, but for those without a change: they have none."""
    series = []
    for place, format in enumerate(dict.fromkeys(row.format for row in run.streams)):
        rows = [row for row in run.streams if row.format == format and row.bytes]
        series.append(Series(format, place, [row.version for row in rows], [row.bytes for row in rows]))
    return series


def _pools(run: RunData, pick: Callable[[TokenStats], float], counted: str = "tokens") -> list[Series]:
    """A series for each pool, over the updates in which it had any of what is ``counted``."""
    series = []
    for place, pool in enumerate(run.recipe.pools):
        seen = [(m.update, m.pools[pool.name]) for m in run.updates if pool.name in m.pools]
        points = [(update, pick(stats)) for update, stats in seen if getattr(stats, counted)]
        series.append(Series(pool.name, pool_color(place), [x for x, _ in points], [y for _, y in points]))
    return series


def _rates(run: RunData) -> list[Series]:
    series = []
    for place, pool in enumerate(run.recipe.pools):
        points = run.pools.get(pool.name, ())
        window = max(RATE_SECONDS, (points[-1].at - points[0].at) / 60 if points else 0.0)
        xs, ys, start = [], [], 0
        for at, point in enumerate(points):
            if point.at - points[start].at >= window:
                xs.append(point.at)
                ys.append(rate(points[start : at + 1]))
                start = at
        series.append(Series(pool.name, pool_color(place), xs, ys))
    return series


def _seconds(run: RunData) -> list[Series]:
    parts = [
        (name, color) for name, color in (("wait", 6), ("step", ALL)) if any(name in m.seconds for m in run.updates)
    ]
    return [
        Series(name, color, [m.update for m in run.updates], [m.seconds.get(name, 0.0) for m in run.updates])
        for name, color in parts
    ]


def _gains(points: Sequence[PoolPoint]) -> list[int]:
    return [max(0, b.sampled_tokens - a.sampled_tokens) for a, b in pairwise(points)]
