"""The quickstart's result as JSON: every key that is promised, and its arithmetic."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from builders import episode, recipe
from rich.console import Console

from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.evaluation.held_out import EvalResult
from farflung.evaluation.pass_at_k import Tally
from farflung.run import quickstart as module
from farflung.run.ledger import Ledger
from farflung.run.preflight import Checked
from farflung.run.train import Outcome
from farflung.run.workspace import Workspace
from farflung.weights.publisher import Published, PublishedStream

PROMISED = {
    "pass1_before", "pass1_after", "pass4_before", "pass4_after", "wall_s", "peak_rss_bytes", "updates", "episodes",
    "staleness_mean", "dropped", "pools",
}  # fmt: skip


def result(solved: int) -> EvalResult:
    return EvalResult(0, {"t": Tally(4, solved), "u": Tally(4, 0)}, {"submitted": 8}, {}, 0, 2.0, 50.0, 1.0)


def test_the_result_is_what_the_ledger_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([result(1), result(4)])

    def train(space: Workspace, **given: object) -> Outcome:
        ledger = Ledger(space.path)
        ledger.open_group(0, "t")
        made = episode(0, 0, "t")
        ledger.add_episode(made, made.encode())
        for update, tokens, staleness in ((1, 100, 0.0), (2, 300, 2.0)):
            stats = TokenStats(samples=update, tokens=tokens, kl=0.1 * update, out_of_band=0.0, staleness=staleness)
            pools = {"a": stats, "b": TokenStats(samples=1, tokens=tokens, kl=0.5)}
            ledger.commit_update(
                UpdateMetrics(update, stats, pools), Published(update, {"bf16": PublishedStream(1, 10, 1, 0, 1.0)})
            )
        ledger.close()
        return Outcome(2, 1.0, 1)

    monkeypatch.setattr(module, "preflight", lambda space, console: Checked("", (), ()))
    monkeypatch.setattr(module, "evaluate_policy", lambda *given, **more: next(measured))
    monkeypatch.setattr(module, "train", train)
    console = Console(file=io.StringIO(), width=140)
    got = module.quickstart(recipe(), tmp_path / "run", console=console, summary=tmp_path / "result.json")
    assert got.keys() >= PROMISED
    assert json.loads((tmp_path / "result.json").read_text()) == got
    assert (got["pass1_before"], got["pass1_after"]) == (0.125, 0.5)
    assert (got["pass4_before"], got["pass4_after"]) == (0.5, 0.5)
    assert (got["updates"], got["episodes"], got["dropped"]) == (2, 1, {})
    assert got["staleness_mean"] == pytest.approx(1.5)
    assert got["pools"]["a"].keys() == {"capacity_share", "sample_share", "kl", "out_of_band_share", "tokens_per_s"}
    assert got["pools"]["a"]["capacity_share"] == 0.5
    assert got["pools"]["a"]["sample_share"] == pytest.approx(3 / 5)
    assert got["pools"]["a"]["kl"] == pytest.approx((0.1 * 100 + 0.2 * 300) / 400)
    assert "12.5 %" in console.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "run" / "report.html").is_file()
