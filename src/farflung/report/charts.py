"""Line charts as inline SVG: drawn here, so that a report needs no network, no library and no scripts to be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
STEPS = [m * 10**e for e in range(9) for m in (1, 2, 5)]
MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800]
POINTS = 400  # more are thinned out: the eye cannot tell and the page stays small

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """``color`` is a slot of the page's palette. A point without a finite value is left out. ``band`` holds the lower and
    the upper edge of what is shaded around the line, point by point."""

    name: str
    color: int
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """``low`` and ``high`` are values that the axis must reach; ``log`` draws decades and leaves out what is not above 0."""

    title: str
    note: str
    series: Sequence[Series]
    form: Format
    low: float | None = None
    high: float | None = None
    log: bool = False
    x_name: str = "update"


def percent(value: float) -> str:
    """Two figures, three from 10 % on."""
    share = 100 * value
    digits = 0 if share == 0 or abs(share) >= 99.95 else 1 if abs(share) >= 1 else 2
    return f"{share:.{digits}f} %" if share == 0 or abs(share) >= 0.095 else f"{share:.1g} %"


def axis_percent(value: float) -> str:
    """Three figures at most."""
    return f"{100 * value:.3g} %"


def number(value: float) -> str:
    """Three figures, with thousands as k and millions as M."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if sign == 'k' else size):.3g} {sign}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def draw(chart: Chart) -> str:
    """The SVG of a chart, with its numbers beside it for the pointer. Empty series give a chart that says so."""
    series = [_clean(s, chart.log) for s in chart.series]
    values = [y for s in series for edge in (s.ys, *(s.band or ())) for y in edge]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-top="{TOP}" data-bottom="{HEIGHT - BOTTOM}"'
    )
    if not values:
        return f'{head}><text class="empty" x="{WIDTH / 2}" y="{HEIGHT / 2}">nothing recorded yet</text></svg>'
    xs = [x for s in series for x in s.xs]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    ticks = _decades(values) if chart.log else _ticks(values, chart.low, chart.high)

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        low, high, at = (
            (math.log(ticks[0]), math.log(ticks[-1]), math.log(y)) if chart.log else (ticks[0], ticks[-1], y)
        )
        return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = [_shade(s, px, py) for s in series if s.band and s.xs]
    for tick in ticks:
        y = py(tick)
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{escape(chart.form(tick))}</text>')
    for tick in _x_ticks(x_low, x_high, MINUTES if chart.x_name == "time" else STEPS):
        label = _clock(tick) if chart.x_name == "time" else f"{tick:g}"
        body.append(f'<text class="x" x="{px(tick):.1f}" y="{HEIGHT - 7}">{label}</text>')
    for s in series:
        points = [(px(x), py(y)) for x, y in zip(s.xs, s.ys, strict=True)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashed = ' stroke-dasharray="3 3"' if s.dashed else ""
        body.append(f'<path class="line c{s.color}" d="{path}"{dashed}/>')
        if len(points) <= 40 and not s.dashed:
            body += [f'<circle class="dot c{s.color}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points]
    data = [
        {
            "n": s.name,
            "c": s.color,
            "p": [
                [round(px(x), 1), round(py(y), 1), _clock(x) if chart.x_name == "time" else f"{x:g}", chart.form(y)]
                for x, y in zip(s.xs, s.ys, strict=True)
            ],
        }
        for s in series
    ]
    shown = escape(json.dumps({"x": chart.x_name, "s": data}, separators=(",", ":"), ensure_ascii=False))
    return f'{head} data-points="{shown}">{"".join(body)}<g class="cursor"></g></svg>'


def latest(chart: Chart) -> str:
    """The newest value of a chart of one curve; empty for several."""
    solid = [s for s in chart.series if not s.dashed]
    return chart.form(solid[0].ys[-1]) if len(solid) == 1 and solid[0].ys else ""


def _shade(series: Series, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    low, high = series.band or ((), ())
    there = [f"{px(x):.1f} {py(y):.1f}" for x, y in zip(series.xs, high, strict=True)]
    back = [f"{px(x):.1f} {py(y):.1f}" for x, y in zip(series.xs, low, strict=True)][::-1]
    return f'<path class="band c{series.color}" d="M{"L".join(there + back)}Z"/>'


def _clean(series: Series, log: bool) -> Series:
    columns = (series.ys, *(series.band or ()))

    def shown(place: int) -> bool:
        return all(math.isfinite(column[place]) and (column[place] > 0 or not log) for column in columns)

    places = [place for place in range(len(series.xs)) if shown(place)]
    if len(places) > POINTS:
        step = (len(places) - 1) / (POINTS - 1)
        places = [places[round(i * step)] for i in range(POINTS)]
    xs, ys, *edges = ([column[place] for place in places] for column in (series.xs, *columns))
    return Series(series.name, series.color, xs, ys, series.dashed, (edges[0], edges[1]) if edges else None)


def _ticks(values: Sequence[float], low: float | None, high: float | None) -> list[float]:
    """Four to seven round numbers that hold all values and the asked ends."""
    bottom = min(values) if low is None else min(low, *values)
    top = max(values) if high is None else max(high, *values)
    if top - bottom < 1e-12:
        top, bottom = top + (abs(top) * 0.1 or 1.0), bottom if low is not None else bottom - (abs(bottom) * 0.1 or 1.0)
    raw = (top - bottom) / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first, last = math.floor(bottom / step + 1e-9), math.ceil(top / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten around all values, at most six of them shown."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    step = math.ceil((last - first) / 5)
    last += -(last - first) % step
    return [10.0**e for e in range(first, last + 1, step)]


def _x_ticks(low: float, high: float, steps: Sequence[int]) -> list[float]:
    """Whole numbers, at most seven."""
    step = next((s for s in steps if (high - low) / s <= 6), steps[-1])
    return [float(i * step) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
