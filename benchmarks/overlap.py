"""Do sampling and training overlap? Time per update of the asynchronous loop against its parts, in one run.

    python benchmarks/overlap.py [--updates 6] [--groups 4] [--skip-remote]

First with samplers on this machine. The synchronous loop gives the time of sampling alone and of training alone; the
asynchronous one is limited by the larger of the two and by the cores: the CPU-seconds of both over the number of cores.
Then with samplers that behave as remote ones do (they answer at a set rate and leave this CPU free) and a policy so large
that training it takes longer than the agents' commands do (sandboxes and tests run on this machine still), at a rate at
which sampling and training take equally long. Times are medians over updates after the first two. The last
line is JSON with the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from farflung.cli.recipes import find_recipe
from farflung.config import Recipe, load_recipe
from farflung.run.train import train
from farflung.run.workspace import Workspace, resolve_model

SETTLE = 2  # updates before the loop is in its stride


@dataclass(frozen=True)
class Timing:
    """Seconds per update: wall, the trainer waiting, the trainer at work, CPU of all processes."""

    wall: float
    wait: float
    work: float
    cpu: float


def measure(recipe: Recipe, folder: Path) -> Timing:
    """Run ``recipe`` and read its times off the ledger."""
    train(Workspace.create(folder, recipe), console=Console(stderr=True, quiet=True))
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        rows = db.execute("SELECT created_at, metrics FROM updates ORDER BY id").fetchall()
        machine = db.execute("SELECT at, cpu_seconds FROM machine ORDER BY at").fetchall()
    ends = [at for at, _ in rows]
    seconds = [json.loads(text)["seconds"] for _, text in rows[SETTLE:]]
    inside = [(at, cpu) for at, cpu in machine if ends[SETTLE - 1] <= at <= ends[-1]]
    rate = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
    wall = (ends[-1] - ends[SETTLE - 1]) / (len(ends) - SETTLE)
    wait = statistics.median(s["wait"] for s in seconds)
    work = statistics.median(s["step"] + s["save"] + s["publish"] for s in seconds)
    return Timing(wall, wait, work, rate * wall)


def variant(base: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with some keys changed."""
    tree = base.model_dump()
    for section, keys in sections.items():
        tree[section] = {**tree[section], **keys}
    return Recipe.model_validate(tree)


def larger_policy(folder: Path) -> Path:
    """A random Llama of about 100M parameters with the packaged policy's tokenizer: training it keeps a core busy."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    packaged = resolve_model("builtin:repair-1m")
    vocabulary = json.loads((packaged / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=896, intermediate_size=2432, num_hidden_layers=11, num_attention_heads=14,
            num_key_value_heads=14, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    for file in packaged.iterdir():
        if file.name not in ("config.json", "README.md") and file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--skip-remote", action="store_true")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    base = load_recipe(find_recipe("builtin:quickstart"))
    base = variant(base, run={"updates": args.updates}, train={"groups": args.groups})
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="overlap-") as name:
        root = Path(name)
        together = measure(base, root / "async")
        in_turns = measure(variant(base, run={"sync": True}), root / "sync")
        cores_bound = together.cpu / cores
        bound = max(in_turns.wait, in_turns.work, cores_bound)
        print("samplers on this machine, seconds per update:")
        print(f"  sampling alone {in_turns.wait:.2f}   training alone {in_turns.work:.2f}")
        print(f"  CPU-seconds of both over {cores} cores {cores_bound:.2f}")
        print(f"  asynchronous {together.wall:.2f}   synchronous {in_turns.wall:.2f}", flush=True)
        result["local_async_over_bound"] = round(together.wall / bound, 3)
        result["local_sync_over_async"] = round(in_turns.wall / together.wall, 3)
        if not args.skip_remote:
            result |= remote(base, root)
    print(json.dumps(result))


def remote(base: Recipe, root: Path) -> dict[str, float]:
    """The same with samplers elsewhere: find the rate at which sampling takes as long as training, then compare."""
    policy = larger_policy(root / "policy-100m")
    replay = str(root / "async" / "episodes")

    def paced(rate: float, sync: bool, updates: int) -> Recipe:
        pools = [
            {**pool.model_dump(), "engine": "paced", "tokens_per_second": rate, "replay": replay} for pool in base.pools
        ]
        recipe = variant(base, run={"sync": sync, "updates": updates}, model={"path": str(policy)})
        return Recipe.model_validate({**recipe.model_dump(), "pools": pools})

    rate = 15.0
    for attempt in range(3):
        probe = measure(paced(rate, True, SETTLE + 2), root / f"probe-{attempt}")
        print(f"  at {rate:.1f} tokens/s a session: sampling {probe.wait:.2f}, training {probe.work:.2f}", flush=True)
        if abs(probe.wait / probe.work - 1) < 0.1:
            break
        rate *= probe.wait / probe.work
    in_turns = measure(paced(rate, True, base.run.updates), root / "remote-sync")
    together = measure(paced(rate, False, base.run.updates), root / "remote-async")
    larger = max(in_turns.wait, in_turns.work)
    print("samplers elsewhere, seconds per update:")
    print(f"  sampling alone {in_turns.wait:.2f}   training alone {in_turns.work:.2f}")
    print(f"  asynchronous {together.wall:.2f}   synchronous {in_turns.wall:.2f}", flush=True)
    return {
        "remote_async_over_larger": round(together.wall / larger, 3),
        "remote_sync_over_async": round(in_turns.wall / together.wall, 3),
    }


if __name__ == "__main__":
    main()
