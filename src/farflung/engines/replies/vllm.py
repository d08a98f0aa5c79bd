"""vLLM's answers to POST /inference/v1/generate with log-probabilities of candidates (fields as in 0.33).

Start the server with ``--logprobs-mode processed_logprobs --max-logprobs N``, N above every request's top_k, and ask with
``{"sampling_params": {"top_k": K, "logprobs": K + 1, ...}}``. Then ``logprobs.content[t].top_logprobs`` holds the candidates
of token t with their log-probabilities after temperature, top-k and top-p, renormalised, and beyond them tokens that could
not be drawn, whose -inf arrives as -9999. The one more than K that is asked for is the proof: a row that shows a token which
could not be drawn shows all that could, and cannot be of ``raw_logprobs``, vLLM's default, whose numbers are of another
distribution. A server with ``--return-sampling-mask`` also sends ``sampling_mask``, which then has to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from farflung.core.errors import Corrupt
from farflung.core.supports import Supports
from farflung.engines.replies.base import Reply, field, log_probs, pack, read_finish, read_spans, same_length, token_ids

WHERE = "vLLM reply"
FLOOR = -9999.0
"""What vLLM sends for log-probabilities of -inf and NaN, since JSON has neither."""
NUMBER = (float, int)
ASK = (
    "start vLLM with --logprobs-mode processed_logprobs and --max-logprobs above top_k, and ask with a finite top_k and "
    '"logprobs" above it'
)


def read_vllm(choice: Mapping[str, Any]) -> Reply:
    """One finished entry of ``choices`` (output_mode "tokens", not streamed).

    Raises Corrupt for one that is not finished, whose candidates are not all there, or that are not what was drawn from.
    """
    finish = read_finish(choice.get("finish_reason"), WHERE)
    output = [] if choice.get("token_ids") is None else field(choice, "token_ids", list, WHERE)
    ids = token_ids(output, "token_ids", WHERE)
    spans = read_spans(choice.get("weight_versions"), len(ids), WHERE)
    if not len(ids):
        if finish != "abort":
            raise Corrupt("token_ids is empty", where=WHERE)
        return Reply(ids, np.zeros(0, np.float32), Supports.empty(), finish, spans)
    content = field(field(choice, "logprobs", dict, WHERE, ASK), "content", list, WHERE, ASK)
    masks = [None] * len(ids) if choice.get("sampling_mask") is None else field(choice, "sampling_mask", list, WHERE)
    same_length(WHERE, len(ids), logprobs=content, sampling_mask=masks)
    names, values, sampled = [], [], []
    for t, (token, entry, mask) in enumerate(zip(output, content, masks, strict=True)):
        where = f"{WHERE}, row {t}"
        if field(entry, "token_id", int, where) != token:
            raise Corrupt(f"log-probabilities of token {entry['token_id']}; {token} was drawn", where=where)
        sampled.append(field(entry, "logprob", NUMBER, where))
        if sampled[-1] <= FLOOR:
            raise Corrupt(f"sampled token {token} has log-probability {FLOOR}: none was recorded", where=where)
        candidates = _candidates(field(entry, "top_logprobs", list, where, ASK), mask, where)
        names.append(list(candidates))
        values.append(list(candidates.values()))
    supports = pack(names, values, WHERE)
    logprobs = log_probs(sampled, "a sampled token", WHERE)
    supports.check(ids, logprobs, where=WHERE)
    return Reply(ids, logprobs, supports, finish, spans)


def _candidates(listed: list[Any], mask: Any, where: str) -> dict[int, float]:
    """The listed tokens that could have been drawn, those above the floor, with their log-probabilities."""
    pairs = [(field(each, "token_id", int, where), field(each, "logprob", NUMBER, where)) for each in listed]
    kept = {name: value for name, value in pairs if value > FLOOR}
    if len({name for name, _ in pairs}) < len(pairs):
        raise Corrupt("top_logprobs lists a token twice", where=where)
    if isinstance(mask, list):
        if other := set(token_ids(mask, "sampling_mask", where).tolist()) ^ set(kept):
            raise Corrupt(f"sampling_mask and log-probabilities disagree on {sorted(other)[:5]}", where=where, mend=ASK)
    elif len(kept) == len(pairs):
        what = f"all {len(pairs)} listed tokens could have been drawn, so there may be more of them"
        raise Corrupt(what, where=where, mend=ASK)
    return kept
