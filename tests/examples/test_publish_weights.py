"""The example that publishes: a sampler in a process of its own ends with the trainer's weights, bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from farflung.core.errors import Corrupt, InfraError
from farflung.weights import FolderStore, Subscriber
from farflung.weights.manifest import derive_key

SCRIPT = Path(__file__).parents[2] / "examples" / "publish_weights.py"
TOKEN = "a-long-random-word"


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("publish_weights")


def test_both_processes_together_send_far_less_than_whole_copies() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--steps", "6"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("trainer  version")]) == 7
    followed = [line for line in lines if line.startswith("sampler  version")]
    assert "a whole copy" in followed[0]
    assert followed[-1].startswith("sampler  version   6 ")
    total = re.fullmatch(r"sampler  (\d+) versions of nvfp4 in (\d+) bytes; whole they are (\d+), .*", lines[-1])
    assert total is not None
    versions, fetched, whole = map(int, total.groups())
    assert versions == len(followed)
    assert fetched < whole or versions == 1


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_what_is_followed_is_what_was_published(example: ModuleType, tmp_path: Path, format: str) -> None:
    store = str(tmp_path)
    published = list(example.publish(store, 4, 1e-4, TOKEN))
    assert [one.version for _, one in published] == [0, 1, 2, 3, 4]
    assert all(loss > 0 for loss, _ in published[1:])
    (followed,) = example.follow(store, format, 4, TOKEN, 5.0)
    assert (followed.version, followed.links) == (4, 4)
    start = Subscriber(FolderStore(tmp_path), example.RUN, key=derive_key(TOKEN)).fetch(0).tensors
    policy = example.make_policy().state_dict()
    assert set(start) == set(policy)
    assert all(torch.equal(tensor, policy[name].bfloat16()) for name, tensor in start.items())


def test_another_token_is_refused_and_a_trainer_that_does_not_come_is_said(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"nothing new came for 0\.1 s"):
        list(example.follow(str(tmp_path), "bf16", 1, TOKEN, 0.1))
    with pytest.raises(InfraError, match=r"no sampler came within 0\.1 s"):
        example.await_sampler(str(tmp_path), 0.1)
    next(example.publish(str(tmp_path), 1, 1e-4, TOKEN))
    with pytest.raises(Corrupt, match="signed with another key"):
        list(example.follow(str(tmp_path), "bf16", 0, "another-word", 5.0))


def test_a_part_alone_wants_a_store_and_a_token() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "follow"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "follow needs --store, and FARFLUNG_TOKEN in the environment" in done.stderr
