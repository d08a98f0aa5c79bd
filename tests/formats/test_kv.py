"""Rounding of keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.sampling import KvFormat
from farflung.formats.kv import KV_FORMATS, fp8_codes, rounding

each_format = pytest.mark.parametrize("format", KV_FORMATS)


def heads(seed: int, exponent: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent


def test_fp8_by_hand() -> None:
    codes, exponents = fp8_codes(torch.tensor([[448.0, 17.0], [449.0, 1.0], [0.0, 0.0], [0.875, -0.4375]]))
    assert exponents.flatten().tolist() == [0, 1, 0 - 9, -9]
    assert codes.float().tolist() == [[448.0, 16.0], [224.0, 0.5], [0.0, 0.0], [448.0, -224.0]]


@each_format
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30))
def test_rounded_values_stay_and_fit_bfloat16(format: KvFormat, seed: int, exponent: int) -> None:
    once = rounding(format)(heads(seed, exponent))
    assert torch.equal(rounding(format)(once), once)
    assert torch.equal(once.bfloat16().float(), once)


@pytest.mark.parametrize(("format", "bound"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_relative_error(format: KvFormat, bound: float) -> None:
    values = heads(0)
    amax = values.abs().amax(-1, keepdim=True)
    assert ((rounding(format)(values) - values).abs() <= torch.maximum(values.abs() * bound, amax * 2**-18)).all()


@each_format
def test_a_token_does_not_depend_on_its_neighbours(format: KvFormat) -> None:
    values = heads(1)
    together = rounding(format)(values)
    alone = torch.stack([rounding(format)(token) for token in values])
    assert torch.equal(together, alone)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_stays(format: KvFormat, dtype: torch.dtype) -> None:
    assert rounding(format)(heads(2).to(dtype)).dtype == dtype
