"""A transcript: token ids that only grow, each marked as sampled or told, with all that is known of the sampled ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from farflung.core.episode import Trajectory
from farflung.core.errors import Corrupt
from farflung.core.sampling import Completion, Source
from farflung.core.supports import Int32, Supports

Part = tuple[str, str]


@dataclass(slots=True)
class Transcript:
    """Starts with the opening's ids; replies and what is told after them are added in turn."""

    opening: Int32
    _ids: list[Int32] = field(init=False)
    _sampled: list[bool] = field(init=False)
    _completions: list[Completion] = field(init=False, default_factory=list)
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        self._ids, self._sampled, self._length = [self.opening], [False], len(self.opening)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> Int32:
        """All ids so far, [n] int32."""
        return np.concatenate(self._ids).astype(np.int32)

    def sampled(self, completion: Completion) -> None:
        """Add a reply exactly as it was sampled."""
        self._completions.append(completion)
        self._add(completion.ids, True)

    def told(self, ids: Int32) -> None:
        """Add what follows a reply: an observation or a correction."""
        self._add(ids, False)

    def trajectory(self, temperature: float) -> Trajectory:
        """Everything as arrays. Raises Corrupt if samplers disagreed about recording supports."""
        replies = self._completions
        if len({reply.supports is None for reply in replies}) > 1:
            raise Corrupt("some replies came with candidates and some without", where="transcript")
        sources: dict[Source, int] = {}
        numbers = [sources.setdefault(reply.source, len(sources)) for reply in replies]
        supports = [reply.supports for reply in replies if reply.supports is not None]
        lengths = [len(reply.ids) for reply in replies]
        return Trajectory(
            ids=self.ids,
            action=np.repeat(self._sampled, [len(part) for part in self._ids]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(reply.logprobs for reply in replies)]),
            versions=np.concatenate([np.zeros(0, np.int32), *(reply.versions for reply in replies)]),
            source=np.repeat(np.array(numbers, np.int16), lengths),
            sources=tuple(sources),
            supports=Supports.concat(supports) if supports else None,
            temperature=temperature,
        )

    def _add(self, ids: Int32, sampled: bool) -> None:
        self._ids.append(ids)
        self._sampled.append(sampled)
        self._length += len(ids)


def readable(trajectory: Trajectory, decode: Callable[[Int32], str]) -> tuple[Part, ...]:
    """A transcript for people: (who, text) in order, who being "policy" for what was sampled and "world" for the rest."""
    turns = np.flatnonzero(np.diff(trajectory.action)) + 1
    edges = [0, *turns.tolist(), len(trajectory.ids)]
    spans = [(low, high) for low, high in itertools.pairwise(edges) if high > low]
    return tuple(
        ("policy" if trajectory.action[low] else "world", decode(trajectory.ids[low:high])) for low, high in spans
    )
