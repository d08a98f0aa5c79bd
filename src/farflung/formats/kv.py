"""Rounding of keys and values as they enter the cache.

bf16 rounds to bfloat16. fp8 rounds to E4M3 with one scale per token and head: the smallest power of two that keeps amax within 448, so
that code times scale is exact in bfloat16 and float32 alike, and a cache entry never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farflung.core.sampling import KvFormat
from farflung.formats.weights import E4M3, E4M3_MAX

KV_FORMATS: tuple[KvFormat, ...] = ("bf16", "fp8")


def fp8_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., head_dim] -> E4M3 codes of the same shape and the scales' exponents [..., 1] int32."""
    values = values.float()
    mantissa, exponent = torch.frexp(values.abs().amax(-1, keepdim=True))
    # 448 = 0.875 * 2^9, and the mantissa lies in [0.5, 1): the smallest exponent that keeps amax within 448.
    exponents = exponent - 9 + (mantissa > 0.875)
    return torch.ldexp(values, -exponents).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), exponents


def _fp8(values: Tensor) -> Tensor:
    codes, exponents = fp8_codes(values)
    return torch.ldexp(codes.float(), exponents).to(values.dtype)


def _bf16(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


def rounding(format: KvFormat) -> Callable[[Tensor], Tensor]:
    """The function [..., head_dim] -> the same shape and dtype, holding only numbers that the format has."""
    return _fp8 if format == "fp8" else _bf16
