"""Embedded engine against transformers' generate: same model, one thread, same batch, tokens/s in one run.

    python benchmarks/engine.py [--model FOLDER] [--compute float32|bfloat16] [--rounds 5]

The model is the packaged policy, or a Hugging Face folder, or "random-135m": random weights in the shape of SmolLM2-135M.
Both sides sample from the whole vocabulary at temperature 1 from the same prompts, in turns. Rates are per second of this
process's processor time, which on a quiet machine is wall time (at one thread; both are printed) and on a busy one leaves
the others out; each side's rate is its best of the rounds. "mixed" is 64 requests of 16 to 256 new tokens: generate holds
the whole batch until its longest row is through, and only the tokens that were asked for count. The engine also records
the log-probability of every token, which generate does not. The last two columns show the engine as training uses it:
top-p 0.97 of at most 64 candidates, all recorded.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import farflung
from farflung.core.sampling import GenerateRequest, SamplingParams, Source
from farflung.engines.embedded import EmbeddedEngine, EngineOptions

POLICY = Path(farflung.__file__).parent / "assets/policies/repair-1m"
RANDOM = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
OPEN = SamplingParams(max_tokens=1)
RECORDED = replace(OPEN, top_p=0.97, top_k=64)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    new_tokens: tuple[int, ...]
    """New tokens of each request."""


def cases(scale: float) -> list[Case]:
    lengths = np.random.default_rng(0).integers(16, 257, 64)
    mixed = tuple(max(2, int(n * scale)) for n in lengths)
    return [Case(str(n), (max(2, int(tokens * scale)),) * n) for n, tokens in ((1, 256), (8, 128), (64, 128))] + [
        Case("mixed", mixed)
    ]


def prompts(count: int, vocabulary: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocabulary, (count, length)).astype(np.int32)


class Clock:
    """Processor and wall time since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> np.ndarray:
        return np.array([time.process_time() - self._cpu, time.perf_counter() - self._wall])


def run_generate(model: transformers.PreTrainedModel, case: Case, ids: np.ndarray) -> np.ndarray:
    longest, clock = max(case.new_tokens), Clock()
    out = model.generate(
        torch.from_numpy(ids).long(), attention_mask=torch.ones(ids.shape, dtype=torch.long), do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, min_new_tokens=longest,
    )  # fmt: skip
    seconds = clock.read()
    assert out.shape == (len(ids), ids.shape[1] + longest)
    return seconds


async def run_engine(engine: EmbeddedEngine, case: Case, ids: np.ndarray, params: SamplingParams) -> np.ndarray:
    requests = [
        GenerateRequest(f"s{i}", row, replace(params, max_tokens=n, seed=i))
        for i, (row, n) in enumerate(zip(ids, case.new_tokens, strict=True))
    ]
    clock = Clock()
    done = await asyncio.gather(*map(engine.generate, requests))
    seconds = clock.read()
    assert [len(c.ids) for c in done] == list(case.new_tokens)
    for request in requests:
        engine.forget(request.session)
    return seconds


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    dtype = torch.float32 if args.compute == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    source = Source("bench", "bench-0", "bf16", "bf16")
    engine = EmbeddedEngine.from_folder(folder, source, EngineOptions(capacity=64, compute=args.compute, device="cpu"))
    results: dict[str, dict[str, float]] = {}
    print(f"{'':>6} {'tokens/s':>10} {'':>10} {'':>6} {'wall':>7} {'recording':>12}")
    print(f"{'batch':>6} {'generate':>10} {'engine':>10} {'ratio':>6} {'ratio':>7} {'engine':>12} {'ratio':>6}")
    for case in cases(args.scale):
        if args.only and case.name != args.only:
            continue
        ids = prompts(len(case.new_tokens), model.config.vocab_size, args.prompt)
        warm = Case("warm", (4,) * len(ids))
        run_generate(model, warm, ids)
        for params in (OPEN, RECORDED):
            await run_engine(engine, warm, ids, params)
        theirs, ours, recording = (np.full(2, np.inf) for _ in range(3))
        for _ in range(args.rounds):
            theirs = np.minimum(theirs, run_generate(model, case, ids))
            ours = np.minimum(ours, await run_engine(engine, case, ids, OPEN))
            recording = np.minimum(recording, await run_engine(engine, case, ids, RECORDED))
        rate, ratio, recording_ratio = sum(case.new_tokens) / theirs[0], theirs / ours, theirs[0] / recording[0]
        results[case.name] = {
            "generate": rate, "engine": rate * ratio[0], "ratio": ratio[0], "wall": ratio[1],
            "recording": recording_ratio,
        }  # fmt: skip
        print(
            f"{case.name:>6} {rate:10.0f} {rate * ratio[0]:10.0f} {ratio[0]:6.2f} {ratio[1]:7.2f} "
            f"{rate * recording_ratio:12.0f} {recording_ratio:6.2f}",
            flush=True,
        )
    await engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(POLICY))
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of new tokens")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--only", help="one case: 1, 8, 64 or mixed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = Path(args.model)
        if args.model == "random-135m":
            folder = Path(scratch)
            LlamaForCausalLM(RANDOM).to(torch.bfloat16).save_pretrained(folder)
        results = asyncio.run(measure(folder, args))

    def column(key: str, digits: int | None) -> dict[str, float]:
        return {name: round(float(result[key]), digits) for name, result in results.items()}

    print(json.dumps({
        "model": Path(args.model).name, "compute": args.compute, "threads": torch.get_num_threads(),
        "ratio": column("ratio", 3), "ratio_wall": column("wall", 3), "ratio_recording": column("recording", 3),
        "generate_tokens_per_s": column("generate", None), "engine_tokens_per_s": column("engine", None),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
