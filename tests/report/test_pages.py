"""The written pages say all there is, and their links lead somewhere."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest

from farflung.cli.main import COMMANDS
from farflung.core.episode import DropCause, EndReason
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.run.ledger import SCHEMA

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_ledgers_page_names_every_column_reason_cause_and_metric() -> None:
    page = (ROOT / "docs" / "ledger.md").read_text()
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
        for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
            assert f"`{column}`" in rows[table], f"{table}.{column}"
    for word in [
        *EndReason,
        *DropCause,
        *(f.name for f in fields(TokenStats)),
        *(f.name for f in fields(UpdateMetrics)),
    ]:
        assert f"`{word}`" in page


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"`farflung {command}" in text


def test_every_slow_test_is_listed_in_the_readme() -> None:
    slow = {path.name for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()} - {
        Path(__file__).name
    }
    listed = (
        (ROOT / "README.md").read_text().partition("<!-- slow tests -->")[2].partition("<!-- end of slow tests -->")[0]
    )
    assert {name for name in slow if name not in listed} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
