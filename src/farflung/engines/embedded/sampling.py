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
    width = min(int(rules.top_k.max()), logits.shape[1])
    top, top_ids = logits.topk(width, -1)
    # [n, width] float64, relative to each row's largest: exp of it is an unnormalised probability.
    relative = (top - top[:, :1]).cpu().numpy().astype(np.float64)
    mass = np.exp(relative)
    keep = np.arange(width) < rules.top_k[:, None]
    if (rules.top_p < 1).any():
        total = logits.sub_(top[:, :1]).exp_().sum(-1).cpu().numpy().astype(np.float64)
        before = np.cumsum(mass, -1) - mass
        keep &= (before < (rules.top_p * total)[:, None]) | (rules.top_p >= 1)[:, None]
    mass *= keep
    cumulative = np.cumsum(mass, -1)
    logprobs = (relative - np.log(cumulative[:, -1:])).astype(np.float32)
    counts = keep.sum(-1)
    rows = np.arange(len(counts))
    target = uniforms * cumulative[:, -1]
    chosen = np.minimum((cumulative <= target[:, None]).sum(-1), counts - 1)
    ids = top_ids.cpu().numpy()
    return Draw(ids[rows, chosen], logprobs[rows, chosen], counts, ids[keep].astype(np.int32), logprobs[keep])


def _draw_open(logits: Tensor, uniforms: Float64) -> Draw:
    """Inverse transform over the whole vocabulary, in two steps: the block that holds the draw, then the entry in it.

    Only the sums of blocks are accumulated over the vocabulary, in float64, so no probability drowns in rounding.
    """
    n, vocabulary = logits.shape
    rows = np.arange(n)
    highest = logits.amax(-1, keepdim=True)
    mass = F.pad(logits.sub_(highest).exp(), (0, -vocabulary % _BLOCK)).view(n, -1, _BLOCK)
    cumulative = np.cumsum(mass.sum(-1).cpu().numpy().astype(np.float64), -1)
    target = uniforms * cumulative[:, -1]
    block = np.minimum((cumulative <= target[:, None]).sum(-1), cumulative.shape[1] - 1)
    device_rows, device_block = (torch.from_numpy(i).to(logits.device) for i in (rows, block))
    within = mass[device_rows, device_block].cpu().numpy().astype(np.float64)
    target -= np.where(block > 0, cumulative[rows, block - 1], 0.0)
    inner = np.cumsum(within, -1)
    # Rounding can leave the target at or past the block's end: then its last entry that has any mass is meant.
    last = _BLOCK - 1 - np.argmax(within[:, ::-1] > 0, -1)
    chosen = np.minimum((inner <= target[:, None]).sum(-1), last)
    ids = block * _BLOCK + chosen
    relative = logits[device_rows, torch.from_numpy(ids).to(logits.device)].cpu().numpy()
    logprobs = (relative - np.log(cumulative[:, -1])).astype(np.float32)
    return Draw(ids, logprobs, np.zeros(n, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
