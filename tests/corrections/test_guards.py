"""Sequence guards by hand: three sequences, interleaved, with mean log-ratios 0.02, -0.3 and 0."""

from __future__ import annotations

import math

import pytest
import torch

from farflung.core.errors import BadInput
from farflung.corrections import Guards

SEQUENCES = torch.tensor([0, 1, 0, 1, 2])
LOG_RATIO = torch.tensor([0.05, -0.5, -0.01, -0.1, 0.0], dtype=torch.float64)
STALENESS = torch.tensor([0, 1, 2, 3, 0])


def factors(guards: Guards, signs: tuple[float, float, float] = (1.0, -1.0, 1.0)) -> list[float]:
    """One factor for each sequence; all tokens of a sequence have the same."""
    each = guards.factors(LOG_RATIO, SEQUENCES, torch.tensor(signs).double()[SEQUENCES], STALENESS)
    assert each[0] == each[2]
    assert each[1] == each[3]
    return each[[0, 1, 4]].tolist()


def test_off_by_default() -> None:
    assert not Guards()
    assert factors(Guards()) == [1, 1, 1]


def test_gspo_is_the_clipped_ratio_of_the_sequence() -> None:
    up, down = math.exp(0.02), math.exp(-0.3)
    assert factors(Guards(gspo=(0.5, 0.5))) == pytest.approx([up, down, 1])
    assert factors(Guards(gspo=(0.2, 0.01))) == [0, 0, 1]
    # Clipping is one-sided: a ratio above the range still pulls back an advantage below zero, and the other way round.
    assert factors(Guards(gspo=(0.2, 0.01)), (-1.0, 1.0, 1.0)) == pytest.approx([up, down, 1])


def test_masks() -> None:
    assert factors(Guards(geometric=(0.99, 1.01))) == [0, 0, 1]
    assert factors(Guards(geometric=(0.7, 1.03))) == [1, 1, 1]
    assert factors(Guards(opsm=0.2)) == [1, 0, 1]
    assert factors(Guards(opsm=0.2), (1.0, 1.0, 1.0)) == [1, 1, 1]
    assert factors(Guards(opsm=0.4)) == [1, 1, 1]
    assert factors(Guards(max_staleness=2)) == [1, 0, 1]
    assert factors(Guards(max_staleness=0)) == [0, 0, 1]
    assert factors(Guards(gspo=(0.5, 0.5), max_staleness=2)) == pytest.approx([math.exp(0.02), 0, 1])


def test_tokens_without_advantage_are_no_part_of_a_sequence() -> None:
    """They are never computed, so their log-ratio is not known; wherever they stand, the factor is that of the others."""
    guards = Guards(opsm=0.2, geometric=(0.5, 1.2))
    for advantages in ([-1.0, -1, 0, 0], [0.0, 0, -1, -1], [0.0, -1, -1, 0], [-0.5, 0, 0, 0]):
        taught = torch.tensor(advantages)
        log_ratio = torch.where(taught != 0, -0.3, 0.0)
        assert not guards.factors(log_ratio, torch.zeros(4).long(), taught, None).any()
        assert Guards(opsm=0.4).factors(log_ratio, torch.zeros(4).long(), taught, None).all()
    silent = Guards(gspo=(0.1, 0.1)).factors(torch.zeros(2), torch.tensor([0, 0]), torch.zeros(2), None)
    assert silent.tolist() == [1, 1]


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="sequence 1 has advantages -1 and 1; a guard needs one sign"):
        Guards(opsm=0.1).factors(LOG_RATIO, SEQUENCES, torch.tensor([1.0, 1, 1, -1, 1]), None)
    for opsm in (math.nan, -0.1):
        with pytest.raises(BadInput, match=f"opsm is {opsm}; it must be at least 0"):
            Guards(opsm=opsm)
    with pytest.raises(BadInput, match="max_staleness is -1; it must be at least 0"):
        Guards(max_staleness=-1)
    with pytest.raises(BadInput, match=r"geometric is \[1.01, 0.99\]; it needs 0 <= low < high"):
        Guards(geometric=(1.01, 0.99))
    with pytest.raises(BadInput, match="gspo is"):
        Guards(gspo=(-0.1, 0.2))
    with pytest.raises(BadInput, match="needs each token's staleness"):
        Guards(max_staleness=1).factors(LOG_RATIO, SEQUENCES, torch.ones(5), None)
