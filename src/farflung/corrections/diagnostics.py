"""What the update's own forward pass says about sampler and trainer, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BAND = (0.2, 5.0)
"""Ratios p/q outside this band count as out of band, whatever band the weight uses."""

MAX_LOG_RATIO = 20.0
"""k3 grows like p/q; log-ratios are cut here so that one token cannot make a mean infinite."""


@dataclass(frozen=True, slots=True)
class TokenDiagnostics:
    """One entry per action token; means over ``measured`` ones are what an update reports.

    measured [N] bool: tokens with an advantage (the others are never computed). kl [N]: KL(q || p) over the support, in
    nats; k3 [N]: its one-sample estimate at the sampled token (Schulman 2020); entropy [N]: of p over the support;
    out_of_band [N] bool: p/q at the sampled token outside BAND; masked [N] bool: the sampled token's weight is zero.
    """

    measured: Tensor
    kl: Tensor
    k3: Tensor
    entropy: Tensor
    out_of_band: Tensor
    masked: Tensor

    @staticmethod
    def blank(measured: Tensor, dtype: torch.dtype) -> TokenDiagnostics:
        """All zero, which is exact for singletons: p = q = 1 there."""
        zero = torch.zeros(len(measured), dtype=dtype, device=measured.device)
        false = torch.zeros_like(measured)
        return TokenDiagnostics(measured, zero, zero.clone(), zero.clone(), false, false.clone())


def sampled_diagnostics(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """k3 and out-of-band of the sampled tokens from their log-probabilities, [N] each."""
    log_ratio = log_p - log_q
    outside = (log_ratio < math.log(BAND[0])) | (log_ratio > math.log(BAND[1]))
    clamped = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped, outside
