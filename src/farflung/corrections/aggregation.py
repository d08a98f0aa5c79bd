"""What the terms of a batch's tokens are divided by before they are summed up.

A denominator counts tokens and sequences as they were sampled. What is masked, dropped by a guard, certain or without
advantage counts like everything else, so the step does not grow when more is masked, and the expectation of the update
over the sampler stays what its formula says.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

from farflung.core.errors import BadInput

Aggregation = Literal["token", "sequence", "fixed"]


def denominators(
    lengths: Sequence[int], aggregation: Aggregation = "token", *, fixed_length: int | None = None
) -> list[float]:
    """For each sequence of a whole batch, what each of its tokens' terms is divided by.

    lengths: sampled tokens of every sequence, trained or not, as whole numbers.

    - "token": all sampled tokens of the batch; each token counts the same (DAPO, arXiv 2503.14476, section 3.3).
    - "sequence": own length x number of sequences; each sequence counts the same (GRPO, arXiv 2402.03300, equation 3).
    - "fixed": ``fixed_length`` x number of sequences; each token counts the same, whatever lengths a batch happens to
      have (Dr. GRPO, arXiv 2503.20783, section 3).

    Raises BadInput for a batch without sampled tokens, a length that is none and an unknown aggregation.
    """
    try:
        lengths = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise BadInput(f"lengths of sequences must be whole numbers: {error}", where="batch") from error
    if any(length < 0 for length in lengths):
        raise BadInput(f"a sequence has {min(lengths)} sampled tokens", where="batch")
    total = sum(lengths)
    if total <= 0:
        raise BadInput(f"{len(lengths)} sequences hold no sampled token; there is nothing to train on", where="batch")
    match aggregation:
        case "token":
            return [float(total)] * len(lengths)
        case "sequence":
            return [float(max(1, length) * len(lengths)) for length in lengths]
        case "fixed":
            if not isinstance(fixed_length, int) or fixed_length < 1:
                raise BadInput(f"fixed_length is {fixed_length}; it must be a whole number, at least 1", where="batch")
            return [float(fixed_length * len(lengths))] * len(lengths)
    raise BadInput(f"unknown aggregation {aggregation!r}", where="batch", mend="valid: token, sequence, fixed")
