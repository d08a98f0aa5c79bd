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


@st.composite
def nudged(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and what training made of it: its rows grew, shrank or moved a little, and it is all or in part another size."""
    before = draw(matrices())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    moved = before * (1 + 0.01 * torch.randn(before.shape, generator=generator))
    factors = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.999, 1.0, 1.7]), min_size=1, max_size=5)))
    return before, moved * factors[torch.randint(len(factors), (len(before), 1), generator=generator)]


@each_format
@settings(max_examples=40, deadline=None)
@given(weights=nudged(), kept=st.booleans())
def test_error_is_bounded(format: WeightFormat, weights: tuple[torch.Tensor, torch.Tensor], kept: bool) -> None:
    before, weight = weights
    q = quantise(weight, format, like=quantise(before, format) if kept else None)
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


def scales_in_use(q: Quantised) -> torch.Tensor:
    """The float32 scales: of blocks, or of the matrix."""
    scales = q.tensor_scale if q.format == "nvfp4" else q.scales
    assert scales is not None
    return scales


def largest(weight: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """amax of what shares a float32 scale."""
    if format == "nvfp4":
        return weight.abs().amax()
    return torch.stack([torch.stack([b.abs().amax() for b in r.split(128, 1)]) for r in weight.split(128, 0)])


@pytest.mark.parametrize(("format", "limit"), [("fp8", 448.0), ("nvfp4", 448.0 * 6)])
@settings(max_examples=60, deadline=None)
@given(weights=nudged())
def test_a_scale_is_kept_exactly_while_it_fits(
    format: WeightFormat, limit: float, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    before, weight = weights
    old, fresh = quantise(before, format), quantise(weight, format)
    q = quantise(weight, format, like=old)
    amax, s = largest(weight, format), scales_in_use(old)
    fits = (limit / 2 * s < amax) & (amax <= limit * s)
    assert torch.equal(scales_in_use(q), torch.where(fits, s, scales_in_use(fresh)))
    # The same scale, the same form: what depends on it is made as it always is.
    if torch.equal(scales_in_use(q), scales_in_use(fresh)):
        assert same(q, fresh)
    assert same(quantise(weight, format, like=q), q)
    if format == "nvfp4":
        assert q.scales is not None
        assert (largest_of_blocks(weight) / 6 / scales_in_use(q) <= 448 * (1 + 2**-22)).all()


def largest_of_blocks(weight: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 16))
    return padded.view(len(padded), -1, 16).abs().amax(-1)


def same(a: Quantised, b: Quantised) -> bool:
    """The same codes and scales, bit for bit."""
    parts = [(getattr(a, name), getattr(b, name)) for name in ("codes", "scales", "tensor_scale")]
    return all(
        x is y is None or torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)) for x, y in parts
    )


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
@settings(max_examples=20, deadline=None)
@given(weights=nudged())
def test_formats_without_float32_scales_keep_nothing(
    format: WeightFormat, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    before, weight = weights
    assert same(quantise(weight, format, like=quantise(before, format)), quantise(weight, format))


@pytest.mark.parametrize(("format", "limit"), [("fp8", 448.0), ("nvfp4", 448.0 * 6)])
def test_kept_scales_by_hand(format: WeightFormat, limit: float) -> None:
    old = quantise(torch.full((1, 16), limit), format)
    assert scales_in_use(old).flatten().tolist() == [1.0]
    for amax, scale in ((limit, 1), (limit / 2, 0.5), (limit / 2 + 1, 1), (limit + 1, (limit + 1) / limit), (0, 1)):
        weight = torch.full((1, 16), float(amax))
        expected = torch.tensor(float(scale))
        assert scales_in_use(quantise(weight, format, like=old)).flatten().tolist() == [expected.item()], amax


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_weight_that_moves_recodes_no_other(format: WeightFormat) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    old = quantise(weight, format)
    top = int(weight.abs().argmax())
    weight.view(-1)[top] *= 0.999
    kept, fresh = quantise(weight, format, like=old), quantise(weight, format)
    elsewhere = torch.arange(64 * 64) // 16 != top // 16
    assert torch.equal(kept.dequantise().view(-1)[elsewhere], old.dequantise().view(-1)[elsewhere])
    assert not torch.equal(fresh.dequantise().view(-1)[elsewhere], old.dequantise().view(-1)[elsewhere])


def test_a_form_of_another_matrix_is_refused() -> None:
    weight = torch.ones(4, 32)
    for other in (quantise(weight, "fp8"), quantise(torch.ones(4, 48), "nvfp4")):
        with pytest.raises(BadInput, match=r"up is \[4, 32\] in nvfp4, its form before was \[4, "):
            quantise(weight, "nvfp4", name="up", like=other)


@each_format
@settings(max_examples=40, deadline=None)
@given(weight=matrices(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31))
def test_single_numbers_are_those_of_the_whole(
    format: WeightFormat, weight: torch.Tensor, dtype: torch.dtype, seed: int
) -> None:
    q = quantise(weight, format)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(n, (50,), generator=generator) for n in weight.shape)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(q.at(rows, columns, dtype).view(bits), q.dequantise(dtype)[rows, columns].view(bits))


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
