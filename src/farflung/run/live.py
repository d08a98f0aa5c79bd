"""What a person sees while a run goes on: a table that changes in place on a terminal, a line per update elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farflung.core.metrics import UpdateMetrics

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class PoolView:
    """One row of the pools' table."""

    capacity_share: float = 0.0
    sample_share: float = 0.0
    tokens_per_s: float = 0.0
    replicas: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment. ``note`` is the newest event worth a line."""

    name: str
    update: int
    updates: int
    episodes: int
    history: tuple[UpdateMetrics, ...]
    pools: Mapping[str, PoolView]
    buffer: Mapping[str, int]
    dropped: Mapping[str, int]
    elapsed: float
    memory: int
    recent_reward: float
    note: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    first: int = 0  # updates that were made before this start of the run

    @property
    def left(self) -> float | None:
        """Seconds to go at the pace since this start of the run; None before its first update."""
        made = self.update - self.first
        return self.elapsed / made * (self.updates - self.update) if made else None


class View(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


def open_view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line for each update, and at most one a half minute in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._update = -1
        self._spoke = 0.0
        self._note = ""

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.note != self._note:
            self._note = snapshot.note
            self._console.print(f"  {snapshot.note}", highlight=False)
        if snapshot.update == self._update and time.monotonic() - self._spoke < 30:
            return
        self._update, self._spoke = snapshot.update, time.monotonic()
        last = snapshot.history[-1] if snapshot.history else None
        numbers = ""
        if last is not None:
            kls = " ".join(f"{name}:{stats.kl:.1e}" for name, stats in last.pools.items())
            numbers = f" reward {last.all.reward:.3f}  kl {kls}  staleness {last.all.staleness:.1f}"
        left = "" if snapshot.left is None else f"  {_clock(snapshot.left)} left"
        self._console.print(
            f"[{_clock(snapshot.elapsed)}] update {snapshot.update}/{snapshot.updates}{numbers}"
            f"  episodes {snapshot.episodes}  queue {snapshot.buffer.get('ready', 0)} groups{left}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip

    def close(self) -> None:
        return


class LiveView:
    """The rich view of a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(render(snapshot))

    def close(self) -> None:
        self._live.stop()


def render(snapshot: Snapshot) -> Panel:
    """The whole view as one panel."""
    last = snapshot.history[-1] if snapshot.history else None
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    left = "first update under way" if snapshot.left is None else f"{_clock(snapshot.left)} left"
    head.add_row(
        Text(f"update {snapshot.update} of {snapshot.updates}", style="bold"),
        Text(f"{_clock(snapshot.elapsed)} · {left}"),
    )
    bar = ProgressBar(total=snapshot.updates, completed=snapshot.update)
    facts = Table.grid(padding=(0, 3))
    rewards = [m.all.reward for m in snapshot.history]
    facts.add_row(
        "reward",
        Text(sparkline(rewards, 0.0, 1.0), style="green"),
        f"{snapshot.recent_reward:.2f} (newest 64 episodes)",
    )
    if last is not None:
        kls = [m.all.kl for m in snapshot.history]
        facts.add_row("KL", Text(sparkline(kls, 0.0, max(kls)), style="yellow"), f"{last.all.kl:.4f}")
        facts.add_row(
            "staleness", "", f"mean {last.all.staleness:.1f}, oldest {last.all.staleness_max} versions; "
            f"gradient norm {last.grad_norm:.2f}; format errors {last.format_errors:.0%}",
        )  # fmt: skip
    buffer = snapshot.buffer
    facts.add_row(
        "queue", "", f"{buffer.get('ready', 0)} groups ready, {buffer.get('open', 0)} under way, "
        f"{buffer.get('sampling', 0)} episodes running; {snapshot.episodes} finished",
    )  # fmt: skip
    dropped = ", ".join(f"{cause} {count}" for cause, count in snapshot.dropped.items()) or "none"
    facts.add_row("dropped", "", f"{dropped}; memory {snapshot.memory / 2**30:.1f} GiB")
    parts: list[RenderableType] = [head, bar, facts, _pools(snapshot, last)]
    if snapshot.note:
        parts.append(Text(snapshot.note, style="dim"))
    return Panel(Group(*parts), title=f"farflung · {snapshot.name}", border_style="cyan")


def _pools(snapshot: Snapshot, last: UpdateMetrics | None) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("pool", "format", "capacity", "samples", "tokens/s", "version", "KL", "out of band"):
        table.add_column(title, justify="left" if title in ("pool", "format") else "right")
    for name, pool in snapshot.pools.items():
        stats = last.pools.get(name) if last is not None else None
        table.add_row(
            name, snapshot.formats.get(name, ""), f"{pool.capacity_share:.0%}", f"{pool.sample_share:.0%}",
            f"{pool.tokens_per_s:.0f}", str(pool.version), f"{stats.kl:.4f}" if stats else "-",
            f"{stats.out_of_band:.2%}" if stats else "-",
        )  # fmt: skip
    return table


def sparkline(values: list[float], low: float, high: float, width: int = 40) -> str:
    """The newest ``width`` values as bars between low and high."""
    span = max(high - low, 1e-12)
    return "".join(SPARKS[min(7, max(0, int((v - low) / span * 7.999)))] for v in values[-width:])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
