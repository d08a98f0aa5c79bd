from __future__ import annotations

import itertools
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.evaluation.pass_at_k import Estimate, Tally, estimate, paired_difference, pass_at_k

counts = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(counts)
def test_it_is_the_share_of_draws_that_hold_a_solution(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))), abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.0, 1.0))
def test_it_is_unbiased(n: int, k: int, p: float) -> None:
    if k > n:
        return
    from math import comb

    expected = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30))
def test_the_error_is_the_one_of_the_mean_over_tasks(solved: list[int]) -> None:
    tallies = {f"t{i}": Tally(4, c) for i, c in enumerate(solved)}
    got = estimate(tallies, 1)
    values = [c / 4 for c in solved]
    assert got.tasks == len(solved)
    assert got.mean == pytest.approx(statistics.mean(values), abs=1e-12)
    assert got.se == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-12)


@given(st.dictionaries(st.integers(0, 20), st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2))
def test_pairing_removes_what_tasks_have_in_common(both: dict[int, tuple[int, int]]) -> None:
    before = {str(t): Tally(4, b) for t, (b, _) in both.items()}
    after = {str(t): Tally(4, a) for t, (_, a) in both.items()}
    got = paired_difference(before, after, 1)
    differences = [(a - b) / 4 for b, a in both.values()]
    assert got.mean == pytest.approx(statistics.mean(differences), abs=1e-12)
    assert got.se == pytest.approx(statistics.stdev(differences) / len(differences) ** 0.5, abs=1e-12)
    assert paired_difference(before, before, 4) == Estimate(0.0, 0.0, len(both))


def test_tasks_without_enough_samples_are_left_out() -> None:
    tallies = {"a": Tally(4, 4), "b": Tally(3, 0), "c": Tally(0, 0)}
    assert estimate(tallies, 4) == Estimate(1.0, None, 1)
    assert estimate(tallies, 1) == Estimate(0.5, 0.5, 2)
    assert estimate(tallies, 8) == Estimate(None, None, 0)
    assert paired_difference(tallies, {"b": Tally(3, 3), "d": Tally(4, 4)}, 1) == Estimate(1.0, None, 1)


def test_it_reads_as_people_write_it() -> None:
    assert str(Estimate(0.3125, 0.0241, 64)) == "31.2 % ± 2.4"
    assert str(Estimate(1.0, None, 1)) == "100.0 %"
    assert str(Estimate(None, None, 0)) == "no result"


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*case)
    with pytest.raises(ValueError, match="solved"):
        Tally(2, 3)
