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
    """pass@1 and pass@k, as far as they were measured."""
    before, after = evaluations.get("before"), evaluations.get("after")
    results = [r for r in (before, after) if r is not None]
    if not results:
        return []
    found = []
    for k in dict.fromkeys((1, int(results[-1]["k"]))):
        marks = [None if r is None else (float(r[f"pass{k}"]), float(r[f"pass{k}_se"])) for r in (before, after)]
        tasks = int(results[-1]["tasks"])
        found.append(_score(f"pass@{k} on {tasks} held-out tasks", marks[0], marks[1]))
    return found


def _score(label: str, before: tuple[float, float] | None, after: tuple[float, float] | None) -> Score:
    gain, error = "", ""
    if before and after:
        points = 100 * (after[0] - before[0])
        gain = f"{'+' if points >= 0 else '−'}{abs(points):.0f}"
    taken = [f"{100 * mark[1]:.1f}" for mark in (before, after) if mark]
    error = f"standard error over tasks: {' and '.join(taken)} points"
    return Score(label, _percent(before), _percent(after), gain, error, _bar(before, after))


def _percent(mark: tuple[float, float] | None) -> str:
    return f"{100 * mark[0]:.0f} %" if mark else ""


def _bar(before: tuple[float, float] | None, after: tuple[float, float] | None) -> Markup:
    """A scale from 0 to 100 % with both marks and their standard errors."""

    def x(value: float) -> float:
        return 4 + min(1.0, max(0.0, value)) * (WIDTH - 8)

    parts = [f'<line class="scale" x1="4" x2="{WIDTH - 4}" y1="9" y2="9"/>']
    if before and after:
        parts.append(f'<line class="move" x1="{x(before[0]):.1f}" x2="{x(after[0]):.1f}" y1="9" y2="9"/>')
    for mark, kind in ((before, "mark old"), (after, "mark")):
        if mark:
            low, high = x(mark[0] - mark[1]), x(mark[0] + mark[1])
            parts.append(f'<line class="error" x1="{low:.1f}" x2="{high:.1f}" y1="9" y2="9"/>')
            parts += [f'<line class="error" x1="{at:.1f}" x2="{at:.1f}" y1="5" y2="13"/>' for at in (low, high)]
            parts.append(f'<circle class="{kind}" cx="{x(mark[0]):.1f}" cy="9" r="6"/>')
    return Markup(f'<svg viewBox="0 0 {WIDTH} 18" aria-hidden="true">{"".join(parts)}</svg>')
