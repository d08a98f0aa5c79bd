"""An episode: one attempt at one task, as tokens that only ever grow, with its end, its grade and its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.core import frame
from farflung.core.errors import Corrupt
from farflung.core.sampling import Source
from farflung.core.supports import Float32, Int32, Supports, check_rows


class EndReason(StrEnum):
    """Why an episode ended by itself. Each is a result of the policy and has a reward; failed machinery has none."""

    SUBMITTED = "submitted"
    FORMAT_ERROR = "format_error"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    COMMAND_TIME = "command_time"
    COMMAND_OUTPUT = "command_output"
    EPISODE_TIME = "episode_time"
    SANDBOX_LIMIT = "sandbox_limit"


class DropCause(StrEnum):
    """Why finished or unfinished work was thrown away. Everything that is dropped is counted under one of these."""

    SANDBOX = "sandbox"
    GRADER = "grader"
    SAMPLER = "sampler"
    GROUP = "group"
    STALE = "stale"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """ids [T] int32 and action [T] bool (true where the policy sampled the token); the rest has one entry per action.

    logprobs [A] float32 under the sampler, versions [A] int32, source [A] int16 into ``sources``, supports of A rows.
    """

    ids: Int32
    action: npt.NDArray[np.bool_]
    logprobs: Float32
    versions: Int32
    source: npt.NDArray[np.int16]
    sources: tuple[Source, ...]
    supports: Supports | None
    temperature: float = 1.0

    def check(self, where: str = "trajectory") -> None:
        """Raises Corrupt unless the arrays fit each other and every support holds its sampled token."""
        check_rows(
            where,
            ids=(self.ids, np.int32),
            action=(self.action, np.bool_),
            logprobs=(self.logprobs, np.float32),
            versions=(self.versions, np.int32),
            source=(self.source, np.int16),
        )
        actions = int(self.action.sum())
        lengths = (len(self.logprobs), len(self.versions), len(self.source))
        if len(self.ids) != len(self.action) or set(lengths) != {actions}:
            raise Corrupt(
                f"{len(self.ids)} ids, {actions} actions, {lengths} log-probs, versions, sources", where=where
            )
        if actions and (self.source.min() < 0 or self.source.max() >= len(self.sources)):
            raise Corrupt(f"a token names source {self.source.max()} of {len(self.sources)}", where=where)
        if self.action[:1].any():
            raise Corrupt("the first token is marked as sampled", where=where)
        if not np.isfinite(self.logprobs).all():
            raise Corrupt("a sampled token has no finite log-probability", where=where)
        if self.supports is not None:
            self.supports.check(self.ids[self.action], self.logprobs, where=where)


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished attempt. ``key`` (group, index) names it once and for all: a second report of the same key is the same episode.

    ``reward`` is 0 or 1; ``patch`` the submitted diff; ``seconds`` wall time by part (sampling, tools, grading, total);
    ``turns`` counts replies; ``attempt`` counts how often machinery made it start again.
    """

    group: int
    index: int
    task: str
    end: EndReason
    reward: float
    turns: int
    trajectory: Trajectory
    patch: str = ""
    detail: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    format_errors: int = 0
    attempt: int = 0

    def encode(self) -> bytes:
        t = self.trajectory
        data: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "group",
                "index",
                "task",
                "end",
                "reward",
                "turns",
                "patch",
                "detail",
                "format_errors",
                "attempt",
            )
        }
        data |= {
            "seconds": dict(self.seconds),
            "sources": [asdict(s) for s in t.sources],
            "temperature": t.temperature,
        }
        arrays = {
            "ids": t.ids,
            "action": t.action,
            "logprobs": t.logprobs,
            "versions": t.versions,
            "source": t.source,
        }
        if t.supports is not None:
            arrays |= {
                "support_ids": t.supports.ids,
                "support_logprobs": t.supports.logprobs,
                "support_offsets": t.supports.offsets,
            }
        return frame.encode(data, arrays)

    @staticmethod
    def decode(raw: bytes, *, where: str = "episode") -> Episode:
        """Raises Corrupt; a decoded episode's trajectory has passed ``Trajectory.check``."""
        data, arrays = frame.decode(raw, where=where)
        try:
            supports = None
            if "support_ids" in arrays:
                supports = Supports(arrays["support_ids"], arrays["support_logprobs"], arrays["support_offsets"])
            sources = tuple(Source(**s) for s in data.pop("sources"))
            trajectory = Trajectory(
                arrays["ids"], arrays["action"], arrays["logprobs"], arrays["versions"], arrays["source"], sources, supports,
                float(data.pop("temperature")),
            )  # fmt: skip
            data["end"] = EndReason(data["end"])
            episode = Episode(trajectory=trajectory, **data)
            if wrong := [n for n in ("group", "index", "turns", "attempt") if type(data.get(n, 0)) is not int]:
                raise TypeError(f"{wrong[0]} is no whole number")
            if not isinstance(episode.task, str) or not 0 <= episode.reward <= 1:
                raise ValueError(f"task {episode.task!r:.100}, reward {episode.reward!r:.100}")
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"not an episode: {error!r}", where=where) from None
        trajectory.check(where)
        return episode
