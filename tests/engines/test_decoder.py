"""The decoder against transformers: prompts read in parts, rows of different length, every supported kind of model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from farflung.core.errors import BadInput
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.cache import Reading, RowCache, kv_shape
from farflung.engines.embedded.decoder import Decoder, Workspace
from farflung.engines.embedded.weights import prepare, read_folder
from tests.engines import tiny

CPU = torch.device("cpu")


@torch.inference_mode()
def decode(
    folder: Path, sequences: list[np.ndarray[Any, Any]], starts: list[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Logits of every position from each start on: prompts read in two uneven parts, then all sequences decode together."""
    a = Architecture.read(folder)
    weights = prepare(a, read_folder(folder), "bf16", dtype, CPU)
    decoder, cache = Decoder(a, a.context, None, CPU), RowCache(a, dtype, CPU)
    reading, decoding = Workspace(a, dtype, CPU), Workspace(a, dtype, CPU)
    stores = [torch.full(kv_shape(a, start), torch.nan, dtype=dtype) for start in starts]
    for low, high in ((0, 3), (3, 1000)):
        parts = [(low, min(high, start)) for start in starts]
        ids = np.concatenate([s[i:j] for s, (i, j) in zip(sequences, parts, strict=True)]).astype(np.int64)
        positions = np.concatenate([np.arange(i, j) for i, j in parts])
        attention = Reading(a, [(kv, i, j - i) for kv, (i, j) in zip(stores, parts, strict=True)])
        args = torch.from_numpy(ids), torch.from_numpy(positions)
        assert decoder.hidden(weights, *args, attention.attend, reading) is None
    for row, kv in enumerate(stores):
        cache.reserve(row + 1, kv.shape[3])
        cache.write(row, kv)
    lengths, logits = np.array(starts), []
    for _ in range(min(len(s) - start for s, start in zip(sequences, starts, strict=True))):
        cache.reserve(len(starts), int(lengths.max()) + 1)
        cache.begin(lengths)
        ids = torch.tensor([int(s[n]) for s, n in zip(sequences, lengths, strict=True)])
        decoder.hidden(weights, ids, torch.from_numpy(lengths.copy()), cache.attend, decoding)
        logits.append(decoder.logits(weights, decoding))
        lengths += 1
    return list(torch.stack(logits, 1))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(kind, tmp_path, spread=0.1)
    sequences = [tiny.prompt(200, 1), tiny.prompt(180, 2), tiny.prompt(171, 3)]
    starts = [120, 5, 60]
    model = tiny.reference(folder)
    for ours, ids, start in zip(decode(folder, sequences, starts, torch.float32), sequences, starts, strict=True):
        with torch.inference_mode():
            theirs = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, start : start + len(ours)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3"])
def test_bfloat16_computes_the_same_model(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(kind, tmp_path, spread=0.1)
    sequences, starts = [tiny.prompt(60, 1), tiny.prompt(50, 2)], [30, 4]
    exact = decode(folder, sequences, starts, torch.float32)
    rough = decode(folder, sequences, starts, torch.bfloat16)
    for ours, theirs in zip(rough, exact, strict=True):
        assert (ours - theirs).square().mean().sqrt() < 0.03 * theirs.std()


def test_the_older_form_of_rotary_parameters(tmp_path: Path) -> None:
    new = Architecture.read(tiny.save("llama3-rope", tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}
    assert torch.equal(Architecture.parse(raw).rotations(64), new.rotations(64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM and Qwen3ForCausalLM"),
        ({"architectures": None}, "architecture is none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {}}, "quantised already"),
        ({"hidden_size": None}, "not the configuration"),
        ({"num_key_value_heads": 3}, "4 heads"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = json.loads((tiny.save("llama", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(BadInput, match=message):
        Architecture.read(tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        Architecture.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        Architecture.read(tmp_path)
    with pytest.raises(BadInput, match=r"neither model\.safetensors"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(BadInput, match="not a safetensors file"):
        read_folder(tmp_path)


def test_sharded_folders(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({n: whole[n] for n in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    again = read_folder(folder)
    assert sorted(again) == names
    assert all(torch.equal(again[n], whole[n]) for n in names)
    (folder / "b.safetensors").unlink()
    with pytest.raises(BadInput, match="missing") as caught:
        read_folder(folder)
    assert caught.value.where.endswith("b.safetensors")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path)
    a, weights = Architecture.read(folder), read_folder(folder)
    for bad, message in (
        ({k: v for k, v in weights.items() if "2.mlp.up" not in k}, r"lack model\.layers\.2\.mlp\.up_proj\.weight"),
        (weights | {"model.norm.weight": torch.ones(7)}, r"model\.norm\.weight has shape \[7\]"),
        (weights | {"model.layers.0.mlp.up_proj.weight": torch.full((48, 32), torch.nan)}, "NaN"),
    ):
        with pytest.raises(BadInput, match=message):
            prepare(a, bad, "nvfp4", torch.float32, CPU)
