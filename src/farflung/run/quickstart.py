"""`farflung quickstart`: measure the packaged policy, train it, measure it again, show the result."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from farflung.config import Recipe
from farflung.core.errors import Stopped
from farflung.evaluation.held_out import EvalResult
from farflung.report import draw_report
from farflung.run.evaluate import evaluate_policy
from farflung.run.ledger import Ledger
from farflung.run.preflight import preflight
from farflung.run.processes import Meter
from farflung.run.train import capacity_shares, train
from farflung.run.workspace import Workspace


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """A pool over the whole run. kl and out_of_band_share are means over its measured tokens."""

    capacity_share: float
    sample_share: float
    kl: float
    out_of_band_share: float
    tokens_per_s: float


def quickstart(recipe: Recipe, run_dir: Path, *, console: Console, summary: Path | None = None) -> dict[str, Any]:
    """The whole thing; returns (and writes to ``summary``) the result as plain data."""
    began = time.monotonic()
    meter = Meter()
    space = Workspace.create(run_dir, recipe)
    checked = preflight(space, console)

    def measure(name: str, model: Path) -> EvalResult:
        result = evaluate_policy(
            model, recipe, checked.heldout, token_file=space.token_file, logs=space.path / "logs", name=name,
            console=console, meter=meter,
        )  # fmt: skip
        ledger = Ledger(space.path)
        ledger.add_evaluation(name, result.to_dict())
        ledger.close()
        console.print(f"{name} training: pass@1 {result.pass_at(1)}, pass@4 {result.pass_at(4)} (held-out tasks)")
        return result

    before: EvalResult | None = None
    try:
        before = measure("before", space.model)
        outcome = train(space, console=console, meter=meter)
        if outcome.stopped:
            raise KeyboardInterrupt
        after = measure("after", space.policy)
    except KeyboardInterrupt:
        quoted = shlex.quote(str(run_dir))
        start = f"farflung eval {quoted} --start, " if before is None else ""
        mend = f"go on: {start}farflung train --resume {quoted}, then farflung eval {quoted}"
        raise Stopped("stopped by hand", where=str(run_dir), mend=mend) from None
    result = summarise(space, before, after) | {
        "wall_s": round(time.monotonic() - began, 1),
        "peak_rss_bytes": meter.peak,
    }
    page = draw_report(run_dir)
    _show(result, before, after, page, console)
    if summary is not None:
        summary.write_text(json.dumps(result, indent=1) + "\n")
    return result


def summarise(space: Workspace, before: EvalResult, after: EvalResult) -> dict[str, Any]:
    """The run's result: scores, counts, staleness, drops by cause, and each pool."""
    ledger = Ledger(space.path)
    try:
        updates = ledger.updates()
        tokens = sum(m.all.tokens for m in updates)
        return {
            "pass1_before": before.pass_at(1).mean,
            "pass1_after": after.pass_at(1).mean,
            "pass4_before": before.pass_at(4).mean,
            "pass4_after": after.pass_at(4).mean,
            "pass1_before_se": before.pass_at(1).se,
            "pass1_after_se": after.pass_at(1).se,
            "pass4_before_se": before.pass_at(4).se,
            "pass4_after_se": after.pass_at(4).se,
            "updates": len(updates),
            "episodes": ledger.episode_count(),
            "staleness_mean": sum(m.all.staleness * m.all.tokens for m in updates) / max(1, tokens),
            "dropped": ledger.drops(),
            "pools": {name: _plain(pool) for name, pool in summarise_pools(space.recipe, ledger).items()},
        }
    finally:
        ledger.close()


def summarise_pools(recipe: Recipe, ledger: Ledger) -> dict[str, PoolSummary]:
    """Every pool of the recipe over the whole run."""
    updates = ledger.updates()
    rates = ledger.pool_rates()
    samples = {p.name: sum(m.pools[p.name].samples for m in updates if p.name in m.pools) for p in recipe.pools}
    summaries = {}
    for name, share in capacity_shares(recipe).items():
        stats = [m.pools[name] for m in updates if name in m.pools]
        tokens = max(1, sum(s.tokens for s in stats))
        summaries[name] = PoolSummary(
            capacity_share=share,
            sample_share=samples[name] / max(1, sum(samples.values())),
            kl=sum(s.kl * s.tokens for s in stats) / tokens,
            out_of_band_share=sum(s.out_of_band * s.tokens for s in stats) / tokens,
            tokens_per_s=rates.get(name, 0.0),
        )
    return summaries


def _plain(pool: PoolSummary) -> dict[str, float]:
    return {name: getattr(pool, name) for name in PoolSummary.__slots__}


def _show(result: Mapping[str, Any], before: EvalResult, after: EvalResult, page: Path, console: Console) -> None:
    table = Table(title="held-out tasks", title_justify="left")
    for title in ("", "before", "after"):
        table.add_column(title)
    for k in (1, 4):
        table.add_row(f"pass@{k}", str(before.pass_at(k)), str(after.pass_at(k)))
    console.print(table)
    pools = Table(title="pools", title_justify="left")
    for title in ("pool", "capacity", "samples", "KL", "out of band", "tokens/s"):
        pools.add_column(title, justify="left" if title == "pool" else "right")
    for name, pool in result["pools"].items():
        pools.add_row(
            name, f"{pool['capacity_share']:.0%}", f"{pool['sample_share']:.0%}", f"{pool['kl']:.5f}",
            f"{pool['out_of_band_share']:.2%}", f"{pool['tokens_per_s']:.0f}",
        )  # fmt: skip
    console.print(pools)
    dropped = ", ".join(f"{count} {cause}" for cause, count in result["dropped"].items()) or "nothing"
    console.print(
        f"{result['updates']} updates, {result['episodes']} episodes, mean staleness {result['staleness_mean']:.2f}, dropped: "
        f"{dropped}, {result['wall_s']:.0f} s, at most {result['peak_rss_bytes'] / 2**30:.1f} GiB"
    )
    console.print(f"report: {page}")
