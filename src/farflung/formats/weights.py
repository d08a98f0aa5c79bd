"""Weight formats: a matrix becomes codes and scales as the format defines them, and codes and scales become numbers.

    bf16    8 significant bits, no scales
    fp8     E4M3 codes; one float32 scale, amax / 448, per 128 x 128 block
    mxfp4   E2M1 codes; one power of two (E8M0) per 32 inputs: OCP Microscaling Formats 1.0, section 6.3
    nvfp4   E2M1 codes; one E4M3 scale per 16 inputs and one float32 scale per matrix, amax / (448 * 6)

Codes round to nearest, ties to even. Edges that do not fill a block count as padded with zeros.

A float32 scale that follows its largest weight changes whenever that weight does, however little, and then all weights
that share it stand for new numbers: every step of training re-codes whole blocks, under nvfp4 whole matrices. So
``quantise(..., like=the form before)`` keeps such a scale for as long as its largest weight stays within the codes' range
and fills more than half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats import e2m1

FORMATS: tuple[WeightFormat, ...] = ("bf16", "fp8", "mxfp4", "nvfp4")
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""The smallest E4M3 above zero: no NVFP4 block scale is below it, so that none divides by zero."""
FP8_BLOCK = 128
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [out, in] in a format. ``rows``, ``columns`` are out and in.

    codes: bf16 [out, in] bfloat16; fp8 [out, in] float8_e4m3fn; mxfp4, nvfp4 [out, blocks * block / 2] uint8, two codes
    a byte. scales: fp8 [ceil(out / 128), ceil(in / 128)] float32; mxfp4 [out, blocks] uint8 (exponent + 127); nvfp4
    [out, blocks] float8_e4m3fn. tensor_scale: nvfp4, [] float32.
    """

    format: WeightFormat
    rows: int
    columns: int
    codes: Tensor
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that codes and scales stand for, [out, in]: products in float32, then rounded to ``dtype``."""
        match self.format:
            case "bf16":
                return self.codes.to(dtype)
            case "fp8":
                assert self.scales is not None
                blocks = self.scales.repeat_interleave(FP8_BLOCK, 1)[:, : self.columns]
                blocks = blocks.repeat_interleave(FP8_BLOCK, 0)[: self.rows]
                return self.codes.float().mul_(blocks).to(dtype)
            case "mxfp4":
                assert self.scales is not None
                return self._scale_blocks(torch.exp2(self.scales.float() - 127), MXFP4_BLOCK).to(dtype)
            case "nvfp4":
                assert self.scales is not None
                assert self.tensor_scale is not None
                return self._scale_blocks(self.scales.float() * self.tensor_scale, NVFP4_BLOCK).to(dtype)

    def at(self, rows: Tensor, columns: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What ``dequantise`` gives at [rows[i], columns[i]], bit for bit. rows, columns [n] int64 -> [n]."""
        if self.format == "bf16":
            return _pick(self.codes, rows, columns).to(dtype)
        assert self.scales is not None
        match self.format:
            case "fp8":
                scales = _pick(self.scales, rows // FP8_BLOCK, columns // FP8_BLOCK)
                return _pick(self.codes, rows, columns).float().mul_(scales).to(dtype)
            case "mxfp4":
                scales = torch.exp2(_pick(self.scales, rows, columns // MXFP4_BLOCK).float() - 127)
            case "nvfp4":
                assert self.tensor_scale is not None
                scales = _pick(self.scales, rows, columns // NVFP4_BLOCK).float() * self.tensor_scale
        return e2m1.decode_half(_pick(self.codes, rows, columns // 2), columns % 2).mul_(scales).to(dtype)

    def _scale_blocks(self, scales: Tensor, block: int) -> Tensor:
        values = e2m1.decode(self.codes).view(self.rows, -1, block)
        return values.mul_(scales.unsqueeze(-1)).flatten(-2)[:, : self.columns]

    @property
    def nbytes(self) -> int:
        """What codes and scales take in memory."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.tensor_scale) if t is not None)


def _pick(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """tensor[rows, columns], in a third of the time."""
    flat = tensor.reshape(-1)
    bits = flat.view(torch.uint8) if flat.dtype == E4M3 else flat
    return bits.index_select(0, rows * tensor.shape[1] + columns).view(flat.dtype)


def quantise(weight: Tensor, format: WeightFormat, *, name: str = "weight", like: Quantised | None = None) -> Quantised:
    """Codes and scales of a weight [out, in]. Raises BadInput when it is no matrix or holds NaN or infinity.

    like: the form that was published last. An fp8 block scale or an nvfp4 tensor scale s of it is used again while
    limit / 2 * s < amax <= limit * s, where limit is 448 or 448 * 6; the other scales are made anew, as are those of mxfp4,
    which move by powers of two alone.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise BadInput(f"{name} has shape {list(weight.shape)}; a matrix [out, in] is needed")
    rows, columns = weight.shape
    if like is not None and (like.format, like.rows, like.columns) != (format, rows, columns):
        raise BadInput(
            f"{name} is [{rows}, {columns}] in {format}, its form before was [{like.rows}, {like.columns}] in {like.format}"
        )
    if format == "bf16":
        codes = weight.to(torch.bfloat16, copy=True)
        refuse_nonfinite(codes.abs().amax(), name)
        return Quantised(format, rows, columns, codes)
    values = weight.float()
    match format:
        case "fp8":
            codes, scales = _fp8(values, name, None if like is None else like.scales)
            return Quantised(format, rows, columns, codes, scales)
        case "mxfp4":
            codes, scales = _mxfp4(values, name)
            return Quantised(format, rows, columns, codes, scales)
        case "nvfp4":
            codes, scales, tensor_scale = _nvfp4(values, name, None if like is None else like.tensor_scale)
            return Quantised(format, rows, columns, codes, scales, tensor_scale)


def refuse_nonfinite(values: Tensor, name: str) -> None:
    """Raises BadInput when any of ``values`` (a matrix's, or its largest magnitudes, which keep NaN) is not finite."""
    if not torch.isfinite(values).all():
        raise BadInput(f"{name} holds NaN or infinity", mend="the checkpoint is damaged or its training diverged")


def _scale(amax: Tensor, limit: float, before: Tensor | None) -> Tensor:
    """amax / limit, or the scale ``before`` where it still fits."""
    scales = amax / limit
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    if before is None:
        return scales
    return torch.where((limit / 2 * before < amax) & (amax <= limit * before), before, scales)


def _fp8(values: Tensor, name: str, before: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    amax = blocks.abs().amax((1, 3))
    refuse_nonfinite(amax, name)
    scales = _scale(amax, E4M3_MAX, before)
    codes = (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scales


def _blocks(values: Tensor, block: int, name: str) -> tuple[Tensor, Tensor]:
    """[out, in] -> blocks along the inputs [out, ceil(in / block), block] and their largest magnitudes."""
    blocks = F.pad(values, (0, -values.shape[1] % block)).view(len(values), -1, block)
    amax = blocks.abs().amax(-1)
    refuse_nonfinite(amax, name)
    return blocks, amax


def _mxfp4(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    blocks, amax = _blocks(values, MXFP4_BLOCK, name)
    # frexp's mantissa lies in [0.5, 1), so exponent - 1 is floor(log2(amax)); 6 = 1.5 * 2^2 has the exponent 2.
    exponent = (torch.frexp(amax).exponent - 1 - 2).clamp_(-127, 127)
    exponent = torch.where(amax == 0, -127, exponent)
    scaled = blocks / torch.exp2(exponent.float()).unsqueeze(-1)
    return e2m1.encode(scaled.flatten(-2)), (exponent + 127).to(torch.uint8)


def _nvfp4(values: Tensor, name: str, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    blocks, amax = _blocks(values, NVFP4_BLOCK, name)
    tensor_scale = _scale(amax.amax(), E4M3_MAX * e2m1.MAX, before)
    # A tensor scale that is kept is at least amax / (448 * 6), so that no block scale is cut at 448 for it.
    scales = (amax / e2m1.MAX / tensor_scale).clamp_(E4M3_TINY, E4M3_MAX).to(E4M3)
    scaled = blocks / (scales.float() * tensor_scale).unsqueeze(-1)
    return e2m1.encode(scaled.flatten(-2)), scales, tensor_scale
