"""Importance weights w = f(p/q): one function for sampled tokens, candidates and a modelled tail alike.

Every weight also gives the mass m = q w, worked out from log-probabilities: where f(r) = r the mass is exactly p, and no
ratio is ever formed for it that could overflow. All of them are without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflung.core.errors import BadInput


class Weight(Protocol):
    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Weight w = f(p/q) and mass m = q w, both shaped like the inputs and of their type.

        log_p, log_q: log-probabilities (base e) of the same tokens; advantages: those of the tokens' rows, of which some
        rules use the sign.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """f = 1: no correction. The mass is q."""

    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(log_p), log_q.exp()


@dataclass(frozen=True, slots=True)
class Clipped:
    """f(r) = min(max(r, low), high): every token keeps a weight, at most ``high``.

    - (0, inf): importance sampling, f(r) = r.
    - (0, C): truncated importance sampling, TIS (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
      brings you off-policy RL training": min(p/q, C) with C about 2).
    - (low, high): the clipped importance weight of CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        low, high = _log(self.low), _log(self.high)
        mass = torch.minimum(torch.maximum(log_p, log_q + low), log_q + high).exp()
        return (log_p - log_q).clamp(low, high).exp(), mass


@dataclass(frozen=True, slots=True)
class Masked:
    """f(r) = r where low <= r <= high, ends included, else 0.

    Token-level masked importance sampling, MIS (Liu, Li et al. 2025, "When speed kills stability"), which with [0.5, 5]
    is the mask of IcePop (Ling Team, arXiv 2510.18855). With ``ratio`` false f is 1 inside: the mask alone.
    """

    low: float
    high: float
    ratio: bool = True

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        kept = (log_p >= log_q + _log(self.low)) & (log_p <= log_q + _log(self.high))
        return _ratio_where(kept, log_p, log_q) if self.ratio else (kept.to(log_p.dtype), _where(kept, log_q.exp()))


@dataclass(frozen=True, slots=True)
class PpoClip:
    """f(r) = r, but 0 where a clipped objective has no gradient: r > high with A > 0, or r < low with A < 0.

    PPO (Schulman et al., arXiv 1707.06347, equation 7), with bounds of their own above and below as in DAPO's Clip-Higher
    (arXiv 2503.14476, section 3.1): [1 - 0.2, 1 + 0.28]. Here r is p/q against the sampler, not an old trainer policy.
    """

    low: float = 0.8
    high: float = 1.28

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.where(advantages > 0, log_p <= log_q + _log(self.high), log_p >= log_q + _log(self.low))
        return _ratio_where(kept, log_p, log_q)


@dataclass(frozen=True, slots=True)
class DifferenceMask:
    """f(r) = r, but 0 where p - q > delta with A > 0, or q - p > delta with A < 0.

    DPPO with the binary total variation as its divergence (arXiv 2602.04879): a rare token may change by a large ratio,
    a likely one may not.
    """

    delta: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise BadInput(
                f"the bound on the difference of probabilities is {self.delta}, not in (0, 1)", where="weight"
            )

    def __call__(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        gain = log_p.exp() - log_q.exp()
        return _ratio_where(torch.where(advantages > 0, gain, -gain) <= self.delta, log_p, log_q)


WEIGHTS = ("none", "is", "tis", "mis", "icepop", "mask", "cispo", "ppo", "dppo")


def make_weight(
    name: str,
    band: tuple[float, float] = (0.5, 5.0),
    *,
    cap: float = 2.0,
    clip_range: tuple[float, float] = (0.8, 1.28),
    delta: float = 0.2,
) -> Weight:
    """The weight that a recipe names, one of WEIGHTS.

    ``band`` is for mis, icepop (the same function) and mask; ``cap`` for tis; ``clip_range`` for cispo and ppo; ``delta``
    for dppo. Raises BadInput for an unknown name or a range that is none.
    """
    match name:
        case "none":
            return Plain()
        case "is":
            return Clipped(0.0, math.inf)
        case "tis":
            return Clipped(0.0, cap)
        case "mis" | "icepop":
            return Masked(*band)
        case "mask":
            return Masked(*band, ratio=False)
        case "cispo":
            return Clipped(*clip_range)
        case "ppo":
            return PpoClip(*clip_range)
        case "dppo":
            return DifferenceMask(delta)
    raise BadInput(f"unknown weight {name!r}", where="weight", mend=f"valid weights: {', '.join(WEIGHTS)}")


def _ratio_where(kept: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    return _where(kept, (log_p - log_q).exp()), _where(kept, log_p.exp())


def _where(kept: Tensor, values: Tensor) -> Tensor:
    return torch.where(kept, values, 0.0)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise BadInput(f"the band is [{low}, {high}]; it needs 0 <= low < high", where="weight")
