"""Was q what the sampler said? Recomputes it from what a token names: version and formats; and its prefix and rules.

Twice: through transformers, sharing no code with the engine but the formats; and by a fresh run of the engine's own
decoder, which is fed the prompt and then the sampled ids one by one. Two programs add in different order, so in the first
a key or value at the edge between two codes of the cache format now and then rounds the other way, and q moves a little.
The second adds as the sampler did, whoever else was in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from farflung.core.sampling import Completion, KvFormat, SamplingParams, Source, WeightFormat
from farflung.core.supports import Float32, Int32
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.cache import Reading, RowCache, kv_shape
from farflung.engines.embedded.decoder import Decoder, Workspace
from farflung.engines.embedded.weights import prepare
from farflung.formats.kv import KV_FORMATS, rounding
from farflung.formats.selection import is_quantised
from farflung.formats.weights import FORMATS, quantise

Float64 = np.ndarray[Any, np.dtype[np.float64]]


def load_rounded(model: PreTrainedModel, weights: Mapping[str, Tensor], format: WeightFormat) -> None:
    """Set a float32 model to what ``weights`` (Hugging Face names) are in ``format``."""
    rounded = {}
    for name, tensor in weights.items():
        tensor = tensor.to(torch.bfloat16)
        rounded[name] = quantise(tensor, format, name=name).dequantise() if is_quantised(name) else tensor.float()
    missing, unexpected = model.load_state_dict(rounded, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()


class RoundedCache(DynamicCache):  # type: ignore[misc] # transformers has no types
    """transformers' cache, holding keys and values as the pool's cache format does."""

    def __init__(self, format: KvFormat) -> None:
        super().__init__()
        self._round = rounding(format)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(self._round(key_states), self._round(value_states), *args, **kwargs)
        return keys, values


@torch.inference_mode()
def full_log_probs(model: PreTrainedModel, kv: KvFormat, ids: Int32, first: int, temperature: float) -> Tensor:
    """Log-probabilities over the vocabulary that ids[first:] were drawn from before top-k and top-p, float32."""
    inputs = torch.from_numpy(ids[:-1].astype(np.int64))[None]
    logits = model(inputs, past_key_values=RoundedCache(kv), use_cache=True).logits[0, first - 1 :]
    return torch.log_softmax(logits.float() / temperature, -1)


@torch.inference_mode()
def replayed_log_probs(
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    source: Source,
    turns: Sequence[tuple[Int32, Int32, float]],
) -> list[Tensor]:
    """The same by the engine's decoder in float32 on a CPU. turns: prompt, sampled ids and temperature of each."""
    cpu, dtype = torch.device("cpu"), torch.float32
    formats = next(f for f in FORMATS if f == source.weights), next(f for f in KV_FORMATS if f == source.kv)
    prepared = prepare(architecture, weights, formats[0], dtype, cpu)
    steps = max(len(sampled) for _, sampled, _ in turns)
    longest = max(len(prompt) for prompt, _, _ in turns) + steps
    decoder = Decoder(architecture, longest, rounding(formats[1]), cpu)
    cache, workspace = RowCache(architecture, dtype, cpu), Workspace(architecture, dtype, cpu)
    prompts = [prompt[:-1].astype(np.int64) for prompt, _, _ in turns]
    stores = [torch.empty(kv_shape(architecture, len(prompt))) for prompt in prompts]
    reading = Reading(
        architecture, [(kv, 0, len(prompt)) for kv, prompt in zip(stores, prompts, strict=True) if len(prompt)]
    )
    positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
    decoder.hidden(
        prepared, torch.from_numpy(np.concatenate(prompts)), torch.from_numpy(positions), reading.attend, workspace
    )
    for row, kv in enumerate(stores):
        cache.reserve(row + 1, longest)
        cache.write(row, kv)
    lengths = np.array([len(prompt) - 1 for prompt, _, _ in turns])
    last = np.array([prompt[-1] for prompt, _, _ in turns]).astype(np.int64)
    rows: list[list[Tensor]] = [[] for _ in turns]
    for step in range(steps):
        cache.begin(lengths)
        decoder.hidden(prepared, torch.from_numpy(last), torch.from_numpy(lengths.copy()), cache.attend, workspace)
        logits = decoder.logits(prepared, workspace)
        for row, (_, sampled, temperature) in enumerate(turns):
            if step < len(sampled):
                rows[row].append(torch.log_softmax(logits[row] / temperature, -1))
                last[row] = sampled[step]
        lengths += 1
    return [torch.stack(row) for row in rows]


