"""Is q honest? Over 100,000 sampled tokens, and for every weight format and cache format.

    python benchmarks/honest_q.py [--model FOLDER] [--tokens 104000]

Frequencies: every token's place in the recorded distribution of its candidates (a randomised probability integral
transform at a fixed seed) must be uniform by a chi-square test; and where one context was sampled thousands of times,
counts must fit the recorded probabilities candidate by candidate.

Recomputation: from the version and the format that a token names, its prefix and the rules. First by a fresh run of the
engine's own decoder, fed the sampled ids in another company of rows: every log-probability must come out again within
1e-3. Then by transformers with its cache rounded to the cache format, which shares no code with the engine: it adds in
another order, so a key or value at the edge between two codes now and then rounds the other way and moves q; the share of
tokens within 1e-3 is printed. One run swaps weights in mid-turn (reading the sequences again), and each token is
recomputed from its own version.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import farflung
from farflung.core.sampling import Completion, GenerateRequest, KvFormat, SamplingParams, Source
from farflung.engines import audit
from farflung.engines.embedded import EmbeddedEngine, EngineOptions
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.weights import read_folder
from farflung.formats.kv import KV_FORMATS
from farflung.formats.weights import FORMATS

POLICY = Path(farflung.__file__).parent / "assets/policies/repair-1m"
TOLERANCE = 1e-3
NEW_TOKENS = 200
RULES = (
    SamplingParams(NEW_TOKENS, top_p=0.97, top_k=64),
    SamplingParams(NEW_TOKENS, temperature=1.3, top_p=0.9, top_k=20),
    SamplingParams(NEW_TOKENS),
)


def requests(count: int, vocabulary: int, batch: int) -> list[GenerateRequest]:
    """Random prompts of different length, every third under each of the rules; no two batches share a random number."""
    random = np.random.default_rng(batch)
    prompts = [random.integers(0, vocabulary, random.integers(4, 60)).astype(np.int32) for _ in range(count)]
    return [
        GenerateRequest(f"s{i}", ids, replace(RULES[i % 3], seed=batch * count + i)) for i, ids in enumerate(prompts)
    ]


def recomputed(
    model: transformers.PreTrainedModel, kv: KvFormat, one: GenerateRequest, done: Completion
) -> torch.Tensor:
    ids = np.concatenate([one.ids, done.ids])
    return audit.full_log_probs(model, kv, ids, len(one.ids), one.params.temperature)


async def sample(folder: Path, source: Source, asked: list[GenerateRequest]) -> list[Completion]:
    engine = EmbeddedEngine.from_folder(folder, source, EngineOptions(capacity=len(asked), device="cpu"))
    try:
        return await asyncio.gather(*map(engine.generate, asked))
    finally:
        await engine.close()


async def sample_over_swaps(
    folder: Path, versions: list[Mapping[str, torch.Tensor]], asked: list[GenerateRequest]
) -> list[Completion]:
    """Turns during which every version is loaded once."""
    source = Source("bench", "bench-0", "nvfp4", "bf16")
    options = EngineOptions(capacity=64, device="cpu", recompute_on_swap=True)
    engine = EmbeddedEngine(Architecture.read(folder), versions[0], source, options)
    try:
        turns = [asyncio.create_task(engine.generate(one)) for one in asked]
        share = len(asked) * NEW_TOKENS // len(versions)
        for version in range(1, len(versions)):
            while engine.stats().sampled_tokens < version * share:
                await asyncio.sleep(0.01)
            await engine.load(version, versions[version])
        return await asyncio.gather(*turns)
    finally:
        await engine.close()


def repeated_contexts(folder: Path, vocabulary: int, draws: int) -> list[float]:
    """p-values of first tokens, drawn many times from one context each."""
    p_values = []
    for context, prompt in enumerate(one.ids for one in requests(12, vocabulary, 0)):
        params = SamplingParams(1, top_p=0.97, top_k=64, temperature=1.5)
        asked = [GenerateRequest(f"r{i}", prompt, replace(params, seed=context * draws + i)) for i in range(draws)]
        done = asyncio.run(sample(folder, Source("bench", "bench-0", "bf16", "bf16"), asked))
        supports = done[0].supports
        assert supports is not None
        ids = np.concatenate([c.ids for c in done])
        p_values.append(audit.frequencies_p(ids, supports.ids, supports.logprobs))
    return p_values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=POLICY, help="a Hugging Face folder; the packaged policy by default"
    )
    parser.add_argument("--tokens", type=int, default=110_000, help="tokens to sample, over all formats")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    architecture, weights = Architecture.read(args.model), read_folder(args.model)
    vocabulary = architecture.vocabulary
    count = -(-args.tokens // (NEW_TOKENS * len(FORMATS) * len(KV_FORMATS)))

    results: dict[str, dict[str, float]] = {}
    replays: list[audit.Audit] = []
    others: list[audit.Audit] = []
    print("                        largest |log q - log recomputed q|")
    print(
        f"{'weights':>8} {'cache':>6} {'tokens':>7} {'replayed':>10} {'transformers':>13} {'within 1e-3':>12} {'uniform p':>10}"
    )
    for i, (format, kv) in enumerate(itertools.product(FORMATS, KV_FORMATS)):
        source = Source("bench", "bench-0", format, kv)
        asked = requests(count, vocabulary, i)
        done = asyncio.run(sample(args.model, source, asked))
        turns = list(zip(asked, done, strict=True))
        again = audit.replayed_log_probs(
            architecture, weights, source, [(one.ids, c.ids, one.params.temperature) for one, c in turns]
        )
        replay = audit.join(audit.audit(x, c, one.params) for x, (one, c) in zip(again, turns, strict=True))
        audit.load_rounded(model, weights, format)
        other = audit.join(
            audit.audit(recomputed(model, kv, one, c), c, one.params, i * count + j) for j, (one, c) in enumerate(turns)
        )
        replays.append(replay)
        others.append(other)
        inside, p = float(np.mean(other.gaps < TOLERANCE)), audit.uniformity_p(other.places)
        results[f"{format}/{kv}"] = {
            "replayed": float(replay.gaps.max()), "transformers": float(other.gaps.max()), "within": inside, "p": p,
        }  # fmt: skip
        print(
            f"{format:>8} {kv:>6} {len(other.gaps):7} {replay.gaps.max():10.1e} {other.gaps.max():13.1e} "
            f"{inside:12.5f} {p:10.3f}",
            flush=True,
        )
    replay, other = audit.join(replays), audit.join(others)
    tokens, wrong = len(other.gaps), int(replay.wrong.sum())
    p_all = audit.uniformity_p(other.places)
    print(f"{tokens} tokens: places in the recomputed distributions are uniform with p = {p_all:.3f}; "
          f"{wrong} candidate sets against the rules")  # fmt: skip

    contexts = repeated_contexts(args.model, vocabulary, 2000)
    print(f"12 contexts, 2000 draws each: p = {', '.join(f'{p:.3f}' for p in contexts)}")

    random = torch.Generator().manual_seed(0)
    versions = [weights] + [
        {n: (w.float() * (1 + 0.02 * torch.randn(w.shape, generator=random))).bfloat16() for n, w in weights.items()}
        for _ in range(2)
    ]
    over = requests(24, vocabulary, len(results))
    done = asyncio.run(sample_over_swaps(args.model, versions, over))
    swapped = []
    for version, new in enumerate(versions):
        audit.load_rounded(model, new, "nvfp4")
        for one, completion in zip(over, done, strict=True):
            gaps = audit.audit(recomputed(model, "bf16", one, completion), completion, one.params).gaps
            swapped.append(gaps[completion.versions == version])
    over_swaps = np.concatenate(swapped)
    over_swaps_inside = float(np.mean(over_swaps < TOLERANCE))
    print(f"two swaps in mid-turn: {len(over_swaps)} tokens of versions {sorted({int(v) for c in done for v in c.versions})}; "
          f"recomputed by transformers from the version that each names, {over_swaps_inside:.5f} are within 1e-3, "
          f"the largest gap is {over_swaps.max():.1e}")  # fmt: skip
    print(json.dumps({
        "tokens": tokens, "p_uniform": round(p_all, 4), "p_contexts": [round(p, 4) for p in contexts],
        "largest_gap_replayed": float(replay.gaps.max()), "largest_gap_of_candidates_replayed": float(replay.drifts.max()),
        "largest_gap_transformers": float(other.gaps.max()),
        "within_1e-3_transformers": round(float(np.mean(other.gaps < TOLERANCE)), 6),
        "within_1e-3_over_swaps": round(over_swaps_inside, 6), "wrong_candidate_sets": wrong, "formats": results,
        "seconds": round(time.monotonic() - started, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
