"""Supports: rows and where they stand, and one clear error for everything that can be wrong with them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.corrections import Supports, check_echo, check_sampled
from tests.corrections.oracle import Problem, problems


def supports(rows: list[dict[int, float]], kind: str = "top_p") -> Supports:
    """From each row's candidates with their probabilities."""
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int32)
    log = torch.tensor([math.log(q) if q > 0 else -math.inf for row in rows for q in row.values()])
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Supports(ids, log, offsets, kind)  # type: ignore[arg-type]


GOOD = supports([{4: 0.5, 2: 0.5}, {7: 1.0}, {2: 0.25, 9: 0.75}])
SAMPLED = torch.tensor([2, 7, 9])


def test_rows_and_where_the_sampled_tokens_stand() -> None:
    assert GOOD.ids.dtype == torch.int64
    assert GOOD.sizes.tolist() == [2, 1, 2]
    assert GOOD.rows.tolist() == [0, 0, 1, 2, 2]
    assert GOOD.find(SAMPLED).tolist() == [1, 2, 4]
    assert GOOD.sum(torch.arange(5.0)).tolist() == [1, 2, 7]
    chosen = dataclasses.replace(GOOD, kind="top_k").select(torch.tensor([2, 0]))
    assert chosen.ids.tolist() == [2, 9, 4, 2]
    torch.testing.assert_close(chosen.logprobs.exp(), torch.tensor([0.25, 0.75, 0.5, 0.5]))
    assert chosen.offsets.tolist() == [0, 2, 4]
    assert chosen.kind == "top_k"
    assert len(GOOD.select(torch.tensor([], dtype=torch.int64))) == 0
    assert Supports.blank(3, torch.device("cpu")).sizes.tolist() == [0, 0, 0]
    with pytest.raises(BadInput, match="row 1's sampled token 2 is not among its candidates"):
        GOOD.find(torch.tensor([2, 2, 9]))
    with pytest.raises(BadInput, match="row 0 names candidate 2 twice"):
        dataclasses.replace(GOOD, ids=torch.tensor([2, 2, 7, 2, 9])).find(SAMPLED)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["top_p", "top_k"]).flatmap(problems), st.sampled_from([torch.float32, torch.float64]))
def test_what_a_sampler_records_is_accepted(problem: Problem, dtype: torch.dtype) -> None:
    cast = problem.cast(dtype)
    cast.supports.check(cast.sampled, len(cast.head))
    check_sampled(cast.sampled, cast.logprobs, len(cast.head))
    log_p = cast.supports.log_softmax(torch.randn(len(cast.supports.ids), dtype=dtype) * 30)
    torch.testing.assert_close(cast.supports.sum(log_p.exp()), torch.ones(len(cast.supports), dtype=dtype))


def changed(**parts: object) -> Supports:
    return dataclasses.replace(GOOD, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (supports([{4: 0.5, 2: 0.5}, {7: 1.0}]), "2 rows for 3 sampled tokens"),
        (supports([{4: 0.5, 3: 0.5}, {7: 1.0}, {2: 0.25, 9: 0.75}]), "row 0's sampled token 2 is not among its candidates"),
        (supports([{4: 1.0, 2: 0.0}, {7: 1.0}, {2: 0.25, 9: 0.75}]), "row 0's sampled token 2 has probability 0"),
        (supports([{4: 0.0, 2: 1.0}, {7: 1.0}, {2: 0.25, 9: 0.75}]), "row 0's candidate 4 has log-probability -inf"),
        (supports([{4: 0.5, 2: 0.5}, {7: 0.99}, {2: 0.25, 9: 0.75}]), "row 1's probabilities sum to 0.990000, not 1"),
        (supports([{4: 0.5, 2: 0.5}, {7: 1.0}, {2: 0.3, 9: 0.75}]), "row 2's probabilities sum to 1.050000, not 1"),
        (supports([{4: 0.5, 2: 0.5}, {7: 1.0}, {10: 0.25, 9: 0.75}]), "row 2's candidate 10 is outside the vocabulary of 10"),
        (supports([{-4: 0.5, 2: 0.5}, {7: 1.0}, {2: 0.25, 9: 0.75}]), "row 0's candidate -4 is outside the vocabulary of 10"),
        (changed(ids=torch.tensor([2, 2, 7, 2, 9])), "row 0 names candidate 2 twice"),
        (changed(offsets=torch.tensor([0, 2, 2, 5])), "row 1 has no candidates"),
        (changed(offsets=torch.tensor([0, 3, 2, 5])), "offsets fall from 3 to 2 at row 1"),
        (changed(offsets=torch.tensor([0, 2, 3, 4])), r"offsets \[0, 4\] do not span 5 entries"),
        (changed(offsets=torch.tensor([1, 2, 3, 5])), r"offsets \[1, 5\] do not span 5 entries"),
        (changed(logprobs=torch.tensor([math.nan, -1, 0, -1, -1])), "row 0's candidate 4 has log-probability nan"),
        (changed(logprobs=torch.tensor([-1, -1, math.inf, -1, -1])), "row 1's candidate 7 has log-probability inf"),
    ],
)  # fmt: skip
def test_a_support_that_no_sampler_recorded_is_refused(bad: Supports, what: str) -> None:
    GOOD.check(SAMPLED, 10)
    with pytest.raises(BadInput, match=f"supports: {what}"):
        bad.check(SAMPLED, 10)


