"""Candidate-only LM head against the chunked full-vocabulary loss with the same mask: time and memory, in one run.

    python benchmarks/head.py [--parts loss large step] [--mean 5 8] [--share 1.0] [--threads 1] [--rounds 5]

Both sides give the same centred loss (masked importance weights) of the same hidden states, head and candidates, and put
the gradients of hidden states and head into buffers that exist already; the results are compared. The other side is what
chunked losses do, in its fastest form in plain torch: logits of a chunk of rows over the whole vocabulary, those outside the
candidates set to minus infinity, log-softmax, the gradient in closed form in its place, and two products of which the second
adds to the head's gradient without a temporary. Its time is that of the fastest of three chunk sizes; ``memory_ratio`` is
against chunks of 256 rows, which are within some 10 % of the fastest, and the others are printed. As in the libraries that do
this, it computes every row; what it would save by skipping rows with one candidate is printed.

Candidates are drawn uniformly from the vocabulary (the worst case: real ones repeat and stay in the cache), 47 % of rows
have one, the others' numbers are log-normal with the mean asked for. Times are processor time at one thread, wall time at
more; before each of our rounds the caches are emptied. ``--share`` times that part of the other side's rows, and scales.

Memory is the peak of the process's resident memory during the call above what was resident before, which both sides'
inputs and gradient buffers are: the kernel's high-water mark, set back before the call, in a process of its own after a
small call and with freed memory given back. Gathered bytes are the head's rows of the candidates, each read in the forward
and in the backward pass and updated in the gradient, over the time of all of it; the copy rate is of copied bytes.

"large" is a vocabulary of 248,320 and width 2,048; "step" a whole optimiser step of a model shaped like Qwen3-0.6B. The last
line is JSON: the first case's figures, and all under ``cases``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import ctypes
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from farflung.corrections import Masked, Supports, candidate_loss
from farflung.corrections.rows import dots

VOCABULARY, WIDTH = 151_936, 1024
SINGLETONS = 0.47
LARGEST = 512
CHUNKS, MEMORY_CHUNK = (64, 256, 1024), 256
WEIGHT = Masked(0.5, 5.0)
CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    head: Tensor
    supports: Supports
    sampled: Tensor
    advantages: Tensor

    @property
    def gathered(self) -> int:
        """Bytes of the head's rows that the candidates of rows with a choice are."""
        sizes = self.supports.sizes
        return int(sizes[sizes > 1].sum()) * self.head.shape[1] * self.head.element_size()

    def clear(self) -> None:
        for tensor in (self.hidden, self.head):
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.zero_()


def draw_sizes(rows: int, mean: float, rng: np.random.Generator) -> np.ndarray:
    """Numbers of candidates with the given mean, 47 % of them one, the rest log-normal from two on."""
    single, normal = rng.random(rows) < SINGLETONS, rng.normal(size=rows)

    def sizes(mu: float) -> np.ndarray:
        return np.where(single, 1, np.clip(2 + np.exp(np.minimum(mu + 1.3 * normal, 20)), 2, LARGEST)).astype(np.int64)

    low, high = -5.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sizes(middle).mean() < mean else (low, middle)
    return sizes(high)


def make_problem(vocabulary: int, width: int, rows: int, mean: float, head: Tensor | None = None) -> Problem:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    sizes = draw_sizes(rows, mean, rng)
    ids = torch.from_numpy(np.concatenate([rng.choice(vocabulary, size, replace=False) for size in sizes]))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    hidden = torch.randn(rows, width).requires_grad_()
    if head is None:
        head = torch.empty(vocabulary, width).normal_(std=0.05).requires_grad_()
    with torch.no_grad():
        logits = dots(hidden, head, ids, offsets) + 0.5 * torch.randn(len(ids))
    log_q = torch.cat([part.log_softmax(-1) for part in logits.split(sizes.tolist())])
    sampled = ids[offsets[:-1] + torch.from_numpy(rng.integers(0, sizes))]
    return Problem(
        hidden, head, Supports(ids, log_q, offsets), sampled, torch.from_numpy(rng.choice([-0.5, 0.5], rows))
    )


def ours(problem: Problem) -> Tensor:
    loss, _ = candidate_loss(
        problem.hidden, problem.head, None, problem.supports, problem.sampled, problem.advantages,
        weight=WEIGHT, denominator=len(problem.sampled), in_place=True,
    )  # fmt: skip
    loss.backward()
    return loss.detach()


