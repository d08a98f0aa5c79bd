"""Held-out scores before and after, with their standard errors over tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

WIDTH = 460


@dataclass(frozen=True, slots=True)
class Score:
    """One measure as the page shows it; texts are empty where it was not taken."""

    label: str
    before: str
    after: str
    gain: str
    errors: str
    svg: Markup


def scores(evaluations: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """pass@1 and pass@4, as far as they were measured."""
    found = []
    for k in (1, 4):
        before, after = (_mark(evaluations.get(name, {}).get(f"pass{k}")) for name in ("before", "after"))
        if newest := after or before:
            found.append(_score(f"pass@{k} on {newest.tasks} held-out tasks", before, after))
    return found


@dataclass(frozen=True, slots=True)
class _Mark:
    mean: float
    se: float
    tasks: int


def _mark(estimate: Mapping[str, Any] | None) -> _Mark | None:
    if not estimate or estimate["mean"] is None:
        return None
    return _Mark(estimate["mean"], estimate["se"] or 0.0, estimate["tasks"])


def _score(label: str, before: _Mark | None, after: _Mark | None) -> Score:
    gain = ""
    if before and after and before.tasks == after.tasks:
        points = 100 * (after.mean - before.mean)
        gain = f"{'+' if points >= 0 else '−'}{abs(points):.0f}"
    errors = " and ".join(f"{100 * mark.se:.1f}" for mark in (before, after) if mark)
    return Score(
        label,
        _percent(before),
        _percent(after),
        gain,
        f"standard error over tasks: {errors} points",
        _bar(before, after),
    )


def _percent(mark: _Mark | None) -> str:
    return f"{100 * mark.mean:.0f} %" if mark else ""


def _bar(before: _Mark | None, after: _Mark | None) -> Markup:
    """A scale from 0 to 100 % with both marks and their standard errors."""

    def x(value: float) -> float:
        return 4 + min(1.0, max(0.0, value)) * (WIDTH - 8)

    parts = [f'<line class="scale" x1="4" x2="{WIDTH - 4}" y1="9" y2="9"/>']
    if before and after:
        parts.append(f'<line class="move" x1="{x(before.mean):.1f}" x2="{x(after.mean):.1f}" y1="9" y2="9"/>')
    for mark, kind in ((before, "mark old"), (after, "mark")):
        if mark:
            low, high = x(mark.mean - mark.se), x(mark.mean + mark.se)
            parts.append(f'<line class="error" x1="{low:.1f}" x2="{high:.1f}" y1="9" y2="9"/>')
            parts += [f'<line class="error" x1="{at:.1f}" x2="{at:.1f}" y1="5" y2="13"/>' for at in (low, high)]
            parts.append(f'<circle class="{kind}" cx="{x(mark.mean):.1f}" cy="9" r="6"/>')
    return Markup(f'<svg viewBox="0 0 {WIDTH} 18" aria-hidden="true">{"".join(parts)}</svg>')
