"""Weight formats: known codes and scales, error bounds, idempotence, ragged edges, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.weights import FORMATS, Quantised, quantise

each_format = pytest.mark.parametrize("format", FORMATS)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    seed, exponent = draw(st.integers(0, 2**31)), draw(st.integers(-20, 20))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    # Blocks of very different size, and empty ones.
    weight *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    return weight * (torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.05, 0.9, 1.0])))


def block_scales(q: Quantised) -> torch.Tensor:
    """The scale of every entry, [out, in]."""
    assert q.scales is not None
    match q.format:
        case "fp8":
            return q.scales.repeat_interleave(128, 0)[: q.rows].repeat_interleave(128, 1)[:, : q.columns]
        case "mxfp4":
            return torch.exp2(q.scales.float() - 127).repeat_interleave(32, 1)[:, : q.columns]
        case _:
            assert q.tensor_scale is not None
            return (q.scales.float() * q.tensor_scale).repeat_interleave(16, 1)[:, : q.columns]


def test_fp8_by_hand() -> None:
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[0, 1], weight[129, 128] = 448.0, 17.0, -3.5
    q = quantise(weight, "fp8")
    assert q.scales is not None
    assert q.scales.tolist() == [[1.0, 1.0], [1.0, 3.5 / 448]]
    # 448 = 0x7E is the largest code; 17 lies between 16 and 18, nearer to 16 by nothing: a tie, to the even 16 = 0x58.
    assert q.codes.view(torch.uint8)[0, :2].tolist() == [0x7E, 0x58]
    assert q.codes.view(torch.uint8)[129, 128] == 0xFE
    assert q.dequantise()[[0, 0, 129], [0, 1, 128]].tolist() == [448.0, 16.0, -3.5]


def test_mxfp4_by_hand() -> None:
    weight = torch.zeros(2, 40)
    weight[0, :4] = torch.tensor([12.0, -7.0, 1.0, 0.4])
    weight[1, 32] = 2.0**-10
    q = quantise(weight, "mxfp4")
    assert q.scales is not None
    # floor(log2 12) - 2 = 1, so the scale is 2 and 12/2 = 6; -7/2 = -3.5 ties to -4; 1/2; 0.4/2 rounds to 0.
    assert q.scales.tolist() == [[128, 0], [0, 127 - 12]]
    assert q.codes[0, :2].tolist() == [0xE7, 0x01]
    assert q.codes.shape == (2, 32)
    assert q.dequantise()[0, :4].tolist() == [12.0, -8.0, 1.0, 0.0]
    assert q.dequantise()[1, 32] == 2.0**-10


def test_mxfp4_saturates_between_six_and_eight_steps() -> None:
    assert quantise(torch.tensor([[7.9, 1.0]]), "mxfp4").dequantise().tolist() == [[6.0, 1.0]]


def test_nvfp4_by_hand() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16], weight[0, 17] = 448 * 6.0, 6.0, -2.4
    q = quantise(weight, "nvfp4")
    assert q.scales is not None
    assert q.tensor_scale is not None
    assert q.tensor_scale == 1.0
    assert q.scales.float().tolist() == [[448.0, 1.0]]
    assert q.codes[0, [0, 8]].tolist() == [0x07, 0xC7]
    assert q.dequantise()[0, [0, 16, 17]].tolist() == [2688.0, 6.0, -2.0]


def test_bf16_rounds_to_even() -> None:
    weight = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]])
    assert quantise(weight, "bf16").dequantise().tolist() == [[1.0, 1 + 2**-6, -1.0]]


@each_format
def test_bits_per_weight(format: WeightFormat) -> None:
    weight = torch.randn(512, 1024)
    bits = quantise(weight, format).nbytes * 8 / weight.numel()
    assert bits == pytest.approx({"bf16": 16, "fp8": 8.002, "mxfp4": 4.25, "nvfp4": 4.5}[format], abs=1e-3)


@pytest.mark.parametrize(
    ("format", "relative"), [("bf16", 2.74e-6), ("fp8", 7.0e-4), ("mxfp4", 1.39e-2), ("nvfp4", 9.06e-3)]
)
def test_error_on_gaussian_weights(format: WeightFormat, relative: float) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.025
    error = (quantise(weight, format).dequantise() - weight).square().mean() / weight.square().mean()
    assert error == pytest.approx(relative, rel=0.02)


@each_format
@settings(max_examples=40, deadline=None)
@given(weight=matrices())
def test_error_is_bounded(format: WeightFormat, weight: torch.Tensor) -> None:
    q = quantise(weight, format)
    error = (q.dequantise() - weight).abs()
    if format == "bf16":
        assert (error <= weight.abs() * 2**-8).all()
        return
    step = block_scales(q)
    # Half a step of the code: a share of the value, or of the smallest step near zero. Beyond the largest code, what is cut.
    match format:
        case "fp8":
            half, largest = torch.maximum(weight.abs() / 16, step * 2**-10), 448
        case _:
            half, largest = (
                torch.where(weight.abs() > 4 * step, step, step / 2).where(weight.abs() > 2 * step, step / 4),
                6,
            )
    assert (error <= torch.maximum(half, weight.abs() - largest * step) * 1.00001).all()


@settings(max_examples=40, deadline=None)
@given(weight=matrices())
def test_scales_fit_their_blocks(weight: torch.Tensor) -> None:
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
    nvfp4, mxfp4 = quantise(padded, "nvfp4"), quantise(padded, "mxfp4")
    assert nvfp4.scales is not None
    assert mxfp4.scales is not None
    assert nvfp4.tensor_scale is not None
    amax = padded.view(len(padded), -1, 16).abs().amax(-1)
    ideal = amax / 6 / nvfp4.tensor_scale
    normal = ideal >= 2**-6
    assert ((nvfp4.scales.float() / ideal)[normal] - 1).abs().le(1 / 16 + 1e-6).all()
    amax = padded.view(len(padded), -1, 32).abs().amax(-1)
    steps = (amax / torch.exp2(mxfp4.scales.float() - 127))[amax > 0]
    assert ((steps >= 4) & (steps < 8)).all()


@each_format
@settings(max_examples=40, deadline=None)
@given(weight=matrices())
def test_what_a_format_holds_stays_as_it_is(format: WeightFormat, weight: torch.Tensor) -> None:
    once = quantise(weight, format)
    again = quantise(once.dequantise(), format)
    # Below 2^-6 an E4M3 scale has fewer digits than it takes to find itself again from the block that it scaled.
    sure = torch.ones_like(weight, dtype=torch.bool)
    if format == "nvfp4":
        assert once.tensor_scale is not None
        sure = block_scales(once) / once.tensor_scale >= 2**-6
    torch.testing.assert_close(again.dequantise()[sure], once.dequantise()[sure], rtol=1e-6, atol=0)


@each_format
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_rounding_within_a_block_is_monotone(format: WeightFormat, seed: int) -> None:
    row = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)).sort().values
    assert (quantise(row, format).dequantise().diff() >= 0).all()


@each_format
def test_zeros_stay_zero(format: WeightFormat) -> None:
    assert not quantise(torch.zeros(130, 70), format).dequantise().any()


@each_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(format: WeightFormat, bad: float) -> None:
    weight = torch.ones(140, 40)
    weight[137, 39] = bad
    with pytest.raises(BadInput, match=r"up_proj\.weight holds NaN or infinity"):
        quantise(weight, format, name="up_proj.weight")


@each_format
def test_only_matrices(format: WeightFormat) -> None:
    for shape in ((4,), (2, 3, 4), (0, 4)):
        with pytest.raises(BadInput, match="matrix"):
            quantise(torch.zeros(shape), format)


@each_format
def test_dequantise_to_bfloat16(format: WeightFormat) -> None:
    q = quantise(torch.randn(40, 70), format)
    assert torch.equal(q.dequantise(torch.bfloat16), q.dequantise().bfloat16())


def test_the_weight_is_not_touched_and_not_shared() -> None:
    weight = torch.randn(16, 32).bfloat16()
    before = weight.clone()
    for format in FORMATS:
        quantise(weight, format).dequantise(torch.bfloat16).zero_()
    assert torch.equal(weight, before)