@torch.no_grad()
def chunked(problem: Problem, chunk: int, rows: int | None = None) -> Tensor:
    """Adds to the gradients of the first ``rows`` hidden states and the head; the loss."""
    count, supports, head = len(problem.sampled), problem.supports, problem.head
    loss = torch.zeros(())
    for start in range(0, count if rows is None else rows, chunk):
        part = slice(start, min(start + chunk, count))
        offsets = supports.offsets[part.start : part.stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        owner, ids = torch.repeat_interleave(offsets.diff()), supports.ids[low:high]
        log_q, advantages = supports.logprobs[low:high], problem.advantages[part].float()
        states, sampled = problem.hidden[part], problem.sampled[part]
        logits = states @ head.t()
        outside = torch.ones(logits.shape, dtype=torch.bool)
        outside[owner, ids] = False
        log_p = logits.masked_fill_(outside, -math.inf).log_softmax(-1)
        del logits, outside
        chosen = log_p[owner, ids]
        weights, mass = WEIGHT(chosen, log_q, advantages[owner])
        slots = torch.nonzero(ids == sampled[owner]).squeeze(1)
        total = torch.zeros(len(sampled)).index_add_(0, owner, mass)
        expected = torch.zeros(len(sampled)).index_add_(0, owner, mass * chosen)
        loss -= (advantages * (weights[slots] * chosen[slots] - expected)).sum() / count
        scale = advantages / count
        dz = log_p.exp_().mul_((scale * (weights[slots] - total))[:, None])
        mass[slots] -= weights[slots]
        dz[owner, ids] += mass * scale[owner]
        problem.hidden.grad[part] += dz @ head
        head.grad.addmm_(dz.t(), states)
    return loss


class Clock:
    """Processor time at one thread, which leaves other programs out; wall time at more."""

    def __init__(self) -> None:
        self._now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self, work: Callable[[], object]) -> float:
        start = self._now()
        work()
        return self._now() - start


@dataclass(frozen=True)
class Times:
    """Seconds; ``tried`` is the other side's by rows of a chunk, extrapolated from one chunk each."""

    ours: float
    chunked: float
    chunk: int
    tried: dict[int, float]
    copy_rate: float


