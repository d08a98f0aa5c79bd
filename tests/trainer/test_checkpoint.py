"""Checkpoints go on bit for bit, exports load, and damage is an error with a name."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from farflung.config import TrainConfig
from farflung.core.episode import Episode
from farflung.core.errors import BadInput, Corrupt
from farflung.trainer import Trainer
from farflung.trainer.checkpoint import Checkpoint
from farflung.trainer.files import PARTIAL, new_folder
from tests.trainer.episodes import load, random_group
from tests.trainer.test_step import masters

Folder = Callable[[str], Path]
CONFIG = TrainConfig(lr=1e-2, warmup=6, weight_decay=0.1)


def batches(folder: Path, rng: np.random.Generator, count: int) -> list[list[list[Episode]]]:
    model = load(folder)
    return [[random_group(model, rng, group=g, noise=0.5) for g in range(2)] for _ in range(count)]


def trained(folder: Path, rng: np.random.Generator, steps: int = 2) -> Trainer:
    trainer = Trainer(folder, CONFIG)
    for batch in batches(folder, rng, steps):
        trainer.step(batch)
    return trainer


FIRST_LIFE = """
import os, sys
from pathlib import Path
from farflung.config import TrainConfig
from farflung.core.episode import Episode
from farflung.trainer import Trainer
folder, work = map(Path, sys.argv[1:])
def batch(n):
    return [[Episode.decode(f.read_bytes()) for f in sorted((work / str(n)).glob(f"{g}-*"))] for g in range(2)]
trainer = Trainer(folder, TrainConfig(lr=1e-2, warmup=6, weight_decay=0.1), seed=5)
for n in range(3):
    trainer.step(batch(n))
trainer.save(work / "checkpoint", {"position": 3})
trainer.step(batch(3))
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_killed_and_resumed_is_the_same_run(model_folder: Folder, rng: np.random.Generator, tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    steps = batches(folder, rng, 6)
    for n, step in enumerate(steps):
        (tmp_path / str(n)).mkdir()
        for g, group in enumerate(step):
            for e in group:
                (tmp_path / str(n) / f"{g}-{e.index}").write_bytes(e.encode())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    run = [sys.executable, "-c", FIRST_LIFE, str(folder), str(tmp_path)]
    assert subprocess.run(run, env=env, timeout=100).returncode == -9
    second, extra = Trainer.load(tmp_path / "checkpoint", folder, CONFIG)
    for step in steps[extra["position"] :]:
        second.step(step)
    second.save(tmp_path / "end", {"position": 6})
    straight = Trainer(folder, CONFIG, seed=5)
    for step in steps:
        straight.step(step)
    straight.save(tmp_path / "straight", {"position": 6})
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("straight", "end"))
    assert one.keys() == two.keys()
    assert [k for k in one if not torch.equal(one[k], two[k])] == []
    facts = [json.loads((tmp_path / name / "state.json").read_text())["facts"] for name in ("straight", "end")]
    assert facts[0] == facts[1]


