"""The warm start, small but whole: real sandboxes, a real tokenizer, real training, a real evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from farflung.agents.calls import BASH_TOOL, Call
from farflung.agents.dialect import Dialect
from farflung.agents.harness import begin
from farflung.agents.solver import SUBMIT, Habits
from farflung.config import AgentConfig, SandboxConfig
from farflung.core.errors import BadInput
from farflung.run import supervised
from farflung.run.demonstrations import Demonstration, Role, Shown, encode, record
from farflung.run.supervised import Shape, fit, new_model
from farflung.run.warmstart import Plan, make_tasks, warmstart
from farflung.sandboxes import open_factory, probe
from farflung.tasks.files import load_tasks
from farflung.tasks.repair import generate, signature

pytestmark = pytest.mark.skipif(probe("bubblewrap") is not None, reason=str(probe("bubblewrap")))
PLAN = Plan(seed=5, train_tasks=4, heldout_tasks=2, demonstrations=24, steps=3, batch=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("warmstart")
    warmstart(out, PLAN, console=Console(quiet=True))
    return out


@pytest.fixture(scope="module")
def episodes(made: Path) -> list[Demonstration]:
    raw = zstandard.ZstdDecompressor().decompress(
        (made / "demonstrations.jsonl.zst").read_bytes(), max_output_size=1 << 24
    )
    lines = [json.loads(line) for line in raw.splitlines()]
    return [Demonstration(line["statement"], tuple(Shown(**turn) for turn in line["turns"])) for line in lines]


def test_it_makes_tasks_episodes_and_a_policy_that_transformers_load(made: Path, episodes: list[Demonstration]) -> None:
    assert len(load_tasks(str(made / "tasks" / "train.jsonl.zst"))) == 4
    assert len(load_tasks(str(made / "tasks" / "heldout.jsonl.zst"))) == 2
    assert len(episodes) == 24
    assert all(episode.turns[-1] == Shown(SUBMIT, "") for episode in episodes)
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    card = (made / "policy" / "README.md").read_text()
    assert "farflung warmstart OUT --seed 5 --train-tasks 4" in card
    assert f"A Llama of {sum(p.numel() for p in model.parameters()):,} parameters" in card
    assert "license: apache-2.0" in card


def test_episodes_are_encoded_as_the_harness_and_transformers_would(made: Path, episodes: list[Demonstration]) -> None:
    dialect, tokenizer = Dialect.load(made / "policy"), AutoTokenizer.from_pretrained(made / "policy")
    assert dialect.tool_format == "command"
    for episode in episodes:
        ids, roles = encode(episode, dialect)
        action = roles != Role.READ
        messages = [{"role": "user", "content": episode.statement}]
        for turn in episode.turns:
            call = {"type": "function", "function": {"name": "bash", "arguments": {"command": turn.command}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            if turn.command != SUBMIT:
                messages.append({"role": "tool", "content": turn.output})
        assert ids.tolist() == tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], return_dict=False)
        starts = np.flatnonzero(np.diff(action.astype(int), prepend=0) == 1)
        ends = [*np.flatnonzero(np.diff(action.astype(int)) == -1), len(ids) - 1]
        replies = [dialect.parse(ids[a : b + 1]) for a, b in zip(starts, ends, strict=True)]
        assert replies == [Call(turn.command) for turn in episode.turns]
        assert [roles[a] == Role.MISTAKE for a in starts] == [turn.mistake for turn in episode.turns]
        assert len(ids) <= 1024


def test_an_episode_begins_as_a_run_begins_it(made: Path) -> None:
    dialect = Dialect.load(made / "policy")
    task = next(generate(5))
    ids, _ = encode(Demonstration(task.statement, (Shown(SUBMIT, ""),)), dialect)
    opening = begin(task, dialect).ids
    assert ids[: len(opening)].tolist() == opening.tolist()


async def test_what_is_recorded_is_what_the_sandbox_prints_and_is_the_same_again() -> None:
    factory = open_factory(SandboxConfig())
    tasks = list(islice(generate(21), 6))
    habits = Habits(blind=0.0, careless=1.0, again=0.0)
    first = [d async for d in record(tasks, factory, AgentConfig(), seed=1, habits=habits)]
    second = [d async for d in record(tasks, factory, AgentConfig(), seed=1, habits=habits)]
    assert first == second
    assert len(first) >= 4
    printed = {turn.output for episode in first for turn in episode.turns if "unittest" in turn.command}
    assert {"OK"} <= printed <= {
        "OK",
        "FAILED (failures=1)",
        "FAILED (errors=1)",
        "FAILED (failures=1, errors=1)",
    } or any(text.startswith("FAIL: ") for text in printed)
    assert all(turn.output == "[no output]" for e in first for turn in e.turns if turn.command.startswith("sed"))


def test_the_three_sets_of_tasks_share_no_module() -> None:
    tasks = make_tasks(replace(PLAN, train_tasks=60, heldout_tasks=60))
    parts = [tasks.heldout, tasks.train, list(islice(tasks.demonstrated, 200))]
    modules = [{signature(task) for task in part} for part in parts]
    assert sum(map(len, modules)) == len(modules[0] | modules[1] | modules[2]) == 320


def test_the_packaged_tasks_are_the_ones_of_the_default_plan() -> None:
    tasks = make_tasks(Plan())
    assert load_tasks("builtin:repair/train") == tasks.train
    assert load_tasks("builtin:repair/heldout") == tasks.heldout


def test_training_lowers_the_loss_and_is_the_same_again() -> None:
    torch.set_num_threads(1)
    ids = np.array([5, 6, 7, 8, 9, 10] * 4, np.int32)
    samples = [(ids, (np.arange(len(ids)) >= 6).astype(np.int8))] * 8
    runs: list[list[float]] = []
    for _ in range(2):
        model = new_model(Shape(vocabulary=16, width=32, hidden=32, layers=1), 0, end_id=1, pad_id=0)
        losses: list[float] = []
        fit(model, samples, steps=60, batch=4, lr=1e-2, seed=0, progress=lambda _, loss, into=losses: into.append(loss))  # type: ignore[misc]
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][-1] < 0.5 * runs[0][0]


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(BadInput, match="not empty"):
        warmstart(tmp_path, PLAN)


@pytest.mark.parametrize("name", ["steps", "demonstrations", "batch", "train_tasks", "heldout_tasks"])
def test_a_plan_makes_at_least_one_of_everything(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        Plan(**{name: 0})


def test_a_mistake_is_read_past_and_not_learnt() -> None:
    """Its own tokens add nothing to the loss, and what follows is predicted with it in view."""
    model = new_model(Shape(vocabulary=16, width=32, hidden=32, layers=1), 0, end_id=1, pad_id=0)
    ids = np.array([5, 6, 7, 8, 9, 10], np.int32)
    roles = np.array([Role.READ, Role.OWN, Role.MISTAKE, Role.MISTAKE, Role.READ, Role.OWN], np.int8)
    log_p = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)
    nll = -log_p[torch.arange(5), torch.from_numpy(ids[1:]).long()]
    own, read = supervised._loss(model, [(ids, roles), (ids[:2], roles[:2])])
    torch.testing.assert_close(own, nll[0] * 2 + nll[4])
    torch.testing.assert_close(read, nll[3])
