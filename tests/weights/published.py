"""A store with a run in it, as a trainer and a compactor leave it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from farflung.weights import Compactor, FolderStore, Publisher, Store
from farflung.weights.manifest import derive_key

RUN, TOKEN = "r1", "a-long-random-word"
KEY = derive_key(TOKEN)
FORMATS = ("bf16", "fp8", "nvfp4")

Policy = dict[str, Tensor]


def policy() -> Policy:
    """A small policy of one layer with a tied head."""
    draw = torch.Generator().manual_seed(0)
    named = {
        "model.embed_tokens.weight": torch.randn(60, 64, generator=draw) * 0.03,
        "model.layers.0.mlp.up_proj.weight": torch.randn(160, 64, generator=draw) * 0.03,
        "model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64, generator=draw) * 0.03,
        "model.norm.weight": torch.ones(64),
    }
    return named | {"lm_head.weight": named["model.embed_tokens.weight"]}


def step(weights: Policy, seed: int, size: float = 2e-5) -> None:
    """As an optimiser does, in place."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        if name != "lm_head.weight":
            tensor += size * torch.randn(tensor.shape, generator=draw)


def publish(
    store: Store,
    versions: int,
    *,
    run: str = RUN,
    formats: tuple[str, ...] = FORMATS,
    key: bytes | None = KEY,
    anchor_every: int = 4,
    jumps: bool = True,
    resume: bool = False,
) -> list[Policy]:
    """Versions 0 to ``versions`` - 1, or those of them that follow what is there; returns the weights of each."""
    weights, history = policy(), []
    publisher = Publisher(store, run, formats=formats, anchor_every=anchor_every, key=key)
    first = 0 if not resume else (publisher.resume() or 0) + 1
    for version in range(versions):
        if version >= first:
            publisher.publish(version, weights)
        history.append(deepcopy(weights))
        step(weights, version)
    if jumps:
        Compactor(store, run, key=key).step()
    return history


def in_folder(folder: Path, versions: int = 7, **options: object) -> FolderStore:
    """A store with a run."""
    store = FolderStore(folder)
    publish(store, versions, **options)  # type: ignore[arg-type]
    return store


def spoil(path: Path, at: int = -1) -> None:
    """Turn one bit over, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
