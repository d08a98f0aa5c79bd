"""Ranks of a sharded trainer publish together: real processes, real FSDP, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from farflung.weights import FolderStore, Subscriber
from tests.weights.sharded import FORMATS


def run(folder: Path, size: int, *options: str) -> None:
    """All ranks, to a good end."""
    script = Path(__file__).with_name("sharded.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(folder), *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, said = process.communicate(timeout=100)
            assert process.returncode == 0, f"rank {rank}: {said}"
    finally:
        for process in ranks:
            process.kill()


def test_shards_come_to_the_same_versions_as_the_whole_model(tmp_path: Path) -> None:
    run(tmp_path, 2)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for format in FORMATS:
        for version in (3, 1):
            found = Subscriber(FolderStore(tmp_path / "together"), "run", format=format).fetch(version).tensors
            other = Subscriber(FolderStore(tmp_path / "alone"), "run", format=format).fetch(version).tensors
            assert found.keys() == other.keys()
            for name, tensor in found.items():
                assert tensor.dtype == other[name].dtype
                mine, theirs = (t.reshape(-1).view(torch.uint8) for t in (tensor, other[name]))
                assert torch.equal(mine, theirs), (format, version, name)
    newest = Subscriber(FolderStore(tmp_path / "together"), "run").fetch(3).tensors
    assert all(torch.equal(newest[name], tensor.bfloat16()) for name, tensor in whole.items())


def test_what_one_rank_meets_all_raise(tmp_path: Path) -> None:
    run(tmp_path, 2, "fail")
    assert "StoreError" in (tmp_path / "error-1").read_text()
    assert "rank 1 could not publish: StoreError" in (tmp_path / "error-0").read_text()
    assert Subscriber(FolderStore(tmp_path / "together"), "run").newest() == 1


def test_blocks_that_a_rank_would_cut_are_refused(tmp_path: Path) -> None:
    run(tmp_path, 3)
    said = [(tmp_path / f"error-{rank}").read_text() for rank in range(3)]
    assert all("multiples of 128 rows" in text for text in said)