def test_a_support_above_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="row 0 has 3 candidates of a vocabulary of 2"):
        supports([{0: 0.5, 1: 0.25, 2: 0.25}]).check(torch.tensor([0]), 2)


def test_a_head_may_leave_a_tail_but_not_exceed_one() -> None:
    """top_k: the sampled token may lie outside, and the sum below one."""
    supports([{0: 0.5, 1: 0.25}], "top_k").check(torch.tensor([3]), 5)
    with pytest.raises(BadInput, match=r"row 0's probabilities sum to 1\.100000, above 1"):
        supports([{0: 0.6, 1: 0.5}], "top_k").check(torch.tensor([3]), 5)
    with pytest.raises(BadInput, match="row 0's candidate 1 has log-probability -inf"):
        supports([{0: 0.6, 1: 0.0}], "top_k").check(torch.tensor([3]), 5)


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"ids": [1, 2, 3, 4, 5]}, "ids is a list, not a tensor"),
        ({"offsets": torch.arange(4).numpy()}, "offsets is a ndarray, not a tensor"),
        ({"ids": torch.arange(4)}, r"ids \(4,\), log-probs \(5,\)"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, r"offsets \(0,\)"),
        ({"ids": torch.arange(5.0)}, "ids are torch.float32, not torch.int32 or torch.int64"),
        ({"logprobs": torch.zeros(5, dtype=torch.bfloat16)}, "logprobs are torch.bfloat16, not torch.float32"),
        ({"logprobs": torch.zeros(5, dtype=torch.int64)}, "logprobs are torch.int64, not torch.float32"),
        ({"offsets": torch.arange(4.0)}, "offsets are torch.float32, not torch.int32 or torch.int64"),
        ({"logprobs": torch.zeros(5, device="meta")}, "ids are on cpu, logprobs on meta"),
        ({"offsets": torch.zeros(4, device="meta", dtype=torch.int64)}, "ids are on cpu, offsets on meta"),
        ({"kind": "top_q"}, "unknown kind 'top_q'"),
    ],
)
def test_wrong_shapes_types_and_devices_are_refused(parts: dict[str, object], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        changed(**parts)


def test_what_the_sampler_says_it_used_must_be_what_was_asked() -> None:
    check_echo(temperature=(1.0, 1.0), top_p=(0.97, 0.97))
    check_echo(top_p=(0.97, float(torch.tensor(0.97))))  # as float32 rounds it
    with pytest.raises(BadInput, match=r"temperature 1.0 was asked for, the sampler does not say what was used"):
        check_echo(temperature=(1.0, None))
    with pytest.raises(BadInput, match=r"top_p 0.97 was asked for, 1.0 was used"):
        check_echo(temperature=(1.0, 1.0), top_p=(0.97, 1.0))
