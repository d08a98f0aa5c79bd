"""The ablation's page: one table, and every figure with its seeds as bands, in one self-contained file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from farflung import __version__
from farflung.ablation.arms import FLEETS, METHODS, Arm, Fleet
from farflung.ablation.experiment import Experiment
from farflung.ablation.folder import Folder
from farflung.ablation.signs import mean, smooth
from farflung.ablation.summary import row, summarise
from farflung.config.load import dump_recipe
from farflung.core.errors import BadInput
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.report.charts import Chart, Format, Series, axis_percent, draw, number

POINTS = 120
Rows = Mapping[Arm, Sequence[Sequence[UpdateMetrics]]]
Pick = Callable[[UpdateMetrics], float]


def draw_page(folder: Folder, out: Path | None = None) -> Path:
    """Draw what there is, also while the ablation goes on, and return where. Raises BadInput."""
    out = out or folder.report
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(render(folder), encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror}", where=str(out)) from None
    return out


def render(folder: Folder) -> str:
    """The page as text."""
    experiment = folder.experiment
    rows: dict[Arm, list[list[UpdateMetrics]]] = {}
    for run, found in folder.found():
        if found:
            rows.setdefault(run.arm, []).append(found)
    assets = files("farflung") / "assets" / "report"
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        (assets / "ablation.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        css=Markup((assets / "page.css").read_text(encoding="utf-8")),
        js=Markup((assets / "page.js").read_text(encoding="utf-8")),
        name=experiment.name,
        lead=_lead(folder, rows),
        methods=[(place, arm.method) for place, arm in enumerate(METHODS)],
        table=[(_color(arm.arm), row(arm)) for arm in summarise(folder)],
        fleets=[
            {
                "name": fleet,
                "pools": ", ".join(
                    f"{pool.name} ({pool.weights}, cache {pool.kv})" for pool in experiment.pools(fleet)
                ),
                "charts": [_drawn(chart) for chart in _curves(_of(rows, fleet), experiment.window)],
            }
            for fleet in FLEETS
            if _of(rows, fleet)
        ],
        arms=[
            {"name": arm.name, "charts": [_drawn(chart) for chart in _pools(found, experiment, arm.fleet)]}
            for arm, found in rows.items()
        ],
        settings=[
            (section, values.items() if isinstance(values, dict) else [(pool["name"], _pool(pool)) for pool in values])
            for section, values in dump_recipe(experiment.recipe).items()
        ],
        footer=f"Drawn by farflung {__version__} from {folder.path} on {time.strftime('%Y-%m-%d %H:%M')}.",
    )


def _lead(folder: Folder, rows: Rows) -> str:
    made, whole = sum(map(len, rows.values())), folder.experiment.updates
    states = [(folder.complete(run), folder.diverged(run)) for run, _ in folder.found()]
    cut, diverged = sum(not complete for complete, _ in states), sum(ended for _, ended in states)
    open_ = (
        f" Not complete: {cut}; the curves show those as far as they came, the table leaves them out." if cut else ""
    )
    nan = f" Diverged (NaN): {diverged}; their curves end there." if diverged else ""
    std = "divided" if folder.experiment.std else "not divided"
    return (
        f"{made} runs of {len(rows)} arms, {whole} updates each. Every arm starts from the same policy and sees the same prompts; "
        f"only centering, masking, top-p and the fleet differ. Advantages are {std} by the group's standard deviation.{open_}{nan}"
    )


def _of(rows: Rows, fleet: str) -> Rows:
    return {arm: found for arm, found in rows.items() if arm.fleet == fleet}


def _color(arm: Arm) -> int:
    return next(place for place, other in enumerate(METHODS) if other.method == arm.method)


def _curves(rows: Rows, window: int) -> list[Chart]:
    """One chart for each number, one line for each method."""

    def chart(
        title: str, note: str, pick: Pick, form: Format, *, high: float | None = None, log: bool = False
    ) -> Chart:
        series = [_series(arm.method, _color(arm), found, pick, window) for arm, found in rows.items()]
        return Chart(title, note, series, form, low=None if log else 0.0, high=high, log=log)

    return [
        chart("Reward", "Share of trajectories that end right.", lambda m: m.all.reward, axis_percent, high=1.0),
        chart("KL(q‖p)", "Exact, over each token's recorded candidates; log scale.", _token(lambda s: s.kl), number, log=True),
        chart("Tokens out of band", "Share with p/q outside [0.2, 5].", _token(lambda s: s.out_of_band), axis_percent),
        chart("Gradient norm", "Before clipping; log scale.", lambda m: m.grad_norm, number, log=True),
        chart("Entropy", "Of p over the candidates, in nats per token.", _token(lambda s: s.entropy), number),
        chart("Trajectory length", "Sampled tokens.", lambda m: m.length, number),
        chart("Format errors", "Share of trajectories whose last attempt was malformed.", lambda m: m.format_errors, axis_percent),
        chart("Groups that teach", "Groups with both rewards in them.", lambda m: m.trained_groups, number),
    ]  # fmt: skip


def _pools(found: Sequence[Sequence[UpdateMetrics]], experiment: Experiment, fleet: Fleet) -> list[Chart]:
    """One arm: KL, share out of band and reward of each pool."""

    def chart(title: str, note: str, pick: Callable[[TokenStats], float], form: Format, *, log: bool = False) -> Chart:
        series = [
            _series(pool.name, 1 + place % 7, found, _pool_pick(pool.name, pick), experiment.window)
            for place, pool in enumerate(experiment.pools(fleet))
        ]
        return Chart(title, note, series, form, low=None if log else 0.0, log=log)

    return [
        chart("KL(q‖p) by pool", "Log scale.", lambda s: s.kl, number, log=True),
        chart("Out of band by pool", "Share with p/q outside [0.2, 5].", lambda s: s.out_of_band, axis_percent),
        chart("Reward by pool", "Share of its trajectories that end right.", lambda s: s.reward, axis_percent),
    ]


def _token(pick: Callable[[TokenStats], float]) -> Pick:
    return lambda m: pick(m.all) if m.all.tokens else math.nan


def _pool_pick(name: str, pick: Callable[[TokenStats], float]) -> Pick:
    """NaN for an update that the pool fed nothing to."""

    def picked(metrics: UpdateMetrics) -> float:
        stats = metrics.pools.get(name)
        return pick(stats) if stats is not None and stats.tokens else math.nan

    return picked


def _series(name: str, color: int, found: Sequence[Sequence[UpdateMetrics]], pick: Pick, window: int) -> Series:
    """The mean over the seeds, each smoothed, with their range as a band; at every update over those that came so far."""
    longest = max(found, key=len)
    step = max(1, len(longest) // POINTS)
    curves = [smooth([pick(row) for row in rows], window) for rows in found]
    places = range((len(longest) - 1) % step, len(longest), step)
    values = [[curve[at] for curve in curves if at < len(curve) and not math.isnan(curve[at])] for at in places]
    band = ([min(each, default=math.nan) for each in values], [max(each, default=math.nan) for each in values])
    return Series(
        name,
        color,
        [longest[at].update for at in places],
        [mean(each) for each in values],
        band=band if len(found) > 1 else None,
    )


def _drawn(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "note": chart.note, "svg": Markup(draw(chart))}


def _pool(pool: Mapping[str, Any]) -> str:
    return f"weights {pool['weights']}, cache {pool['kv']}"