@dataclass(frozen=True, slots=True)
class Audit:
    """Of each token: ``gaps`` [n], the difference between its recorded and its recomputed log-probability; ``drifts`` [n],
    the largest such difference between probabilities among its candidates (its own where the whole vocabulary was open);
    ``wrong`` [n], whether the candidates are not what the rules give, beyond rounding; ``places`` [n], its randomised
    probability integral transform under the recomputed q, uniform in [0, 1) exactly when tokens fall as often as q says.
    """

    gaps: Float64
    drifts: Float64
    wrong: np.ndarray[Any, np.dtype[np.bool_]]
    places: Float64


def audit(full_log_probs: Tensor, completion: Completion, params: SamplingParams, seed: int = 0) -> Audit:
    """Compare one turn with what its tokens were drawn from before top-k and top-p, [n, vocabulary], recomputed."""
    full = full_log_probs.double().numpy()
    n = len(completion.ids)
    randoms = np.random.default_rng(seed).random(n)
    gaps, drifts, wrong, places = np.zeros(n), np.zeros(n), np.zeros(n, bool), np.zeros(n)
    for t in range(n):
        token, logprob = int(completion.ids[t]), float(completion.logprobs[t])
        if completion.supports is None:
            names, again = np.arange(full.shape[1], dtype=np.int32), full[t]
            drifts[t] = abs(np.exp(again[token]) - np.exp(logprob))
        else:
            row = completion.supports.rows(t, t + 1)
            names, again = row.ids, full[t, row.ids] - np.logaddexp.reduce(full[t, row.ids])
            drifts[t] = np.abs(np.exp(again) - np.exp(row.logprobs)).max()
            wrong[t] = not _follows_rules(full[t], row.ids, params)
        at, mass = int(np.flatnonzero(names == token)[0]), np.exp(again)
        gaps[t] = abs(float(again[at]) - logprob)
        places[t] = mass[:at].sum() + randoms[t] * mass[at]
    return Audit(gaps, drifts, wrong, places)


def join(audits: Iterable[Audit]) -> Audit:
    """All tokens of several turns."""
    each = list(audits)
    return Audit(*(np.concatenate([getattr(a, name) for a in each]) for name in ("gaps", "drifts", "wrong", "places")))


def _follows_rules(full: Float64, candidates: Int32, params: SamplingParams, slack: float = 2e-3) -> bool:
    """Whether the candidates are the shortest prefix of the top_k likeliest whose mass reaches top_p, up to ``slack``.

    Two float32 programs differ in the last digits, and now and then a key or value rounds the other way for it.
    """
    mass = np.exp(full)
    inside = np.sort(mass[candidates])[::-1]
    outside = np.delete(mass, candidates)
    likeliest = outside.size == 0 or outside.max() <= inside[-1] * (1 + slack) + 1e-12
    reached = inside.sum() >= params.top_p - slack or len(candidates) == min(params.top_k, len(full))
    shortest = params.top_p == 1 or len(candidates) == 1 or inside[:-1].sum() < params.top_p + slack
    return bool(likeliest and reached and shortest and len(candidates) <= params.top_k)


def chi_square_p(counts: Float64, expected: Float64) -> float:
    """Probability of counts at least this far from what was expected, by Pearson's chi-square."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def uniformity_p(places: Float64, bins: int = 100) -> float:
    """The p-value of ``places`` being uniform in [0, 1)."""
    counts = np.histogram(np.clip(places, 0, 1), bins, (0, 1))[0].astype(np.float64)
    return chi_square_p(counts, np.full(bins, len(places) / bins))


def frequencies_p(draws: Int32, candidates: Int32, logprobs: Float32) -> float:
    """The p-value of repeated draws from one recorded distribution; candidates expected less than five times are pooled."""
    expected = np.exp(logprobs.astype(np.float64)) * len(draws)
    counts = (draws[:, None] == candidates).sum(0).astype(np.float64)
    if counts.sum() != len(draws):
        return 0.0
    order = np.argsort(-expected)
    expected, counts = expected[order], counts[order]
    enough = max(1, int((expected >= 5).sum()))
    if enough < len(expected):
        tail = expected[enough:].sum()
        # A tail that is too thin to stand alone joins the last candidate.
        cut = enough if tail >= 5 else enough - 1
        expected = np.append(expected[:cut], expected[cut:].sum())
        counts = np.append(counts[:cut], counts[cut:].sum())
    return chi_square_p(counts, expected) if len(expected) > 1 else 1.0
