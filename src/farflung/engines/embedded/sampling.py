"""Drawing the next tokens of a whole batch, and saying exactly how each was drawn.

Temperature; then the top_k largest logits; then the shortest prefix of those, in order of probability under the full
softmax, whose mass reaches top_p; renormalised. One uniform number per row picks by inverse transform, so that a row's
draw depends on nothing but its logits, its parameters and its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.core.supports import Float32, Int32, Int64

Float64 = npt.NDArray[np.float64]

_BLOCK = 256
_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Rules:
    """temperature, top_p [n] float64; top_k [n] int64 (0 = the whole vocabulary); one entry per row of the batch."""

    temperature: Float64
    top_p: Float64
    top_k: Int64


@dataclass(frozen=True, slots=True)
class Draw:
    """ids, logprobs [n]; counts [n] candidates per row, 0 for rows that drew from the whole vocabulary; support_ids and
    support_logprobs [sum of counts], row after row, likeliest first. A row whose logits are not finite has a NaN."""

    ids: Int64
    logprobs: Float32
    counts: Int64
    support_ids: Int32
    support_logprobs: Float32


def draw(logits: Tensor, rules: Rules, uniforms: Float64) -> Draw:
    """logits [n, vocabulary] float32 (overwritten), uniforms [n] in [0, 1)."""
    if (rules.temperature != 1).any():
        logits.div_(torch.from_numpy(rules.temperature).to(logits.device, torch.float32).unsqueeze(1))
    bounded = rules.top_k > 0
    if bounded.all():
        return _draw_bounded(logits, rules, uniforms)
    if not bounded.any():
        return _draw_open(logits, uniforms)
    return _draw_mixed(logits, rules, uniforms, bounded)


def _draw_mixed(logits: Tensor, rules: Rules, uniforms: Float64, bounded: npt.NDArray[np.bool_]) -> Draw:
    ids, logprobs = np.zeros(len(uniforms), np.int64), np.zeros(len(uniforms), np.float32)
    counts = np.zeros(len(uniforms), np.int64)
    some, others = np.flatnonzero(bounded), np.flatnonzero(~bounded)
    part = Rules(rules.temperature[some], rules.top_p[some], rules.top_k[some])
    first = _draw_bounded(logits[torch.from_numpy(some).to(logits.device)], part, uniforms[some])
    second = _draw_open(logits[torch.from_numpy(others).to(logits.device)], uniforms[others])
    ids[some], logprobs[some], counts[some] = first.ids, first.logprobs, first.counts
    ids[others], logprobs[others] = second.ids, second.logprobs
    return Draw(ids, logprobs, counts, first.support_ids, first.support_logprobs)


def _draw_bounded(logits: Tensor, rules: Rules, uniforms: Float64) -> Draw:
    probabilities, candidates = logits.softmax(-1).topk(min(int(rules.top_k.max()), logits.shape[1]), -1)
    mass, ids = probabilities.cpu().numpy().astype(np.float64), candidates.cpu().numpy()
    # In the shortest prefix that reaches top_p, what comes before each entry does not reach it yet. The rounded sum over
    # everything may be a little below 1, so top_p 1 is spelled out. What float32 rounds to 0 is never drawn: no candidate.
    before = np.cumsum(mass, -1) - mass
    keep = (before < rules.top_p[:, None]) | (rules.top_p[:, None] == 1)
    keep &= (np.arange(mass.shape[1]) < rules.top_k[:, None]) & (mass > 0)
    keep[:, 0] = True
    mass[~keep] = 0
    cumulative = np.cumsum(mass, -1)
    total = cumulative[:, -1]
    counts = keep.sum(-1)
    chosen = np.minimum((cumulative <= (uniforms * total)[:, None]).sum(-1), counts - 1)
    row_of, _ = keep.nonzero()
    support = np.log(mass[keep] / total[row_of]).astype(np.float32)
    at = np.cumsum(counts) - counts + chosen
    support_ids = ids[keep]
    return Draw(support_ids[at], support[at], counts, support_ids.astype(np.int32), support)


def _draw_open(logits: Tensor, uniforms: Float64) -> Draw:
    """Inverse transform over the whole vocabulary, in two steps: the block that holds the draw, then the entry in it.

    Only the sums of blocks are accumulated over the vocabulary, in float64, so no probability drowns in rounding.
    """
    n, vocabulary = logits.shape
    mass = logits.softmax(-1)
    if vocabulary % _BLOCK:
        mass = F.pad(mass, (0, -vocabulary % _BLOCK))
    blocks = mass.view(-1, _BLOCK)
    cumulative = np.cumsum(blocks.sum(-1).view(n, -1).cpu().numpy(), -1, np.float64)
    total = cumulative[:, -1]
    target = uniforms * total
    block, before = _invert(cumulative, target)
    rows = np.arange(n)
    place = rows * cumulative.shape[1] + block
    within = blocks.numpy().take(place, 0) if blocks.device.type == "cpu" else _fetch(blocks, place)
    chosen, _ = _invert(np.cumsum(within, -1, np.float64), target - before)
    picked = within[rows, chosen]
    if not picked.all():
        # Rounding left the target past all mass of its block: its likeliest entry stands in.
        chosen = np.where(picked > 0, chosen, within.argmax(-1))
        picked = within[rows, chosen]
    logprobs = np.log(picked / total).astype(np.float32)
    return Draw(block * _BLOCK + chosen, logprobs, np.zeros(n, np.int64), _NO_IDS, _NO_LOGPROBS)


def _invert(cumulative: Float64, target: Float64) -> tuple[Int64, Float64]:
    """The first entry of each row [n, m] that exceeds the target [n], and the sum before it."""
    place = np.minimum((cumulative <= target[:, None]).sum(-1), cumulative.shape[1] - 1)
    below = cumulative.take(np.arange(len(place)) * cumulative.shape[1] + np.maximum(place - 1, 0))
    return place, below * (place > 0)


def _fetch(blocks: Tensor, place: Int64) -> Float32:
    fetched: Float32 = blocks[torch.from_numpy(place).to(blocks.device)].cpu().numpy()
    return fetched
