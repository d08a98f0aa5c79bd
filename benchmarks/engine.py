"""Embedded engine against transformers' generate: same model, one thread, same batch, tokens/s in one run.

    python benchmarks/engine.py [--model PATH_OR_NAME] [--compute float32|bfloat16] [--rounds 3]

--model is a Hugging Face folder, or one of two random models: "random-1m" (Llama, 5 layers of width 128, vocabulary 1024)
and "random-135m" (the shape of SmolLM2-135M). Both sides sample from the whole vocabulary at temperature 1 from the same
prompts, in turns, so that a machine that slows down slows both; the ratio of a round is taken within the round, and the
median over the rounds is claimed. "mixed" is 64 requests of 16 to 256 new tokens: generate holds the whole batch until its
longest row is through, and only the tokens that were asked for count. The engine also records the log-probability of
every token, which generate does not. Two more columns show the engine as training uses it, drawing from top-p 0.97 of at
most 64 candidates and recording them.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from farflung.core.sampling import GenerateRequest, SamplingParams, Source
from farflung.engines.embedded import EmbeddedEngine, EngineOptions

RANDOM = {
    "random-1m": LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "random-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
}  # fmt: skip
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


def run_generate(model: transformers.PreTrainedModel, case: Case, ids: np.ndarray) -> float:
    """Seconds for the case."""
    longest = max(case.new_tokens)
    started = time.process_time()
    out = model.generate(
        torch.from_numpy(ids).long(), attention_mask=torch.ones(ids.shape, dtype=torch.long), do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, min_new_tokens=longest,
    )  # fmt: skip
    seconds = time.process_time() - started
    assert out.shape == (len(ids), ids.shape[1] + longest)
    return seconds


async def run_engine(engine: EmbeddedEngine, case: Case, ids: np.ndarray, params: SamplingParams) -> float:
    requests = [
        GenerateRequest(f"s{i}", row, replace(params, max_tokens=n, seed=i))
        for i, (row, n) in enumerate(zip(ids, case.new_tokens, strict=True))
    ]
    started = time.process_time()
    done = await asyncio.gather(*map(engine.generate, requests))
    seconds = time.process_time() - started
    assert [len(c.ids) for c in done] == list(case.new_tokens)
    for request in requests:
        engine.forget(request.session)
    return seconds


async def measure(folder: Path, compute: str, rounds: int, scale: float, prompt: int, only: str | None) -> dict[str, dict[str, float]]:
    dtype = torch.float32 if compute == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    source = Source("bench", "bench", "bf16", "bf16")
    engine = EmbeddedEngine.from_folder(folder, source, EngineOptions(capacity=64, compute=compute, device="cpu"))
    results: dict[str, dict[str, float]] = {}
    print(f"{'batch':>6} {'generate':>10} {'engine':>10} {'ratio':>6}   tokens/s   {'recording':>10} {'ratio':>6}")
    for case in cases(scale):
        if only and case.name != only:
            continue
        ids = prompts(len(case.new_tokens), model.config.vocab_size, prompt)
        tokens = sum(case.new_tokens)
        warm = Case("warm", (4,) * len(ids))
        run_generate(model, warm, ids)
        for params in (OPEN, RECORDED):
            await run_engine(engine, warm, ids, params)
        seconds: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            recorded = await run_engine(engine, case, ids, RECORDED)
            opened = await run_engine(engine, case, ids, OPEN)
            seconds.append((run_generate(model, case, ids), opened, recorded))
        theirs, ours, recorded = (tokens / statistics.median(s) for s in zip(*seconds, strict=True))
        ratio = statistics.median(s[0] / s[1] for s in seconds)
        recording = statistics.median(s[0] / s[2] for s in seconds)
        print(f"{case.name:>6} {theirs:10.0f} {ours:10.0f} {ratio:6.2f} {'':12} {recorded:10.0f} {recording:6.2f}", flush=True)
        results[case.name] = {"generate": theirs, "engine": ours, "ratio": ratio, "ratio_recording": recording}
    await engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random-1m")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of new tokens")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--only", help="one case: 1, 8, 64 or mixed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model)
        if args.model in RANDOM:
            folder = Path(scratch)
            LlamaForCausalLM(RANDOM[args.model]).to(torch.bfloat16).save_pretrained(folder)
        with torch.inference_mode():
            results = asyncio.run(measure(folder, args.compute, args.rounds, args.scale, args.prompt, args.only))
    ratios = {name: round(result["ratio"], 3) for name, result in results.items()}
    recording = {name: round(result["ratio_recording"], 3) for name, result in results.items()}
    rates = {name: {k: round(result[k]) for k in ("generate", "engine")} for name, result in results.items()}
    print(json.dumps({
        "model": args.model, "compute": args.compute, "threads": torch.get_num_threads(),
        "ratios": ratios, "ratios_recording": recording, "tokens_per_s": rates,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
