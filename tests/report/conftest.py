"""A made-up run in a real ledger: numbers shaped like a real run's, episodes that a tokenizer can read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from farflung.config import PoolConfig, Recipe, dump_recipe
from farflung.core.episode import DropCause, EndReason, Episode, Trajectory
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.core.sampling import Source
from farflung.core.supports import Supports
from farflung.run.ledger import Ledger
from farflung.weights.publisher import Published, PublishedStream

UPDATES = 20
KL = {"nvfp4": 0.21, "fp8": 0.017, "bf16": 0.0011}
POOLS = (
    PoolConfig(name="nvfp4", weights="nvfp4", kv="fp8", capacity=32),
    PoolConfig(name="fp8", weights="fp8", kv="fp8", capacity=16),
    PoolConfig(name="bf16", weights="bf16", kv="bf16", capacity=16),
)
PROMPT = "<|user|>count_even in numbers/core.py counts odd numbers: see tests/test_core.py.<|end|><|agent|>"
LOOK = "cat -n numbers/core.py"
SEEN = "     1\tdef count_even(xs):\n     2\t    return sum(1 for x in xs if x % 2 == 1)  # naïve ✓\n"
EDIT = "sed -i '2s/== 1/== 0/' numbers/core.py"
PATCH = "--- a/numbers/core.py\n+++ b/numbers/core.py\n@@ -1,2 +1,2 @@\n def count_even(xs):\n-    return 1\n+    return 0\n"


def published(version: int, size: int, changed: int) -> Published:
    """A version of a million values in BF16 and NVFP4."""
    quantised = PublishedStream(changed // 100, 1_000_000, size // 100, 0, 0.009 * size)
    return Published(version, {"bf16": PublishedStream(changed, 1_000_000, size, 0, 0.95 * size), "nvfp4": quantised})


def tokenizer() -> Tokenizer:
    """Byte level without merges, with control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("user", "agent", "tool", "end")])
    return made


