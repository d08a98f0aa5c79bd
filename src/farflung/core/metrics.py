"""What an update measured: over all its tokens, and the same for each pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Means over the action tokens of a batch (or of one pool's part of it). p is the trainer, q the sampler.

    samples: trajectories (a pool's: those of which it sampled most tokens); reward: mean over them. staleness: trainer
    version minus the token's version, over every action token taken. All others are over the measured tokens, ``tokens``
    of them: those of groups that were trained.

    kl: exact KL(q || p) over each recorded support (k3 without one). At the sampled token, with l = log p - log q:
    k1 = -l, k2 = l^2 / 2, k3 = expm1(l) - l, its one-sample estimates; ratio: p/q, about 1 if sampler and trainer share
    their supports; ess: effective sample size of the ratios, as a share of the tokens; out_of_band and out_of_tight_band:
    shares of tokens with p/q outside [0.2, 5] and [0.5, 5]. masked: share whose weight was zero; dropped: share in
    trajectories that a sequence guard gave no weight. drift: ||m - M p||_1 of the expected weighted score, which centering
    takes away (or would). rho: mass of q beyond the recorded candidates over p's, 1 if they agree; head_q, head_p: mass of
    q and p on the candidates. candidates_*: quantiles of their number; singletons: share with one. entropy: of p over the
    support (over the vocabulary where none was recorded), in nats; vocabulary_entropy: over the vocabulary. head_p and
    vocabulary_entropy are over a sample of the tokens, None where none of them was in it.
    """

    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    kl: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    ratio: float = 1.0
    ess: float = 1.0
    out_of_band: float = 0.0
    out_of_tight_band: float = 0.0
    masked: float = 0.0
    dropped: float = 0.0
    drift: float = 0.0
    rho: float = 1.0
    head_q: float = 1.0
    head_p: float | None = None
    candidates_p50: float = 0.0
    candidates_p99: float = 0.0
    candidates_max: int = 0
    singletons: float = 0.0
    entropy: float = 0.0
    vocabulary_entropy: float | None = None
    staleness: float = 0.0
    staleness_max: int = 0


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """One optimiser step. ``all`` covers every group that was taken, ``pools`` splits it by where tokens came from.

    trained_groups had reward variance, skipped_groups had none and cost no compute; length is in tokens of the whole
    transcript; format_errors is the share of episodes that ended so; trained_tokens are the transcript tokens of trained
    episodes up to their last action, also those that a shared prefix saved; seconds are wall time by part.
    """

    update: int
    all: TokenStats
    pools: Mapping[str, TokenStats] = field(default_factory=dict)
    trained_groups: int = 0
    skipped_groups: int = 0
    grad_norm: float = 0.0
    lr: float = 0.0
    length: float = 0.0
    turns: float = 0.0
    format_errors: float = 0.0
    trained_tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> UpdateMetrics:
        known = {f.name for f in fields(UpdateMetrics)}
        plain = {k: v for k, v in data.items() if k in known}
        plain["all"] = TokenStats(**plain["all"])
        plain["pools"] = {name: TokenStats(**stats) for name, stats in plain["pools"].items()}
        return UpdateMetrics(**plain)
