"""Importance weights f(p/q), as one function that is applied to sampled tokens and candidates alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflung.core.errors import BadInput


class Weight(Protocol):
    def __call__(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Weight w = f(p/q) and mass q * w, both shaped like the inputs and without gradient."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """f = 1: the mass is q."""

    def __call__(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(log_p), log_q.exp()


@dataclass(frozen=True, slots=True)
class Masked:
    """f(r) = r where low <= r <= high, else 0 (masked importance sampling); Masked(0, inf) is plain importance sampling.

    The band is tested on log-probabilities and the mass inside it is exactly p, so no ratio can overflow into it.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise BadInput(f"the band is [{self.low}, {self.high}]; it needs 0 <= low < high", where="weight")

    def __call__(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        low = math.log(self.low) if self.low > 0 else -math.inf
        high = math.log(self.high) if self.high < math.inf else math.inf
        kept = (log_p >= log_q + low) & (log_p <= log_q + high)
        zero = torch.zeros_like(log_p)
        return torch.where(kept, (log_p - log_q).exp(), zero), torch.where(kept, log_p.exp(), zero)


def make_weight(name: str, band: tuple[float, float] = (0.5, 5.0)) -> Weight:
    """The weight that a recipe names: "none" or "mis"."""
    match name:
        case "none":
            return Plain()
        case "mis":
            return Masked(*band)
    raise BadInput(f"unknown weight {name!r}", where="weight", mend="valid weights: none, mis")
