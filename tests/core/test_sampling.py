"""Requests and completions cross the wire unchanged; a token's random number depends on seed and position alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.core.sampling import Completion, GenerateRequest, SamplingParams, Source, uniforms

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.floats(0.01, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(1, 100),
    stop_ids=st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    seed=st.integers(0, 2**63),
)


@given(params=params, ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), session=st.text(max_size=20))
def test_a_request_comes_back(params: SamplingParams, ids: list[int], session: str) -> None:
    got = GenerateRequest.decode(GenerateRequest(session, np.array(ids, np.int32), params, 3).encode())
    assert (got.session, got.params, got.min_version, got.ids.tolist()) == (session, params, 3, ids)


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": 1, "temperature": 0.0},
        {"max_tokens": 1, "temperature": float("inf")},
        {"max_tokens": 1, "top_p": 0.0},
        {"max_tokens": 1, "top_p": 1.1, "top_k": 4},
        {"max_tokens": 1, "top_p": 0.9},
        {"max_tokens": 1, "top_k": -1},
    ],
)
def test_parameters_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        ({"session": "s", "params": {"max_tokens": 1, "top_q": 3}}, [1]),
        ({"session": "s", "params": {}}, [1]),
        ({"session": "s"}, [1]),
        ({"session": "s", "params": {"max_tokens": 1}}, []),
        ({"session": "s", "params": {"max_tokens": 1}}, [[1, 2]]),
        ({"session": "s", "params": {"max_tokens": 1}}, [1, -1]),
        ({"session": "s", "params": {"max_tokens": 1.5}}, [1]),
        ({"session": "s", "params": {"max_tokens": 10**30}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "seed": 1 << 64}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "seed": "x"}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "temperature": "warm"}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "temperature": True}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "stop_ids": 3}}, [1]),
        ({"session": "s", "params": {"max_tokens": 1, "stop_ids": ["a"]}}, [1]),
        ({"session": "s", "params": ["max_tokens", 1]}, [1]),
        ({"session": "s", "params": {"max_tokens": 1}, "min_version": -1}, [1]),
        ({"session": "s", "params": {"max_tokens": 1}, "min_version": 1e9}, [1]),
        ({"session": "s", "params": {"max_tokens": 1}, "min_version": None}, [1]),
    ],
)
def test_a_wrong_request_is_refused(data: dict[str, Any], ids: list[Any]) -> None:
    with pytest.raises(BadInput):
        GenerateRequest.decode(frame.encode(data, {"ids": np.array(ids, np.int32)}))


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_ids_of_another_type_are_refused(dtype: Any) -> None:
    with pytest.raises(BadInput, match="int32"):
        GenerateRequest.decode(frame.encode({"session": "s", "params": {"max_tokens": 1}}, {"ids": np.ones(2, dtype)}))


def test_numbers_that_json_does_not_have_are_refused() -> None:
    raw = frame.encode(
        {"session": "s", "params": {"max_tokens": 1}, "min_version": 12345678}, {"ids": np.ones(2, np.int32)}
    )
    with pytest.raises(BadInput):
        GenerateRequest.decode(raw.replace(b"12345678", b"Infinity"))


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=12), seed=st.integers(0, 2**32), supported=st.booleans())
def test_a_completion_comes_back(
    make_supports: Callable[..., Any], sizes: list[int], seed: int, supported: bool
) -> None:
    supports, ids, logprobs = make_supports(sizes, seed)
    versions = np.arange(len(ids), dtype=np.int32)
    sent = Completion(
        ids, logprobs, versions, supports if supported else None, "stop", Source("p", "r", "fp8", "fp8"), 5
    )
    got = Completion.decode(sent.encode())
    assert (got.finish, got.source, got.cached) == (sent.finish, sent.source, sent.cached)
    for name in ("ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    assert (got.supports is None) == (sent.supports is None)
    if got.supports is not None:
        np.testing.assert_array_equal(got.supports.logprobs, supports.logprobs)


def completion(make_supports: Callable[..., Any], **changes: Any) -> Completion:
    supports, ids, logprobs = make_supports([2, 3], 1)
    fields = {
        "ids": ids, "logprobs": logprobs, "versions": np.zeros(2, np.int32), "supports": supports, "finish": "stop",
        "source": Source("p", "r", "fp8", "fp8"),
    }  # fmt: skip
    return Completion(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"finish": "tired"},
        {"versions": np.zeros(1, np.int32)},
        {"logprobs": np.array([np.nan, -1], np.float32), "supports": None},
        {"ids": np.array([5000, 1], np.int32)},
        {
            "ids": np.zeros(0, np.int32),
            "logprobs": np.zeros(0, np.float32),
            "versions": np.zeros(0, np.int32),
            "supports": None,
        },
    ],
)
def test_a_bad_reply_never_reaches_the_trainer(make_supports: Callable[..., Any], changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        Completion.decode(completion(make_supports, **changes).encode())


def test_uniforms_are_uniform_and_independent() -> None:
    """1e5 draws over seeds and over positions: means and correlations within five standard deviations."""
    n = 100_000
    counted = np.arange(n, dtype=np.uint64)
    fixed = np.full(n, 12345, np.uint64)
    for draws in (uniforms(counted, fixed), uniforms(fixed, counted)):
        assert draws.min() >= 0
        assert draws.max() < 1
        assert abs(draws.mean() - 0.5) < 5 / np.sqrt(12 * n)
        observed, _ = np.histogram(draws, 64, (0, 1))
        chi2 = ((observed - n / 64) ** 2 / (n / 64)).sum()
        assert chi2 < 63 + 5 * np.sqrt(2 * 63)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(uniforms(counted, fixed), uniforms(fixed, counted))[0, 1]) < 5 / np.sqrt(n)


@given(seed=st.integers(0, 2**64 - 1), positions=st.lists(st.integers(0, 2**32), min_size=1, max_size=20))
def test_a_number_depends_on_seed_and_position_alone(seed: int, positions: list[int]) -> None:
    seeds = np.full(len(positions), seed, np.uint64)
    at = np.array(positions, np.uint64)
    together = uniforms(seeds, at)
    alone = [uniforms(seeds[:1], at[i : i + 1])[0] for i in range(len(positions))]
    np.testing.assert_array_equal(together, alone)
