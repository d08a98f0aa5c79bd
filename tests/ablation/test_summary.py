"""The table of the result."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from farflung.ablation.arms import GRID
from farflung.ablation.signs import Signs
from farflung.ablation.summary import ArmSummary, row, show

SIGNS = Signs(600, 0.54, 0.99, 0.98, 0.0123, 0.0234, 0.05, 100, None, None, None)
ARMS = [ArmSummary(arm, (0, 1), (SIGNS, SIGNS)) for arm in GRID]


def test_a_piped_table_has_every_cell_whole_in_one_line_per_arm() -> None:
    out = io.StringIO()
    show(ARMS, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    for arm in ARMS:
        (line,) = (line for line in lines if f" {arm.arm.name} " in line)
        assert line.split() == " ".join(row(arm)).split()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_shows_the_arms_names_whole(width: int) -> None:
    out = io.StringIO()
    show(ARMS, Console(file=out, width=width, force_terminal=True, color_system=None))
    assert all(f" {arm.arm.name} " in out.getvalue() for arm in ARMS)
