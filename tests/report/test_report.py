"""The report is one page that holds everything it shows, drawn from a ledger that it never changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from html.parser import HTMLParser
from pathlib import Path

import pytest

from farflung.config import Recipe
from farflung.core.errors import BadInput, Corrupt
from farflung.report import draw_report
from farflung.report.charts import Chart, Series, draw, number, percent
from farflung.report.curves import rate, total
from farflung.report.data import PoolPoint, read_run
from farflung.report.scores import scores
from farflung.report.transcript import choose, load_tokenizer
from farflung.run.ledger import Ledger

VOID = {"meta", "line", "circle", "path", "br"}


class Page(HTMLParser):
    """Checks nesting and collects text, links and chart data."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []
        self.charts: dict[str, dict[str, object]] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        self.references += [str(known[name]) for name in ("src", "href") if name in known]
        if "data-points" in known:
            self.charts[str(known["aria-label"])] = json.loads(str(known["data-points"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return parsed(draw_report(run_dir))


def test_the_page_needs_nothing_outside_itself(run_dir: Path, page: Page) -> None:
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    raw = draw_report(run_dir).read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", raw)
    assert len(raw) < 1 << 20


def test_every_curve_is_drawn_with_every_point(page: Page) -> None:
    for title in ("Reward", "Gradient norm", "Entropy", "Transcript length", "Format errors"):
        [series] = page.charts[title]["s"]  # type: ignore[misc]
        assert [p[2] for p in series["p"]] == [str(u) for u in range(1, 21)]
    for title in (
        "KL(q‖p) by pool",
        "k3 by pool",
        "Tokens out of band by pool",
        "Reward by pool",
        "Tokens per second by pool",
    ):
        assert [s["n"] for s in page.charts[title]["s"]] == ["nvfp4", "fp8", "bf16"]  # type: ignore[attr-defined]
        assert all(s["p"] for s in page.charts[title]["s"])  # type: ignore[attr-defined]


def test_scores_pools_drops_and_settings_are_told(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    assert "34 % → 71 % +37 points" in text
    assert "58 % → 83 % +25 points" in text
    assert "pass@1 on 64 held-out tasks" in text
    assert re.search(r"nvfp4 nvfp4 fp8 1 50\.0 % 50\.0 %", text)
    assert "sandbox 0 1 bwrap did not start within 20 s" in text
    assert "sampler 1 0 no replica answered for 120 s" in text
    assert "format error 5 11.1 % 0 %" in text
    assert "lr 0.001" in text


def test_three_episodes_can_be_read_and_their_text_is_only_text(run_dir: Path, page: Page) -> None:
    text = "".join(page.text)
    for told in (
        "Solved",
        "Failed",
        "Ended in a format error",
        "cat -n numbers/core.py",
        "# naïve ✓",
        "<b>hm</b>",
        "<|end|>",
    ):
        assert told in text
    raw = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "<b>hm</b>" not in raw
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", raw)
    assert "␀" in text
    assert 'title="nvfp4 · version 19 · probability' in raw
    assert '<span class="add">+    return 0</span>' in raw


def test_turns_give_back_the_transcript_token_for_token(run_dir: Path) -> None:
    run = read_run(run_dir)
    tokenizer = load_tokenizer(run.model)
    readings = {reading.kind: reading for reading in choose(run.episodes, tokenizer)}
    assert set(readings) == {"solved", "failed", "format error"}
    reading = readings["solved"]
    assert [turn.role for turn in reading.turns] == ["task", "agent", "tool", "agent", "tool", "agent"]
    assert sum(turn.tokens for turn in reading.turns) == len(reading.episode.trajectory.ids)
    text = "".join(piece.text for turn in reading.turns for piece in turn.pieces)
    assert text == tokenizer.decode(reading.episode.trajectory.ids.tolist(), skip_special_tokens=False)
    agent = [piece for turn in reading.turns if turn.role == "agent" for piece in turn.pieces]
    assert len(agent) == int(reading.episode.trajectory.action.sum())
    assert all(piece.origin.startswith("nvfp4 · version ") for piece in agent)


def test_unreadable_episodes_are_passed_over(run_dir: Path, tmp_path: Path) -> None:
    run = read_run(run_dir)
    solved = [row for row in run.episodes if row.reward > 0]
    broken = tmp_path / "broken.ffr"
    broken.write_bytes(b"FFR1 nothing")
    rows = [type(row)(row.group, row.index, row.task, row.end, row.reward, broken) for row in solved[:2]] + solved[2:]
    [reading] = choose(rows, load_tokenizer(run.model))
    assert reading.episode.group == solved[2].group


def test_it_draws_while_the_run_goes_on(run_dir: Path, tmp_path: Path) -> None:
    """A run that has just begun, with its writer holding the ledger."""
    shutil.copy(run_dir / "recipe.json", tmp_path)
    ledger = Ledger(tmp_path)
    try:
        page = parsed(draw_report(tmp_path))
        assert "0 of 20 updates" in page.text
        assert "not measured yet" in page.text
        assert page.charts == {}
        assert "nothing recorded yet" in page.text
        ledger.open_group(0, "t")
        assert read_run(tmp_path).groups == {"open": 1}
    finally:
        ledger.close()


def test_it_reads_a_folder_that_cannot_be_written(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("recipe.json", "ledger.sqlite"):
        shutil.copy(run_dir / name, folder)
    folder.chmod(0o555)
    try:
        assert len(read_run(folder).updates) == 20
        assert sorted(os.listdir(folder)) == ["ledger.sqlite", "recipe.json"] or os.geteuid() == 0
    finally:
        folder.chmod(0o755)


def test_the_ledger_is_left_as_it_is(run_dir: Path) -> None:
    before = sqlite3.connect(run_dir / "ledger.sqlite").execute("PRAGMA data_version").fetchone()
    raw = (run_dir / "ledger.sqlite").read_bytes()
    draw_report(run_dir)
    assert (run_dir / "ledger.sqlite").read_bytes() == raw
    assert sqlite3.connect(run_dir / "ledger.sqlite").execute("PRAGMA data_version").fetchone() == before


def test_no_run_and_no_ledger_are_told_apart(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run is here"):
        draw_report(tmp_path)
    shutil.copy(run_dir / "recipe.json", tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to look like something" * 100)
    with pytest.raises(Corrupt, match="not a ledger"):
        draw_report(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(Corrupt, match="not a run's recipe"):
        draw_report(tmp_path)


def test_a_missing_tokenizer_costs_only_the_episodes(run_dir: Path, tmp_path: Path) -> None:
    for name in ("recipe.json", "ledger.sqlite"):
        shutil.copy(run_dir / name, tmp_path)
    facts = json.loads((tmp_path / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps(facts | {"model": str(tmp_path / "gone")}))
    text = " ".join(parsed(draw_report(tmp_path)).text)
    assert "They cannot be shown" in text
    assert "34 %" in text


def test_totals_weigh_by_tokens(run_dir: Path) -> None:
    run = read_run(run_dir)
    mine = total(run, "fp8")
    stats = [m.pools["fp8"] for m in run.updates]
    assert mine.tokens == sum(s.tokens for s in stats)
    assert mine.kl == pytest.approx(sum(s.kl * s.tokens for s in stats) / mine.tokens)
    assert total(run, "nowhere").tokens == 0
    assert Recipe.model_validate(run.recipe.model_dump()) == run.recipe


def test_a_rate_bridges_a_sampler_that_started_again() -> None:
    points = [PoolPoint(0, 0, 1), PoolPoint(10, 500, 1), PoolPoint(20, 100, 1), PoolPoint(30, 600, 1)]
    assert rate(points) == pytest.approx(1000 / 30)
    assert rate(points[:1]) == rate([]) == 0.0


@pytest.mark.parametrize("values", [[], [float("nan")], [0.0], [1.0, 1.0], [0.0, 1e-9], [-3.0, 5e7], [1e-8, 1e8]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_give_a_chart(values: list[float], log: bool) -> None:
    svg = draw(Chart("t", "", [Series("a", 0, list(range(len(values))), values)], number, log=log))
    assert svg.startswith("<svg")
    assert svg.endswith("</svg>")
    assert "nan" not in svg.lower().replace("nanobot", "")
    for y in re.findall(r'cy="([\d.\-]+)"', svg):
        assert 0 <= float(y) <= 210


def test_long_series_are_thinned_but_keep_their_ends() -> None:
    svg = draw(Chart("t", "", [Series("a", 0, list(range(9000)), [float(i) for i in range(9000)])], number))
    assert len(svg) < 60_000
    points = json.loads(re.search(r'data-points="([^"]*)"', svg)[1].replace("&quot;", '"'))["s"][0]["p"]  # type: ignore[index]
    assert (points[0][2], points[-1][2]) == ("0", "8999")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 %"), (0.5, "50.0 %"), (1, "100 %"), (0.0123, "1.2 %"), (0.00123, "0.12 %"), (1e-5, "0.001 %")],
)
def test_percent(value: float, shown: str) -> None:
    assert percent(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234, "1,234"), (12345, "12.3 k"), (2.5e6, "2.5 M"), (0.0011, "0.0011"), (2e-5, "2e-5")],
)
def test_number(value: float, shown: str) -> None:
    assert number(value) == shown


def test_scores_take_what_was_measured() -> None:
    none = {"mean": None, "se": None, "tasks": 0}
    half = {"mean": 0.5, "se": None, "tasks": 1}
    assert scores({}) == []
    [score] = scores({"before": {"pass1": half, "pass4": none}})
    assert (score.before, score.after, score.gain) == ("50 %", "", "")
    [score] = scores({"before": {"pass1": half}, "after": {"pass1": half | {"mean": 0.25}}})
    assert (score.before, score.after, score.gain) == ("50 %", "25 %", "−25")
    [score] = scores({"before": {"pass1": half}, "after": {"pass1": half | {"tasks": 2}}})
    assert score.gain == ""  # other tasks: no difference can be told
