"""Signs of a collapse, from rows made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from farflung.ablation.signs import Signs, read_signs, smooth
from farflung.core.metrics import TokenStats, UpdateMetrics


def signs(
    reward: Sequence[float], kl: Sequence[float], *, norm: Sequence[float] = (), malformed: Sequence[float] = ()
) -> Signs:
    rows = [
        UpdateMetrics(
            update=at + 1, all=TokenStats(tokens=10 if kl[at] else 0, reward=reward[at], kl=kl[at]),
            grad_norm=norm[at] if norm else 1.0, format_errors=malformed[at] if malformed else 0.0,
        )
        for at in range(len(reward))
    ]  # fmt: skip
    return read_signs(rows, fresh=2, window=2)


def test_a_run_that_learns_has_no_sign() -> None:
    found = signs([0.5] * 3 + [0.6, 0.7, 0.8, 0.9, 0.9], [0.001, 0.005, 0.01, 0.01, 0.01, 0.02, 0.02, 0.02])
    assert (found.start, found.best, found.final) == pytest.approx((0.5, 0.9, 0.9))
    assert found.kl_start == pytest.approx(0.01)  # not the fresh batches before the lag filled
    assert found.kl_growth == pytest.approx(2.0)
    assert (found.kl_step, found.reward_step, found.gradient_step, found.collapse_step) == (None, None, None, None)


def test_a_collapse_is_the_first_update_at_which_two_signs_stand() -> None:
    found = signs([0.5] * 4 + [0.3] * 4, [0.01] * 5 + [0.1] * 3)
    assert (found.reward_step, found.kl_step, found.collapse_step) == (5, 6, 6)
    assert found.kl_growth == found.kl_peak_growth == pytest.approx(10.0)


def test_one_sign_alone_is_no_collapse() -> None:
    assert signs([0.5] * 4 + [0.3] * 4, [0.01] * 8).collapse_step is None
    assert signs([0.9] * 8, [0.01] * 4 + [0.1] * 4).collapse_step is None


def test_a_run_that_comes_back_has_collapsed_all_the_same() -> None:
    found = signs([0.5] * 3 + [0.2, 0.2, 0.9, 0.9, 0.9], [0.01] * 4 + [0.1, 0.1, 0.01, 0.01])
    assert (found.reward_step, found.kl_step, found.collapse_step) == (4, 5, 5)
    assert (found.final, found.kl_growth, found.kl_peak_growth) == pytest.approx((0.9, 1.0, 10.0))


def test_gradients_and_format_errors_are_the_third_sign() -> None:
    assert signs([0.5] * 8, [0.01] * 8, norm=[1.0] * 6 + [50.0] * 2).gradient_step == 7
    found = signs([0.5] * 4 + [0.1] * 4, [0.01] * 8, malformed=[0.1] * 5 + [0.6] * 3)
    assert (found.gradient_step, found.collapse_step) == (6, 6)


def test_a_run_that_diverged_has_collapsed_where_it_ended_or_before() -> None:
    rows = [UpdateMetrics(update=at + 1, all=TokenStats(tokens=10, reward=0.5, kl=0.01)) for at in range(4)]
    found = read_signs(rows, fresh=2, window=2, diverged=True)
    assert (found.collapse_step, found.diverged_step, found.final) == (5, 5, 0.5)
    bad = UpdateMetrics(update=5, all=TokenStats(tokens=10, reward=0.1, kl=0.2), grad_norm=math.nan)
    found = read_signs([*rows, bad, bad], fresh=2, window=2, diverged=True)
    assert (found.collapse_step, found.diverged_step, found.final) == (5, 7, pytest.approx(0.1))
    nothing = read_signs([], fresh=2, window=2, diverged=True)
    assert (nothing.collapse_step, nothing.diverged_step) == (1, 1)
    assert math.isnan(nothing.final)
    assert math.isnan(nothing.kl_growth)


def test_a_run_in_which_nothing_was_measured_has_no_kl() -> None:
    found = signs([0.0] * 4, [0.0] * 4)
    assert math.isnan(found.kl_growth)
    assert found.collapse_step is None


def test_a_window_leaves_out_what_was_not_measured() -> None:
    assert smooth([1.0, math.nan, 3.0], 2) == [1.0, 1.0, 3.0]