def episode(group: int, index: int, turns: list[tuple[str, str]], end: EndReason, reward: float, patch: str) -> Episode:
    """``turns`` are pairs of reply and what the environment says to it."""
    made, random = tokenizer(), np.random.default_rng(group * 100 + index)
    ids, action = made.encode(PROMPT, add_special_tokens=False).ids, []
    action = [False] * len(ids)
    for reply, told in turns:
        for text, sampled in ((f"{reply}<|end|>", True), (f"<|tool|>{told}<|end|><|agent|>" if told else "", False)):
            new = made.encode(text, add_special_tokens=False).ids
            ids, action = ids + new, action + [sampled] * len(new)
    actions = np.array(ids, np.int32)[np.array(action)]
    n = len(actions)
    probabilities = np.clip(random.beta(6, 1, n), 0.05, 0.999)
    logprobs = np.log(probabilities).astype(np.float32)
    rest = np.log1p(-np.exp(logprobs.astype(np.float64))).astype(np.float32)
    supports = Supports(
        np.stack([actions, (actions + 1) % 200], 1).reshape(-1).astype(np.int32),
        np.stack([logprobs, rest], 1).reshape(-1),
        np.arange(0, 2 * n + 1, 2, dtype=np.int64),
    )
    sources = (Source("nvfp4", "nvfp4-0", "nvfp4", "fp8"), Source("bf16", "bf16-0", "bf16", "bf16"))
    trajectory = Trajectory(
        np.array(ids, np.int32), np.array(action), logprobs, np.where(np.arange(n) < n // 2, group, group + 1).astype(np.int32),
        np.full(n, index % 2, np.int16), sources, supports,
    )  # fmt: skip
    return Episode(
        group, index, f"heldout/numbers-{group:03d}", end, reward, len(turns), trajectory, patch,
        detail="2 tests passed" if reward else "", seconds={"sampling": 1.1, "tools": 0.2, "total": 1.7},
        format_errors=3 * (end is EndReason.FORMAT_ERROR),
    )  # fmt: skip


def metrics(update: int) -> UpdateMetrics:
    random = np.random.default_rng(update)
    progress = 1 - math.exp(-update / 8)

    def stats(kl: float, share: float) -> TokenStats:
        wobble = float(np.exp(random.normal(0, 0.12)))
        return TokenStats(
            samples=round(64 * share), tokens=round(4000 * share), reward=0.3 + 0.5 * progress + float(random.normal(0, 0.03)),
            kl=kl * wobble * (1 + progress), k3=kl * wobble * 1.1, out_of_band=kl * 0.15 * wobble, masked=kl * 0.4 * wobble,
            entropy=0.32 - 0.12 * progress, staleness=1.4 + float(random.normal(0, 0.2)), staleness_max=4,
        )  # fmt: skip

    shares = {"nvfp4": 0.5, "fp8": 0.25, "bf16": 0.25}
    pools = {name: stats(KL[name], share) for name, share in shares.items()}
    return UpdateMetrics(
        update=update, all=stats(0.11, 1.0), pools=pools, trained_groups=6 + update % 2, skipped_groups=2 - update % 2,
        grad_norm=0.8 + float(random.gamma(2, 0.1)), lr=3e-4, length=310 - 40 * progress, turns=4.0,
        format_errors=0.12 * (1 - progress), trained_tokens=3400,
        seconds={"wait": 3.1 + float(random.normal(0, 0.4)), "step": 4.2 + float(random.normal(0, 0.3)), "publish": 0.2},
    )  # fmt: skip


def evaluation(pass1: float, pass4: float) -> dict[str, object]:
    return {
        "pass1": {"mean": pass1, "se": 0.031, "tasks": 64},
        "pass4": {"mean": pass4, "se": 0.042, "tasks": 64},
    }


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of twenty updates."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    model = folder / "model"
    model.mkdir(parents=True)
    tokenizer().save(str(model / "tokenizer.json"))
    recipe = Recipe.model_validate(
        {
            "run": {"name": "quickstart", "updates": UPDATES},
            "train": {"lr": 1e-3},
            "pools": [p.model_dump() for p in POOLS],
        }
    )
    (folder / "recipe.json").write_text(json.dumps({"recipe": dump_recipe(recipe), "model": str(model), "run_id": "x"}))
    ledger = Ledger(folder)
    ledger.add_base_version(published(0, 0, 0))
    solved = [(LOOK, SEEN), (EDIT, "(no output)"), ("submit", "")]
    failed = [(LOOK, SEEN), ("submit", "")]
    for group in range(UPDATES):
        ledger.open_group(group, f"heldout/numbers-{group:03d}")
        made = [
            episode(group, 0, solved, EndReason.SUBMITTED, 1.0, PATCH),
            episode(group, 1, failed, EndReason.SUBMITTED, 0.0, ""),
        ]
        if group % 4 == 0:
            made.append(episode(group, 2, [("<b>hm</b>\x00\x1b[2J", "no call")] * 3, EndReason.FORMAT_ERROR, 0.0, ""))
        for one in made:
            ledger.add_episode(one, one.encode())
        ledger.group_ready(group, group)
        ledger.take_batch(group + 1, [group])
        ledger.commit_update(metrics(group + 1), published(group + 1, 41_000 + 900 * group, 31_000))
    ledger.add_drop(3, 1, 0, DropCause.SANDBOX, "bwrap did not start within 20 s", retried=True)
    ledger.add_drop(7, 1, 2, DropCause.SAMPLER, "no replica answered for 120 s", retried=False)
    for step in range(100):
        status = {
            name: {"sampled_tokens": round(900 * w * step), "active": 9}
            for name, w in (("nvfp4", 2), ("fp8", 1), ("bf16", 1.2))
        }
        ledger.add_pools(status)
    ledger.add_machine(2_400_000_000, 100.0)
    _spread_times(folder, ledger)
    ledger.add_evaluation("before", evaluation(0.34, 0.58))
    ledger.add_evaluation("after", evaluation(0.71, 0.83))
    ledger.add_event("process_restarted", "nvfp4-0")
    ledger.close()
    return folder


def _spread_times(folder: Path, ledger: Ledger) -> None:
    """As if the run had taken five minutes."""
    import sqlite3

    db = sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)
    start = db.execute("SELECT MIN(opened_at) FROM groups").fetchone()[0]
    db.execute("UPDATE pools SET at = ? + 3.0 * ((rowid - 1) / 3)", (start,))
    db.execute("UPDATE updates SET created_at = ? + 15.0 * id", (start,))
    db.execute("UPDATE versions SET created_at = ? + 15.0 * version", (start,))
    db.close()
