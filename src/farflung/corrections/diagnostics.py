"""What the update's own forward pass says about sampler (q) and trainer (p), token by token and as means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import linear

from farflung.corrections.centering import Coefficients
from farflung.corrections.rows import wide
from farflung.corrections.supports import Supports

BAND = (0.2, 5.0)
"""Ratios p/q outside this band count as out of band, whatever band the weight uses."""

TIGHT_BAND = (0.5, 5.0)
"""The same for the band that masked importance sampling uses by default."""

MAX_LOG_RATIO = 20.0
"""p/q, its square and k3 are cut here so that one token cannot make a mean infinite."""


@dataclass(frozen=True, slots=True)
class TokenDiagnostics:
    """One entry per action token, all [N]. What an update reports are means over the ``measured`` ones.

    measured bool: tokens with an advantage (the others are never computed). log_ratio: log p - log q of the sampled token.
    kl: KL(q || p) in nats over the support, exact with "top_p"; with "top_k" the tail counts as one candidate; without a
    record k3 stands in. entropy: of p over what log p is normalised over (the support, or the vocabulary).
    weight: w of the sampled token; factor: what the guards multiplied its update with.
    drift: ||m - M p||_1, the expected weighted score in the logits, which centering takes away (or would).
    candidates int64: how many were recorded. log_rho: log of q's tail over p's, 0 = consistent. head_q: mass of q on the
    candidates. Of p over the whole vocabulary, NaN where no full logits were at hand: head_p: its mass on the candidates;
    vocabulary_entropy.
    """

    measured: Tensor
    log_ratio: Tensor
    kl: Tensor
    entropy: Tensor
    weight: Tensor
    factor: Tensor
    drift: Tensor
    candidates: Tensor
    log_rho: Tensor
    head_q: Tensor
    head_p: Tensor
    vocabulary_entropy: Tensor

    @staticmethod
    def blank(measured: Tensor, candidates: Tensor, weight: Tensor) -> TokenDiagnostics:
        """What is true of a singleton: p = q = 1, and ``weight`` [N] is f(1)."""

        def full(value: float) -> Tensor:
            return torch.full_like(weight, value)

        return TokenDiagnostics(
            measured, full(0), full(0), full(0), weight, full(1), full(0), candidates, full(0), full(1), full(math.nan),
            full(math.nan),
        )  # fmt: skip

    def fill(
        self,
        live: Tensor,
        log_p: Tensor,
        supports: Supports,
        log_p_sampled: Tensor,
        log_q_sampled: Tensor,
        found: Coefficients,
        entropy: Tensor,
    ) -> None:
        """Set the entries ``live`` from the log-probabilities, coefficients and entropies of those rows."""
        log_ratio = log_p_sampled - log_q_sampled
        log_q, p = supports.logprobs.to(log_p.dtype), log_p.exp()
        kl = supports.sum(log_q.exp() * (log_q - log_p))
        rest = (1 - found.head_p).clamp(min=0)
        if supports.kind == "top_k":
            kl = torch.where(supports.sizes == 0, k3(log_ratio), kl + (1 - found.head_q).clamp(min=0) * found.log_rho)
            self.head_p[live] = found.head_p
            self.vocabulary_entropy[live] = entropy
        self.log_ratio[live] = log_ratio
        self.kl[live] = kl
        self.entropy[live] = entropy
        self.weight[live] = found.sampled
        self.drift[live] = (
            supports.sum((found.candidates - found.total[supports.rows] * p).abs()) + found.total.abs() * rest
        )
        self.log_rho[live] = found.log_rho
        self.head_q[live] = found.head_q

    @staticmethod
    def cat(parts: Sequence[TokenDiagnostics]) -> TokenDiagnostics:
        """The tokens of several parts as one, on the CPU. At least one part."""
        return TokenDiagnostics(
            **{f.name: torch.cat([getattr(p, f.name).cpu() for p in parts]) for f in fields(TokenDiagnostics)}
        )

    def select(self, chosen: Tensor) -> TokenDiagnostics:
        """The tokens where ``chosen`` [N] is true (or at its indices)."""
        return TokenDiagnostics(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @property
    def k3(self) -> Tensor:
        """One-sample estimate of KL(q || p), never negative (Schulman 2020, "Approximating KL divergence")."""
        return k3(self.log_ratio)

    @property
    def ratio(self) -> Tensor:
        """p/q of the sampled token, cut at exp(20)."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    @property
    def masked(self) -> Tensor:
        """Whether the sampled token's weight is zero, [N] bool."""
        return self.weight == 0

    def outside(self, band: tuple[float, float]) -> Tensor:
        """Whether the sampled token's p/q lies outside the band, [N] bool."""
        return (self.log_ratio < math.log(band[0])) | (self.log_ratio > math.log(band[1]))

    def summary(self) -> dict[str, float | None]:
        """Means over the measured tokens, by name; empty without any. None where no token has the value.

        k1, k2, k3: estimates of KL(q || p) at the sampled token; k1 = -log_ratio has no bias and may be negative,
        k2 = log_ratio^2 / 2 is biased and robust. ratio: mean of p/q, which must be about 1 if sampler and trainer share
        their supports. ess: effective sample size of the ratios over the number of tokens, (sum r)^2 / (N sum r^2).
        out_of_band and out_of_tight_band: shares outside [0.2, 5] and [0.5, 5]. singletons: share with one candidate.
        """
        kept = self.select(self.measured)
        if not len(kept.log_ratio):
            return {}
        log_ratio, ratio = kept.log_ratio.double(), kept.ratio.double()
        means: dict[str, Tensor] = {
            "kl": kept.kl,
            "k1": -log_ratio,
            "k2": log_ratio.square() / 2,
            "k3": kept.k3,
            "ratio": ratio,
            "out_of_band": kept.outside(BAND),
            "out_of_tight_band": kept.outside(TIGHT_BAND),
            "masked": kept.masked,
            "dropped": kept.factor == 0,
            "drift": kept.drift,
            "rho": kept.log_rho.clamp(max=MAX_LOG_RATIO).exp(),
            "head_q": kept.head_q,
            "singletons": kept.candidates == 1,
            "entropy": kept.entropy,
        }
        counts = kept.candidates.sort().values.tolist()
        last = len(counts) - 1
        return {
            **{name: float(values.double().mean()) for name, values in means.items()},
            "ess": float(ratio.mean() ** 2 / ratio.square().mean()),
            "candidates_p50": counts[last // 2],
            "candidates_p99": counts[last * 99 // 100],
            "candidates_max": counts[last],
            "head_p": _known_mean(kept.head_p),
            "vocabulary_entropy": _known_mean(kept.vocabulary_entropy),
        }


def k3(log_ratio: Tensor) -> Tensor:
    """expm1(l) - l with l = log p - log q of a token drawn from q, cut at l = 20."""
    cut = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(cut) - cut


@torch.no_grad()
def probe(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    supports: Supports,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Entropy of p over the whole vocabulary and its mass on the candidates, [rows] each, for a few rows.

    hidden [rows, d], head [V, d], bias [V]; makes logits [rows, V].
    """
    dtype = wide(hidden, head)
    logits = linear(hidden.to(dtype), head.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1), supports.sum(log_p[supports.rows, supports.ids].exp())


def _known_mean(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.double().mean()) if len(known) else None
