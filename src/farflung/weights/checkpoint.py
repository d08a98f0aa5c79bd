"""A version as a checkpoint: safetensors under checkpoint names in the format's own types, and a config that says so."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from safetensors import SafetensorError
from safetensors.torch import save_file

from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import WeightFormat
from farflung.formats.hub_config import quantization_config
from farflung.weights.image import Image
from farflung.weights.schema import Schema
from farflung.weights.streams import SUFFIXES

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5_000_000_000
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model's folder that are no weights: its configuration and its tokenizer."""


@dataclass(frozen=True, slots=True)
class Written:
    """``files`` of weights; ``tied``: names that were left out, as their tensor is there under another one."""

    folder: Path
    files: tuple[str, ...]
    nbytes: int
    tied: Mapping[str, str]


def check_target(folder: Path) -> None:
    """Raises BadInput for a folder that cannot be written into without losing something."""
    if folder.exists() and not folder.is_dir():
        raise BadInput("it is a file", where=str(folder), mend="name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput("the folder is not empty; nothing was written", where=str(folder), mend="name a new folder")


def write_checkpoint(
    folder: Path,
    image: Image,
    format: str,
    *,
    facts: Mapping[str, str],
    model: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write a stream's image into a new folder, which is there whole or not at all.

    ``facts`` go into the files' metadata. ``model``: a Hugging Face model folder whose configuration and tokenizer are
    copied beside the weights, with what the format is in config.json. Raises BadInput for a folder that is not empty and
    a model folder without config.json, InfraError when there is no room.
    """
    check_target(folder)
    config = None if model is None else _config(model, image, format)
    staged = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    try:
        staged.mkdir(parents=True)
        files = _write_weights(staged, image, facts, shard_bytes)
        if model is not None:
            for pattern in COPIED:
                for path in model.glob(pattern):
                    if path.is_file() and path.name != "config.json" and not path.name.endswith(".index.json"):
                        shutil.copyfile(path, staged / path.name)
            (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _sync(staged)
        os.replace(staged, folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise InfraError(f"cannot write the checkpoint: {why}", where=str(folder)) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Written(folder, tuple(files), image.schema.nbytes, _tied(image.schema))


def _write_weights(folder: Path, image: Image, facts: Mapping[str, str], shard_bytes: int) -> list[str]:
    shards = list(_shards(image, shard_bytes))
    metadata = {"format": "pt", **facts}

    def save(shard: dict[str, Tensor], name: str) -> None:
        save_file(shard, folder / name, metadata)
        (folder / name).chmod(0o644)  # the library makes it for this user alone

    if tied := _tied(image.schema):
        metadata["tied"] = json.dumps(tied)
    if len(shards) == 1:
        save(shards[0], "model.safetensors")
        return ["model.safetensors"]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save(shard, name)
    index = {
        "metadata": {"total_size": image.schema.nbytes},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _shards(image: Image, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, each with those before it while there is room. Tied names are left out."""
    shard: dict[str, Tensor] = {}
    size = 0
    tensors, names = image.tensors(), _names(image.schema)
    for name, kind in image.schema.tensors.items():
        if shard and size + kind.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[names[name]] = tensors[name]
        size += kind.nbytes
    yield shard


def _names(schema: Schema) -> dict[str, str]:
    """What each tensor is written as: who reads a model whose head is its embedding looks for the embedding alone."""
    instead = {owner: name for name, owner in schema.tied.items() if owner.endswith("lm_head.weight")}
    return {name: instead.get(name, name) for name in schema.tensors}


def _tied(schema: Schema) -> dict[str, str]:
    """Names that are left out -> what their tensor is written as."""
    names = _names(schema)
    owners = {name: name for name in schema.tensors} | dict(schema.tied)
    return {name: names[owner] for name, owner in owners.items() if name != names[owner]}


def _config(model: Path, image: Image, format: str) -> dict[str, Any]:
    """The model's config.json, saying what the weights are now."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        mend = "a Hugging Face model folder is needed"
        raise BadInput("the folder holds no config.json", where=str(model), mend=mend) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"it cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise BadInput("it is not a JSON object", where=str(path))
    if format not in get_args(WeightFormat):
        return config
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
    config.pop("quantization_config", None)
    chosen = next(f for f in get_args(WeightFormat) if f == format)
    entry = quantization_config(chosen, _kept(image))
    return config if entry is None else config | {"quantization_config": entry}


def _kept(image: Image) -> list[str]:
    """Modules with a matrix that is not in codes."""
    types = image.schema.tensors
    names = {**{name: name for name in types}, **image.schema.tied}
    return [
        name.removesuffix(".weight")
        for name, owner in names.items()
        if name.endswith(".weight")
        and len(types[owner].shape) >= 2
        and not any(owner + suffix in types for suffix in SUFFIXES[1:])
    ]


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