def test_save_replaces_and_load_returns_what_was_kept(
    model_folder: Folder, rng: np.random.Generator, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    trainer = trained(folder, rng)
    trainer.save(tmp_path / "c", {"old": True})
    trainer.save(tmp_path / "c", {"seen": [1, 2], "name": "x"})
    again, extra = Trainer.load(tmp_path / "c", folder, CONFIG)
    assert extra == {"seen": [1, 2], "name": "x"}
    assert again.version == 2
    assert all(torch.equal(t, masters(trainer)[n]) for n, t in masters(again).items())
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_an_error(
    file: str, harm: str, model_folder: Folder, rng: np.random.Generator, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    trained(folder, rng, 1).save(tmp_path / "c", {"position": 17})
    target = tmp_path / "c" / file
    raw = bytearray(target.read_bytes())
    match harm:
        case "flip":
            raw[raw.index(b"17") if file == "state.json" else len(raw) // 2] ^= 1
            target.write_bytes(raw)
        case "cut":
            target.write_bytes(raw[: len(raw) // 2])
        case "remove":
            target.unlink()
    with pytest.raises(BadInput, match="c: "):
        Trainer.load(tmp_path / "c", folder, CONFIG)


def test_a_checkpoint_of_another_model(model_folder: Folder, rng: np.random.Generator, tmp_path: Path) -> None:
    trained(model_folder("llama"), rng, 1).save(tmp_path / "c")
    with pytest.raises(BadInput, match="of another model"):
        Trainer.load(tmp_path / "c", model_folder("qwen3"), CONFIG)
    with pytest.raises(BadInput, match="no checkpoint"):
        Trainer.load(tmp_path / "nothing", model_folder("llama"), CONFIG)


def test_a_checkpoint_half_removed_is_damaged_and_the_one_before_can_be_taken(tmp_path: Path) -> None:
    """What a kill leaves while a checkpoint that is made again takes the old one's place."""
    (tmp_path / "update-000002").mkdir()
    with pytest.raises(Corrupt, match=r"state\.json cannot be read"):
        Checkpoint.read(tmp_path / "update-000002")


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    def write_half() -> None:
        with new_folder(tmp_path / "a") as folder:
            (folder / "half").write_text("x")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f".b.killed{PARTIAL}").mkdir()
    with new_folder(tmp_path / "a") as folder:
        (folder / "whole").write_text("x")
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["a", "a/whole"]


def test_no_room_for_a_checkpoint(model_folder: Folder, rng: np.random.Generator, tmp_path: Path) -> None:
    """The system refuses to write so much: an OSError like any other, and the checkpoint before stays."""
    trainer = trained(model_folder("llama"), rng, 1)
    trainer.save(tmp_path / "c", {"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            trainer.save(tmp_path / "c", {"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert Trainer.load(tmp_path / "c", model_folder("llama"), CONFIG)[1] == {"n": 1}


def test_published_weights_are_rounded_masters(model_folder: Folder, rng: np.random.Generator) -> None:
    trainer = trained(model_folder("llama"), rng, 1)
    weights = trainer.weights()
    assert "lm_head.weight" not in weights
    names = set(load(model_folder("llama")).state_dict()) - {"lm_head.weight"}
    assert set(weights) == names
    for name, tensor in masters(trainer).items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16))
    assert "lm_head.weight" in Trainer(model_folder("llama-untied"), CONFIG).weights()


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen3"])
def test_an_export_loads(kind: str, model_folder: Folder, rng: np.random.Generator, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = load(model_folder(kind))
    model.save_pretrained(source)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(source)
    trainer = Trainer(source, CONFIG)
    trainer.step(batches(source, rng, 1)[0])
    ids = torch.arange(20)[None]
    for dtype in ("bfloat16", "float32"):
        trainer.export(tmp_path / dtype, dtype)
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert exported.dtype == getattr(torch, dtype)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / dtype)
        assert again("b a c")["input_ids"] == [1, 0, 2]
        assert again.chat_template == tokenizer.chat_template
        assert exported.config.to_dict().get("attention_dropout") == model.config.to_dict().get("attention_dropout")
        wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
        for name, tensor in masters(trainer).items():
            assert torch.equal(wide.state_dict()[name], tensor.to(getattr(torch, dtype)).float())
        assert torch.isfinite(wide(ids).logits).all()


def test_models_that_cannot_be_trained(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such model folder"):
        Trainer(tmp_path / "nothing", CONFIG)
    with pytest.raises(BadInput, match="no such model folder"):
        Trainer("./nothing", CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no config\.json"):
        Trainer(tmp_path / "empty", CONFIG)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no weights"):
        Trainer(tmp_path / "empty", CONFIG)
    encoder = transformers.T5Config(vocab_size=48, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5EncoderModel(encoder).save_pretrained(tmp_path / "t5")
    with pytest.raises(BadInput, match="not a causal LM"):
        Trainer(tmp_path / "t5", CONFIG)
    model = load(model_folder("llama"))
    model.save_pretrained(tmp_path / "torn")
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BadInput, match="cannot be loaded"):
        Trainer(tmp_path / "torn", CONFIG)
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path / "gap", state_dict=state)
    with pytest.raises(BadInput, match=r"3 tensors are missing.*layers\.1\.mlp"):
        Trainer(tmp_path / "gap", CONFIG)
