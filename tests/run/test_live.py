"""What a person sees: everything that matters in the table, a line per update elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.run.live import LiveView, PlainView, PoolView, Snapshot, open_view, render, sparkline

STATS = TokenStats(samples=8, tokens=100, reward=0.5, kl=0.0125, out_of_band=0.02, staleness=1.5, staleness_max=3)
METRICS = UpdateMetrics(1, STATS, {"nvfp4": STATS}, grad_norm=0.75, format_errors=0.25)
SNAPSHOT = Snapshot(
    name="test", update=1, updates=4, episodes=32, history=(METRICS,), pools={"nvfp4": PoolView(0.5, 0.48, 321.0, 1, 1)},
    buffer={"ready": 3, "open": 2, "sampling": 9, "waiting": 1}, dropped={"sandbox": 2}, elapsed=30.0, memory=3 << 30,
    recent_reward=0.4, note="process died: nvfp4-0", formats={"nvfp4": "nvfp4, kv fp8"},
)  # fmt: skip


def text(what: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(what)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_shows_all_that_matters() -> None:
    shown = text(render(SNAPSHOT))
    for part in (
        "update 1 of 4", "0:30 · 1:30 left", "0.0125", "mean 1.5, oldest 3", "format errors 25%", "3 groups ready",
        "9 episodes running; 32 finished", "sandbox 2", "3.0 GiB", "nvfp4, kv fp8", "50%", "48%", "321", "2.00%",
        "process died: nvfp4-0", "0.40 (newest 64 episodes)",
    ):  # fmt: skip
        assert part in shown


def test_before_the_first_update_nothing_is_promised() -> None:
    assert SNAPSHOT.left == 90.0
    fresh = replace(SNAPSHOT, update=0, history=(), note="")
    assert fresh.left is None
    assert "first update under way" in text(render(fresh))


def test_time_left_is_at_the_pace_since_the_run_was_gone_on_with() -> None:
    assert replace(SNAPSHOT, update=3, first=1).left == 15.0
    assert replace(SNAPSHOT, update=3, first=3).left is None


def test_elsewhere_there_is_one_line_for_an_update() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = PlainView(console)
    for snapshot in (SNAPSHOT, SNAPSHOT, replace(SNAPSHOT, update=2)):
        view.show(snapshot)
    view.close()
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert lines[0] == "  process died: nvfp4-0"
    assert [line.split("]")[1].split()[1] for line in lines[1:]] == ["1/4", "2/4"]
    assert "reward 0.500  kl nvfp4:1.3e-02  staleness 1.5" in lines[1]


def test_a_terminal_gets_the_live_view() -> None:
    assert isinstance(open_view(Console(file=io.StringIO())), PlainView)
    view = open_view(Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(view, LiveView)
    view.show(SNAPSHOT)
    view.close()


def test_a_sparkline_keeps_to_its_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 9.0, -1.0], 0.0, 1.0) == "▁▄██▁"
    assert len(sparkline([1.0] * 99, 0.0, 1.0)) == 40
    assert sparkline([0.0], 0.0, 0.0) == "▁"
