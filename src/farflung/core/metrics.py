"""What an update measured: over all its tokens, and the same for each pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Means over the action tokens of a batch (or of one pool's part of it). p is the trainer, q the sampler.

    kl: exact KL(q || p) over each recorded support. k3: its one-sample estimate at the sampled token,
    expm1(log p - log q) - (log p - log q). out_of_band: share of tokens with p/q outside [0.2, 5]. masked: share whose
    weight was zero. entropy: of p over the support, in nats. These five are means over the measured tokens, ``tokens`` of
    them: those of groups that were trained. staleness: trainer version minus the token's version, over every action token
    taken. samples: trajectories (a pool's: those of which it sampled most tokens); reward: mean over them.
    """

    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    kl: float = 0.0
    k3: float = 0.0
    out_of_band: float = 0.0
    masked: float = 0.0
    entropy: float = 0.0
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
