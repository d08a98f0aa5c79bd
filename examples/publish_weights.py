"""A training loop that publishes its weights after each step, and a sampler's process that follows them.

    python examples/publish_weights.py                     both here, through a folder; seconds on one core, no download
    python examples/publish_weights.py --format bf16 --lr 1e-6

On two machines, with FARFLUNG_TOKEN set to the same long random word on both:

    python examples/publish_weights.py publish --store s3://bucket/weights
    python examples/publish_weights.py follow --store s3://bucket/weights --format nvfp4

The policy, a Llama of 0.8 million random weights, learns that each digit follows the one before it (3 4 5 ...). What a
trainer of your own needs of this file are the four lines of ``publish`` that name the publisher, what an engine of your own
needs are those of ``follow`` that name the subscriber.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from farflung.core.errors import InfraError
from farflung.weights import Published, Publisher, Subscriber, open_store
from farflung.weights.manifest import derive_key
from farflung.weights.retention import held

RUN = "example"
FORMATS = ("bf16", "nvfp4")
TOKEN_VARIABLE = "FARFLUNG_TOKEN"
LENGTH = 16


@dataclass(frozen=True, slots=True)
class Followed:
    """A version that the sampler took over: bytes it fetched, what the weights take whole, and seconds."""

    version: int
    bytes: int
    whole_bytes: int
    links: int
    changed: int | None
    stage_seconds: float
    apply_seconds: float


def make_policy(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=10, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(size: int = 32) -> Iterator[Tensor]:
    """Rows of LENGTH digits, each the successor (mod 10) of the one before it."""
    while True:
        yield (torch.randint(10, (size, 1)) + torch.arange(LENGTH)) % 10


def publish(store: str, steps: int, lr: float, token: str) -> Iterator[tuple[float, Published]]:
    """Train; yields each step's loss and what was published of it. Version 0 is the policy that the first step starts from."""
    policy = make_policy()
    optimiser = torch.optim.AdamW(policy.parameters(), lr=lr)
    publisher = Publisher(open_store(store), RUN, formats=FORMATS, key=derive_key(token))
    yield float("nan"), publisher.publish(0, policy.state_dict())
    for version, rows in zip(range(1, steps + 1), batches(), strict=False):
        logits = policy(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield loss.item(), publisher.publish(version, policy.state_dict())


def follow(store: str, format: str, last: int, token: str, patience: float) -> Iterator[Followed]:
    """Take over the newest version whenever there is one, up to version ``last``.

    What comes is the published weights, bit for bit, or an error: signatures and hashes are checked before a tensor is
    handed out. Raises InfraError when nothing new came for ``patience`` seconds.
    """
    subscriber = Subscriber(open_store(store), RUN, format=format, key=derive_key(token), name="example-sampler")
    deadline = time.monotonic() + patience
    while subscriber.version != last:
        newest = subscriber.newest()
        if newest is None or newest == subscriber.version:
            if time.monotonic() > deadline:
                raise InfraError(f"nothing new came for {patience:g} s", where=store)
            time.sleep(0.02)
            continue
        update = subscriber.fetch(newest)
        deadline = time.monotonic() + patience
        # An engine would load update.tensors now; update.changed says which elements of each differ.
        yield Followed(
            update.version,
            update.bytes,
            sum(tensor.nbytes for tensor in update.tensors.values()),
            update.links,
            None if update.changed is None else sum(len(positions) for positions in update.changed.values()),
            update.stage_seconds,
            update.apply_seconds,
        )


def await_sampler(store: str, patience: float) -> None:
    """Until a sampler has said in the store what it holds. Raises InfraError when none does."""
    deadline = time.monotonic() + patience
    while not held(open_store(store), RUN):
        if time.monotonic() > deadline:
            raise InfraError(f"no sampler came within {patience:g} s", where=store)
        time.sleep(0.05)


def show_published(store: str, steps: int, lr: float, token: str, wait: float = 0.0) -> None:
    """``wait``: how long version 0 may wait for a sampler before training begins; a trainer of your own need not."""
    for loss, published in publish(store, steps, lr, token):
        if wait and published.version == 0:
            await_sampler(store, wait)
        sizes = [
            f"{name} {stream.bytes:7d} bytes ({stream.changed / stream.elements:6.2%} changed)"
            if published.version
            else f"{name} {stream.anchor_bytes:7d} bytes whole"
            for name, stream in published.streams.items()
        ]
        print(f"trainer  version {published.version:3d}  loss {loss:5.3f}  {'  '.join(sizes)}", flush=True)


def show_followed(store: str, format: str, last: int, token: str, patience: float) -> None:
    fetched = whole = versions = 0
    for one in follow(store, format, last, token, patience):
        way = f"{one.links} deltas" if one.links else "a whole copy"
        changed = "" if one.changed is None else f", {one.changed} elements changed"
        print(
            f"sampler  version {one.version:3d}  {one.bytes:7d} bytes in {1000 * one.stage_seconds:4.0f} ms, applied and "
            f"verified in {1000 * one.apply_seconds:3.0f} ms: {way}{changed}",
            flush=True,
        )
        fetched, whole, versions = fetched + one.bytes, whole + one.whole_bytes, versions + 1
    print(
        f"sampler  {versions} versions of {format} in {fetched} bytes; whole they are {whole}, {whole / fetched:.1f} times that"
    )


def both(steps: int, format: str, lr: float, patience: float) -> None:
    """The sampler in a process of its own, the trainer in this one, a folder between them."""
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, __file__, "follow", "--store", store, "--format", format, "--steps", str(steps)]
        sampler = subprocess.Popen([*command, "--patience", str(patience)], env=os.environ | {TOKEN_VARIABLE: token})
        try:
            show_published(store, steps, lr, token, wait=patience)
            if sampler.wait(patience):
                raise InfraError(f"the sampler ended with exit code {sampler.returncode}")
        finally:
            sampler.kill()
            sampler.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish a training loop's weights, and follow them.")
    parser.add_argument("part", nargs="?", choices=["both", "publish", "follow"], default="both")
    parser.add_argument("--store", help="a folder or a URL, for one of the parts alone")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="what the sampler takes")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for something new")
    args = parser.parse_args()
    if args.part == "both":
        both(args.steps, args.format, args.lr, args.patience)
        return
    token = os.environ.get(TOKEN_VARIABLE)
    if not token or not args.store:
        parser.error(f"{args.part} needs --store, and {TOKEN_VARIABLE} in the environment")
    if args.part == "publish":
        show_published(args.store, args.steps, args.lr, token)
    else:
        show_followed(args.store, args.format, args.steps, token, args.patience)


if __name__ == "__main__":
    main()
