"""The draw: candidates by the rules, exact log-probabilities, and tokens as often as these say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.supports import Supports
from farflung.engines.audit import frequencies_p
from farflung.engines.embedded.sampling import Rules, draw


def rules(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Rules:
    return Rules(np.full(n, temperature), np.full(n, top_p), np.full(n, top_k, np.int64))


def logits(n: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def by_the_rules(row: np.ndarray, temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    """Candidates and log-probabilities of one row, by the definition, in float64."""
    scaled = row.astype(np.float64) / temperature
    full = np.exp(scaled - np.logaddexp.reduce(scaled))
    kept: list[int] = []
    for i in np.argsort(-full)[: top_k or None]:
        kept.append(int(i))
        if top_p < 1 and full[kept].sum() >= top_p:
            break
    total = np.log(full[kept].sum())
    return {i: float(np.log(full[i]) - total) for i in kept}


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 5),
    vocabulary=st.integers(2, 700),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.97, 1.0]),
    top_k=st.sampled_from([1, 2, 7, 64]),
)
def test_candidates_follow_the_rules(
    seed: int, n: int, vocabulary: int, temperature: float, top_p: float, top_k: int
) -> None:
    z = logits(n, vocabulary, seed)
    drawn = draw(z.clone(), rules(n, temperature, top_p, top_k), np.random.default_rng(seed).random(n))
    supports = Supports(drawn.support_ids, drawn.support_logprobs, np.concatenate([[0], np.cumsum(drawn.counts)]))
    supports.check(drawn.ids.astype(np.int32), drawn.logprobs)
    for row in range(n):
        part = supports.rows(row, row + 1)
        got = dict(zip(part.ids.tolist(), part.logprobs.tolist(), strict=True))
        expected = by_the_rules(z[row].numpy(), temperature, top_p, top_k)
        if set(got) != set(expected):  # only where the mass meets top_p within float32's rounding
            close = [by_the_rules(z[row].numpy(), temperature, top_p + d, top_k) for d in (-1e-6, 1e-6)]
            expected = next(c for c in close if set(c) == set(got))
        assert got == pytest.approx(expected, abs=2e-5)
        assert drawn.logprobs[row] == got[int(drawn.ids[row])]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 4), vocabulary=st.integers(1, 1100))
def test_the_whole_vocabulary(seed: int, n: int, vocabulary: int) -> None:
    z = logits(n, vocabulary, seed)
    drawn = draw(z.clone(), rules(n, 0.8), np.random.default_rng(seed).random(n))
    expected = torch.log_softmax(z.double() / 0.8, -1)[torch.arange(n), torch.from_numpy(drawn.ids)]
    np.testing.assert_allclose(drawn.logprobs, expected.numpy(), atol=2e-5)
    assert not drawn.counts.any()


def test_inverse_transform_meets_its_ends() -> None:
    z = torch.tensor([[0.0, -torch.inf, 1.0, 0.5]]).repeat(3, 1)
    u = np.array([0.0, 0.6, np.nextafter(1, 0)])
    assert draw(z.clone(), rules(3), u).ids.tolist() == [0, 2, 3]
    bounded = draw(z.clone(), rules(3, top_k=4), u)
    assert bounded.ids.tolist() == [2, 3, 0]
    assert bounded.counts.tolist() == [3, 3, 3]


def test_a_row_is_drawn_alone_as_among_others() -> None:
    z = logits(6, 500)
    mixed = Rules(np.linspace(0.5, 1.5, 6), np.array([1, 0.5, 1, 0.9, 1, 1.0]), np.array([0, 3, 0, 64, 5, 0]))
    u = np.random.default_rng(0).random(6)
    together = draw(z.clone(), mixed, u)
    start = 0
    for i in range(6):
        row = slice(i, i + 1)
        alone = draw(z[row].clone(), Rules(mixed.temperature[row], mixed.top_p[row], mixed.top_k[row]), u[row])
        end = start + int(together.counts[i])
        assert alone.ids[0] == together.ids[i]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)
        assert alone.support_ids.tolist() == together.support_ids[start:end].tolist()
        start = end


def test_logits_that_are_not_finite_are_marked_and_harm_no_other_row() -> None:
    z = logits(3, 40)
    z[1, 7] = torch.nan
    for kind in (rules(3), rules(3, top_p=0.9, top_k=5), rules(3, top_k=5)):
        drawn = draw(z.clone(), kind, np.full(3, 0.5))
        assert np.isnan(drawn.logprobs).tolist() == [False, True, False]
        if drawn.counts.any():
            good = draw(z[[0, 2]].clone(), Rules(kind.temperature[:2], kind.top_p[:2], kind.top_k[:2]), np.full(2, 0.5))
            assert good.support_ids[-good.counts[1] :].tolist() == drawn.support_ids[-drawn.counts[2] :].tolist()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 20), (1.0, 30)])
def test_frequencies_are_what_the_log_probabilities_say(top_p: float, top_k: int) -> None:
    n = 20_000
    z = logits(1, 300, scale=1.0)
    ids = draw(z.repeat(n, 1), rules(n, 1.0, top_p, top_k), np.random.default_rng(5).random(n)).ids.astype(np.int32)
    expected = by_the_rules(z[0].numpy(), 1.0, top_p, top_k)
    candidates, logprobs = np.array(list(expected), np.int32), np.array(list(expected.values()), np.float32)
    assert frequencies_p(ids, candidates, logprobs) > 1e-3
    assert frequencies_p(ids, candidates, logprobs[::-1].copy()) < 1e-6
