"""E2M1: hand-computed codes, rounding to even, packing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.formats import e2m1

values = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=64).map(lambda v: v[: len(v) // 2 * 2])


def nearest(value: float) -> float:
    """The nearest magnitude, ties to the even code, by search."""
    size = abs(value)
    code = min(range(8), key=lambda c: (abs(e2m1.MAGNITUDES[c] - size), c % 2))
    return float(np.copysign(e2m1.MAGNITUDES[code], value))


def test_known_codes_share_bytes_first_in_the_low_nibble() -> None:
    packed = e2m1.encode(torch.tensor([0.5, 1.0, -6.0, 0.0, 1.5, 2.0, 3.0, -4.0]))
    assert packed.tolist() == [0x21, 0x0F, 0x43, 0xE5]
    assert e2m1.decode(packed).tolist() == [0.5, 1.0, -6.0, 0.0, 1.5, 2.0, 3.0, -4.0]


def test_midpoints_go_to_the_even_code() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75])
    for repeats in (1, 3, 9):  # vector units and their remainders must agree
        decoded = e2m1.decode(e2m1.encode(midpoints.repeat(repeats)))
        assert decoded.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0] * repeats


@given(values)
def test_encoding_finds_the_nearest_value(given_values: list[float]) -> None:
    decoded = e2m1.decode(e2m1.encode(torch.tensor(given_values, dtype=torch.float32)))
    assert decoded.tolist() == [nearest(v) for v in np.array(given_values, np.float32).tolist()]


def test_every_code_survives_a_round_trip() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(packed)), packed)


@given(values)
def test_rounding_is_monotone(given_values: list[float]) -> None:
    ordered = torch.tensor(sorted(given_values), dtype=torch.float32)
    assert (e2m1.decode(e2m1.encode(ordered)).diff() >= 0).all()
