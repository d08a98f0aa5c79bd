"""SGLang's answers to POST /generate with ``return_sampling_mask`` (fields as in 0.5.23).

Ask with ``{"return_sampling_mask": true, "sampling_logprobs_mode": "support", "sampling_params": {"top_k": K, ...}}``, K
finite and not above the server's ``--sampling-mask-max-tokens``. Then ``meta_info.output_token_sampling_mask[t]`` names the
candidates of token t and ``output_token_sampling_logprobs[t]`` their log-probabilities after temperature, top-k and top-p,
renormalised, in the same order.

``output_token_logprobs``, which comes with ``return_logprob``, is another distribution (before top-k and top-p, and by an
environment variable before temperature): nothing here takes a number from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from farflung.core.errors import Corrupt
from farflung.core.supports import Int32, Supports
from farflung.engines.replies.base import Reply, field, pack, read_finish, read_spans, same_length, token_ids

WHERE = "SGLang reply"
ASK = (
    'ask with "return_sampling_mask": true and "sampling_logprobs_mode": "support", and see that no router on the way '
    "drops the two"
)


def read_sglang(reply: Mapping[str, Any]) -> Reply:
    """One finished generation; /generate answers with one such object, or with a list of them for several prompts.

    Raises Corrupt for a reply that is not finished or whose rows are not what the tokens were drawn from.
    """
    output = field(reply, "output_ids", list, WHERE)
    info = field(reply, "meta_info", dict, WHERE)
    reason = info.get("finish_reason")
    finish = read_finish(reason.get("type") if isinstance(reason, dict) else reason, WHERE)
    ids = token_ids(output, "output_ids", WHERE)
    spans = read_spans(info.get("weight_versions"), len(ids), WHERE)
    if finish == "abort" and not len(ids):
        return Reply(ids, np.zeros(0, np.float32), Supports.empty(), finish, spans)
    mask = field(info, "output_token_sampling_mask", list, WHERE, ASK)
    values = field(info, "output_token_sampling_logprobs", list, WHERE, ASK)
    same_length(WHERE, len(ids), output_token_sampling_mask=mask, output_token_sampling_logprobs=values)
    if info.get("output_token_logprobs") is not None:
        _same_tokens(ids, field(info, "output_token_logprobs", list, WHERE))
    for t, (candidates, row) in enumerate(zip(mask, values, strict=True)):
        if not isinstance(candidates, list):
            raise Corrupt(f"row {t} of output_token_sampling_mask is {candidates!r:.60}, not a list", where=WHERE)
        if not isinstance(row, list):
            what = f"row {t} of output_token_sampling_logprobs is {row!r:.60}: not the candidates' log-probabilities"
            raise Corrupt(what, where=WHERE, mend=ASK)
    supports = pack(mask, values, WHERE)
    logprobs = supports.logprobs[supports.find(ids, where=WHERE)]
    supports.check(ids, logprobs, where=WHERE)
    return Reply(ids, logprobs, supports, finish, spans)


def _same_tokens(ids: Int32, triples: list[Any]) -> None:
    """``output_token_logprobs`` [[logprob, id, text], ...] must name the same tokens in the same rows."""
    same_length(WHERE, len(ids), output_token_logprobs=triples)
    for t, (token, triple) in enumerate(zip(ids.tolist(), triples, strict=True)):
        if not isinstance(triple, list | tuple) or len(triple) < 2 or triple[1] != token:
            raise Corrupt(f"row {t} of output_token_logprobs is {triple!r:.60}; token {token} was drawn", where=WHERE)
