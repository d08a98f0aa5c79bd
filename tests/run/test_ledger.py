from __future__ import annotations

from pathlib import Path

import pytest
from builders import episode

from farflung.core.episode import DropCause, Episode
from farflung.core.errors import Corrupt, FarflungError
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.run.ledger import Ledger
from farflung.weights.publisher import Published, PublishedStream

PUBLISHED = Published(1, {"bf16": PublishedStream(5, 100, 7, 0, 6.5), "fp8": PublishedStream(1, 100, 2, 0, 1.5)})


def metrics(update: int) -> UpdateMetrics:
    return UpdateMetrics(update, TokenStats(tokens=3, kl=0.5), {"a": TokenStats(tokens=3)}, grad_norm=1.5)


def test_an_episode_counts_once_and_survives_reopening(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open_group(0, "t")
    given = episode(0, 1, "t", version=4)
    assert ledger.add_episode(given, given.encode())
    assert not ledger.add_episode(given, given.encode())
    ledger.close()
    again = Ledger(tmp_path)
    assert again.episode_count() == 1
    assert again.groups("open")[0].finished == frozenset({1})
    assert again.oldest_version(0) == 4
    assert Episode.decode(again.read_episode(0, 1)).trajectory.ids.tolist() == given.trajectory.ids.tolist()


def test_a_damaged_episode_file_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open_group(0, "t")
    ledger.add_episode(episode(0, 0, "t"), episode(0, 0, "t").encode())
    path = tmp_path / "episodes" / "g000000-000.ffr"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match="g000000-000"):
        ledger.read_episode(0, 0)


def test_updates_come_in_turn_and_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.commit_update(metrics(1), PUBLISHED)
    assert not ledger.commit_update(metrics(1), PUBLISHED)
    with pytest.raises(FarflungError, match="reported after 1"):
        ledger.commit_update(metrics(3), PUBLISHED)
    assert ledger.updates() == [metrics(1)]


def test_a_batch_belongs_to_its_update_for_good(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for group in range(3):
        ledger.open_group(group, "t")
        ledger.group_ready(group, 0)
    ledger.take_batch(1, [0, 1])
    ledger.close()
    again = Ledger(tmp_path)
    assert again.batch(1) == [0, 1]
    assert again.batch(2) == []
    assert [row.id for row in again.groups("ready")] == [2]


def test_drops_are_counted_by_cause_and_apart_from_retries(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open_group(0, "t")
    ledger.add_episode(episode(0, 0, "t"), episode(0, 0, "t").encode())
    ledger.add_drop(0, 1, 0, DropCause.SANDBOX, "would not start", retried=True)
    ledger.add_drop(0, 1, 1, DropCause.SANDBOX, "would not start", retried=False)
    ledger.drop_group(0, DropCause.GROUP, "one survivor")
    assert ledger.drops() == {"sandbox": 1, "group": 1}
    assert ledger.drops(final=False) == {"sandbox": 1}


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"not sqlite at all, but long enough to be read" * 100)
    with pytest.raises(Corrupt, match="not a ledger"):
        Ledger(tmp_path)
