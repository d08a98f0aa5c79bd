"""Checkpoints: what those who read them find is the version, bit for bit, and a config that is true."""

from __future__ import annotations

import json
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

from farflung.core.errors import BadInput, InfraError
from farflung.formats.checkpoint import from_tensors
from farflung.formats.weights import quantise
from farflung.weights import FolderStore, Publisher, Subscriber
from farflung.weights.checkpoint import write_checkpoint
from farflung.weights.image import Image

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def source(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer, an index and a config of a quantised model."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"large")
    return folder


@pytest.fixture(scope="module")
def images(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """Version 0 in every format."""
    store = FolderStore(tmp_path_factory.mktemp("store"))
    Publisher(store, "r", formats=FORMATS).publish(0, model.state_dict())
    found = {}
    for format in FORMATS:
        subscriber = Subscriber(store, "r", format=format)
        subscriber.fetch(0)
        assert subscriber.image is not None
        found[format] = subscriber.image
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_transformers_loads_it(
    format: str, model: LlamaForCausalLM, images: dict[str, Image], source: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "out", images[format], format, facts={}, model=source)
    more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if format == "fp8" else {}
    loaded, seen = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, **more)
    assert not any(seen.values()), seen
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    before = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        expected = before[name]
        if format == "fp8" and "proj" in name:
            whole = quantise(expected.bfloat16(), "fp8", name=name).dequantise()
            assert torch.allclose(tensor.float(), whole, rtol=2**-7, atol=0), name  # it multiplies in BF16
        else:
            assert torch.equal(tensor, expected.bfloat16()), name


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
def test_codes_and_scales_are_those_of_the_format(
    format: Any, model: LlamaForCausalLM, images: dict[str, Image], source: Path, tmp_path: Path
) -> None:
    written = write_checkpoint(tmp_path / "out", images[format], format, facts={"run": "r"}, model=source)
    assert written.files == ("model.safetensors",)
    tensors = load_file(written.folder / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in written.tied:
            assert name not in tensors
        elif "proj" in name:
            whole = quantise(weight.bfloat16(), format, name=name)
            found = from_tensors(tensors, name, format, *weight.shape)
            assert torch.equal(found.dequantise(), whole.dequantise())
        else:
            assert torch.equal(tensors[name], weight.bfloat16())
    dtype = torch.float8_e4m3fn if format == "fp8" else torch.uint8
    assert tensors[UP].dtype == dtype
    entry = config_of(written.folder)["quantization_config"]
    kept = entry.get("ignore") or entry.get("exclude") or entry["modules_to_not_convert"]
    assert kept == ["model.embed_tokens", "lm_head"]


def test_bf16_drops_what_the_model_said_of_its_own_quantisation(
    images: dict[str, Image], source: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "out", images["bf16"], "bf16", facts={}, model=source)
    assert "quantization_config" not in config_of(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert not names & {"optimizer.pt", "model.safetensors.index.json"}
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


def test_of_a_head_that_is_the_embedding_the_embedding_is_written(model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    Publisher(store, "r").publish(0, dict(sorted(model.state_dict().items())))  # the head first
    subscriber = Subscriber(store, "r")
    subscriber.fetch(0)
    assert subscriber.image is not None
    written = write_checkpoint(tmp_path / "out", subscriber.image, "bf16", facts={})
    assert written.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    found = load_file(written.folder / "model.safetensors")
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"], model.state_dict()["lm_head.weight"].to(torch.bfloat16))


def test_a_large_one_is_several_files_with_an_index(images: dict[str, Image], tmp_path: Path) -> None:
    image = images["nvfp4"]
    written = write_checkpoint(tmp_path / "out", image, "nvfp4", facts={"version": "0"}, shard_bytes=20_000)
    assert len(written.files) > 2
    assert written.files[0] == f"model-00001-of-{len(written.files):05d}.safetensors"
    index = json.loads((written.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.nbytes == image.schema.nbytes
    assert set(index["weight_map"]) == set(image.schema.tensors)
    for name, file in index["weight_map"].items():
        with safe_open(written.folder / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), image.tensors()[name])
            assert opened.metadata()["version"] == "0"
            assert json.loads(opened.metadata()["tied"]) == {"lm_head.weight": "model.embed_tokens.weight"}
    sizes = [sum(t.numel() * t.element_size() for t in load_file(written.folder / f).values()) for f in written.files]
    assert all(
        size <= 20_000 or len(load_file(written.folder / f)) == 1 for size, f in zip(sizes, written.files, strict=True)
    )
    assert not (written.folder / "config.json").exists()


def test_a_native_stream_is_written_as_it_is(source: Path, tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.arange(6, dtype=torch.uint8),
        "b": torch.tensor(0.5),
        "c": torch.ones(2, dtype=torch.half),
    }
    store = FolderStore(tmp_path / "store")
    Publisher(store, "r", formats=("native",)).publish(0, tensors)
    subscriber = Subscriber(store, "r", format="native")
    subscriber.fetch(0)
    assert subscriber.image is not None
    write_checkpoint(tmp_path / "out", subscriber.image, "native", facts={}, model=source)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert config_of(tmp_path / "out") == config_of(source)


def test_nothing_is_written_over_and_nothing_is_left_half_written(images: dict[str, Image], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(out, images["bf16"], "bf16", facts={})  # empty: fine
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match="not empty; nothing was written"):
        write_checkpoint(out, images["fp8"], "fp8", facts={})
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(BadInput, match="it is a file"):
        write_checkpoint(out / "model.safetensors", images["fp8"], "fp8", facts={})
    with pytest.raises(BadInput, match=r"no config\.json"):
        write_checkpoint(tmp_path / "new", images["fp8"], "fp8", facts={}, model=tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadInput, match="not a JSON object"):
        write_checkpoint(tmp_path / "new", images["fp8"], "fp8", facts={}, model=tmp_path)
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(BadInput, match="cannot be read"):
        write_checkpoint(tmp_path / "new", images["fp8"], "fp8", facts={}, model=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "config.json"}


def test_a_disk_that_takes_no_more_is_said_and_leaves_nothing(images: dict[str, Image], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(InfraError, match="cannot write the checkpoint"):
            write_checkpoint(tmp_path / "out", images["bf16"], "bf16", facts={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