def measure_times(problem: Problem, rounds: int, share: float) -> Times:
    clock, count = Clock(), len(problem.sampled)
    big, copy = torch.ones(2, CACHE_BYTES // 4)
    copying = min(clock(lambda: copy.copy_(big)) for _ in range(5))
    problem.clear()
    loss = ours(problem)
    gradients = [problem.hidden.grad.clone(), problem.head.grad.clone()]
    best = math.inf
    for _ in range(rounds):
        copy.copy_(big)
        best = min(best, clock(lambda: ours(problem)))
    chunked(problem, 64, 64)
    tried = {c: clock(lambda c=c: chunked(problem, c, c)) * count / min(c, count) for c in CHUNKS}
    chunk = min(tried, key=lambda c: tried[c])
    problem.clear()
    rows = min(count, max(chunk, int(share * count)))
    other = clock(lambda: loss.sub_(chunked(problem, chunk, rows))) * count / rows
    if rows == count:
        torch.testing.assert_close(loss, torch.zeros(()), rtol=0, atol=1e-5)
        for got, want in zip(gradients, (problem.hidden.grad, problem.head.grad), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    return Times(best, other, chunk, tried, CACHE_BYTES / copying)


def compare(args: argparse.Namespace, vocabulary: int, width: int, mean: float, share: float) -> dict[str, float]:
    problem = make_problem(vocabulary, width, args.rows, mean)
    times = measure_times(problem, args.rounds, share)
    sizes = problem.supports.sizes.double()
    single, gathered = float((sizes == 1).double().mean()), 3 * problem.gathered
    del problem
    gc.collect()
    used = memory_of(args, vocabulary, width, mean, "ours")
    chunks = {c: memory_of(args, vocabulary, width, mean, f"chunked-{c}") for c in CHUNKS}
    ratio, rate = times.chunked / times.ours, gathered / times.ours
    tried = ", ".join(f"{times.tried[c]:.1f} s and {chunks[c] / 1e6:.0f} MB by {c}" for c in CHUNKS)
    print(
        f"vocabulary {vocabulary:,}, width {width:,}, {args.rows:,} rows: {sizes.mean():.2f} candidates on average, "
        f"median {sizes.median():.0f}, one at {single:.1%}\n"
        f"  chunked {tried} rows\n"
        f"  time    candidates {times.ours * 1e3:.1f} ms, chunked by {times.chunk} {times.chunked:.2f} s: ratio {ratio:.0f} "
        f"({ratio * (1 - single):.0f} if it skipped rows with one candidate)\n"
        f"  memory  candidates {used / 1e6:.1f} MB: ratio "
        f"{', '.join(f'{chunks[c] / used:.0f} by {c}' for c in CHUNKS)} rows\n"
        f"  rows    {gathered / 1e6:.0f} MB at {rate / 1e9:.2f} GB/s; copies run at {times.copy_rate / 1e9:.1f} GB/s: "
        f"{rate / times.copy_rate:.2f} of that",
        flush=True,
    )
    return {
        "ours_s": times.ours, "chunked_s": times.chunked, "time_ratio": ratio,
        "ours_bytes": used, "chunked_bytes": chunks[MEMORY_CHUNK], "memory_ratio": chunks[MEMORY_CHUNK] / used,
        "gather_fraction_of_copy_rate": rate / times.copy_rate,
    }  # fmt: skip


def memory_of(args: argparse.Namespace, vocabulary: int, width: int, mean: float, side: str) -> int:
    command = [
        sys.executable, __file__, "--threads", str(args.threads), "--rows", str(args.rows), "--mean", str(mean),
        "--memory", side, str(vocabulary), str(width),
    ]  # fmt: skip
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_memory(problem: Problem, side: str) -> int:
    """Bytes by which resident memory rises above what it was before. Two chunks are as high as all of them."""

    def status(field: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    small = make_problem(1000, problem.head.shape[1], 64, 5)
    small.clear()
    problem.clear()
    chunk = int(side.partition("-")[2] or 0)
    run = ours if side == "ours" else lambda p: chunked(p, chunk, min(2 * chunk, len(p.sampled)))
    run(small)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run(problem)
    return status("VmHWM") - before


def time_step(args: argparse.Namespace) -> dict[str, float]:
    """Forward, backward and AdamW of a tied model in float32, every token with candidates (8 on average)."""
    transformers.logging.set_verbosity_error()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3072, num_hidden_layers=args.layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    model, clock = transformers.Qwen3ForCausalLM(config), Clock()
    head = model.lm_head.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    problem = make_problem(VOCABULARY, WIDTH, args.tokens, 8, head)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (1, args.tokens)))

    def step(candidates: bool) -> None:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        if candidates:
            ours(replace(problem, hidden=hidden))
        else:
            leaf = hidden.detach().requires_grad_()
            leaf.grad, head.grad = torch.zeros_like(leaf), torch.zeros_like(head)
            chunked(replace(problem, hidden=leaf), 256)
            hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(True)
    with_candidates = min(clock(lambda: step(True)) for _ in range(args.step_rounds))
    without = min(clock(lambda: step(False)) for _ in range(args.step_rounds))
    print(
        f"step    {args.tokens} tokens, {args.layers} layers: candidates {with_candidates:.2f} s, chunked {without:.2f} s: "
        f"ratio {without / with_candidates:.2f}",
        flush=True,
    )
    return {
        "tokens": args.tokens,
        "ours_s": with_candidates,
        "chunked_s": without,
        "time_ratio": without / with_candidates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("loss", "large", "step"), default=["loss", "large", "step"])
    parser.add_argument("--mean", nargs="+", type=float, default=[5, 8], help="candidates of a row on average")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--share", type=float, default=1.0, help="of the rows for which the other side is timed")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of the whole step")
    parser.add_argument("--layers", type=int, default=28, help="of the whole step")
    parser.add_argument("--step-rounds", type=int, default=2)
    parser.add_argument("--memory", nargs=3, metavar=("SIDE", "VOCABULARY", "WIDTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        side, vocabulary, width = args.memory
        print(measure_memory(make_problem(int(vocabulary), int(width), args.rows, args.mean[0]), side))
        return
    results: dict[str, dict[str, float]] = {}
    if "loss" in args.parts:
        for mean in args.mean:
            results[f"mean {mean:g}"] = compare(args, VOCABULARY, WIDTH, mean, args.share)
    if "large" in args.parts:
        results["large"] = compare(args, 248_320, 2048, args.mean[-1], min(args.share, 0.25))
    if "step" in args.parts:
        results["step"] = time_step(args)

    print(json.dumps({
        "threads": torch.get_num_threads(), **next(iter(results.values())),
        "cases": {name: {key: round(value, 4) for key, value in result.items()} for name, result in results.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
