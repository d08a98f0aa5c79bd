"""farflung weights materialize: checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farflung.weights import FolderStore
from tests.cli.weights.kit import Run, write
from tests.weights.published import publish


@pytest.mark.parametrize("given", ["{store} {version}", "{version} --store {store}", "--store {store} {version}"])
def test_materialize_writes_the_version_that_is_asked_for(
    weights: Run, tmp_path: Path, token: Path, given: str
) -> None:
    store = FolderStore(tmp_path / "store")
    history = publish(store, 7)
    for version, number in (("latest", 6), ("2", 2)):
        out = tmp_path / f"out-{version}"
        argv = given.format(store=store.root, version=version).split()
        code, shown, _ = weights("materialize", *argv, "--key-file", token, "--out", out)
        assert code == 0
        assert f"{out}: version {number} as bf16, " in shown
        assert "lm_head.weight is model.embed_tokens.weight" in shown
        found = load_file(out / "model.safetensors")
        for name, tensor in history[number].items():
            assert name == "lm_head.weight" or torch.equal(found[name], tensor.bfloat16())


def test_materialize_in_codes_says_so_in_the_config(
    weights: Run, store: FolderStore, token: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model / "config.json", '{"model_type": "llama"}')
    write(model / "tokenizer.json", "{}")
    out = tmp_path / "deep" / "out"
    code, shown, _ = weights(
        "materialize", store.root, "latest", "--key-file", token, "--format", "nvfp4", "--out", out, "--model", model,
        "--shard-gb", "0.00001",
    )  # fmt: skip
    assert code == 0
    assert "model-00001-of-0000" in shown
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    assert (out / "tokenizer.json").exists()
    assert (out / "model.safetensors.index.json").exists()
