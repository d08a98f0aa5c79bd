"""One rank of a sharded trainer, as a process: ``python sharded.py RANK SIZE FOLDER [fail]``.

A small FSDP model takes steps; every rank publishes its own rows. Rank 0 also publishes the gathered model alone, to another
store, and writes it to ``whole.pt``. With "fail", the last rank's store breaks at version 2.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from farflung.weights import FolderStore, Publisher, StoreError
from farflung.weights.ranks import TorchRanks

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(64, 512, bias=False)
        self.down_proj = nn.Linear(512, 256, bias=False)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down_proj(torch.relu(self.up_proj(x))))


class Model(nn.Module):
    """Its embedding has an odd number of rows and its last bias one: the last rank has less, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, 64)
        self.layers = nn.ModuleList([Layer()])
        self.head = nn.Linear(256, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Broken(FolderStore):
    def put(self, key: str, data: bytes) -> None:
        raise StoreError("no space", where=key)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    together = Publisher(FolderStore(folder / "together"), "run", formats=FORMATS, ranks=TorchRanks(), anchor_every=2)
    alone = Publisher(FolderStore(folder / "alone"), "run", formats=FORMATS, anchor_every=2)
    for version in range(4):
        if version == 2 and "fail" in sys.argv and rank == size - 1:
            together._store = Broken(folder / "together")
        try:
            together.publish(version, model.state_dict())
        except Exception as error:
            (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
            break
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        if rank == 0:
            alone.publish(version, whole)
        model(torch.randint(0, 301, (4, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0 and together.version == 3:
        torch.save(whole, folder / "whole.pt")
    # A rank that is through a barrier may be gone while another is still in it, and gloo takes that for a failure.
    (folder / f"done-{rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("done-*"))) < size and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo now and then abort a process that ends


if __name__ == "__main__":
    main()
