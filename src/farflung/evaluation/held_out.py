"""Held-out evaluation: every task several times, from the whole vocabulary at temperature 1, failures told from faults.

A try that machinery spoilt is run again with the same random numbers, so that trying again does not favour short episodes;
after RERUNS it counts as missing and belongs to no mean.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farflung.agents.base import Sampler
from farflung.agents.dialect import Dialect
from farflung.agents.harness import Dropped, run_episode
from farflung.agents.transcript import Part, readable
from farflung.config import AgentConfig, EvalConfig, SandboxConfig
from farflung.core.episode import EndReason, Episode
from farflung.core.sampling import SamplingParams
from farflung.core.task import Task
from farflung.evaluation.pass_at_k import Estimate, Tally, estimate
from farflung.sandboxes.base import SandboxFactory

RERUNS = 3
WHOLE_VOCABULARY = SamplingParams(max_tokens=1, temperature=1.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, slots=True)
class Shown:
    """A whole episode for people to read: ``parts`` are (who, text), who being "policy" or "world"."""

    task: str
    end: str
    reward: float
    parts: tuple[Part, ...]
    patch: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What a policy can do. ``tallies`` is by task id; ``ends`` counts end reasons; ``reruns`` counts spoilt tries by cause;
    ``missing`` counts samples that stayed without a result; ``shown`` has at most one episode solved, failed, ended in
    format errors."""

    version: int
    tallies: Mapping[str, Tally]
    ends: Mapping[str, int]
    reruns: Mapping[str, int]
    missing: int
    turns: float
    tokens: float
    seconds: float
    shown: tuple[Shown, ...] = ()

    def pass_at(self, k: int) -> Estimate:
        """pass@k with its standard error over tasks; no result if no task has k samples."""
        return estimate(self.tallies, k)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with pass@1 and pass@4 worked out for people who read the file."""
        return asdict(self) | {"pass1": asdict(self.pass_at(1)), "pass4": asdict(self.pass_at(4))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> EvalResult:
        plain = {name: value for name, value in data.items() if name not in ("pass1", "pass4")}
        plain["tallies"] = {name: Tally(**tally) for name, tally in plain["tallies"].items()}
        plain["shown"] = tuple(
            Shown(**(shown | {"parts": tuple((who, text) for who, text in shown["parts"])})) for shown in plain["shown"]
        )
        return EvalResult(**plain)


async def evaluate(
    tasks: Sequence[Task],
    *,
    sampler: Sampler,
    factory: SandboxFactory,
    dialect: Dialect,
    agent: AgentConfig,
    sandbox: SandboxConfig,
    config: EvalConfig,
    seed: int = 0,
    version: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalResult:
    """Attempt the first ``config.tasks`` of ``tasks``, ``config.samples`` times each, ``config.concurrency`` at a time.

    ``version`` is the least that samplers may serve. ``progress`` hears how many of how many samples are done. Raises
    BadInput when the sampler can never serve the model as it is configured.
    """
    chosen = tasks[: config.tasks]
    jobs = iter([(task, number) for task in chosen for number in range(config.samples)])
    total = len(chosen) * config.samples
    began = time.monotonic()
    record = _Record(dialect, {task.id: task for task in chosen})
    done = 0

    async def attempt(task: Task, number: int) -> Episode | None:
        for _ in range(1 + RERUNS):
            try:
                return await run_episode(
                    task,
                    sampler=sampler,
                    factory=factory,
                    dialect=dialect,
                    agent=agent,
                    sandbox=sandbox,
                    params=WHOLE_VOCABULARY,
                    session=f"eval-{uuid.uuid4().hex}",
                    index=number,
                    seed=_seed(seed, task.id, number),
                    min_version=version,
                )
            except Dropped as dropped:
                record.reruns[dropped.cause] += 1
        return None

    async def work() -> None:
        nonlocal done
        for task, number in jobs:
            record.add(await attempt(task, number))
            done += 1
            progress(done, total)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(config.concurrency, total)):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return record.result(version, time.monotonic() - began)


class _Record:
    """Adds up episodes as they come."""

    def __init__(self, dialect: Dialect, tasks: Mapping[str, Task]) -> None:
        self._dialect = dialect
        self._samples: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()
        self._tasks = tasks
        self._ends: Counter[str] = Counter()
        self._shown: dict[str, Shown] = {}
        self._missing = 0
        self._turns = 0
        self._tokens = 0
        self.reruns: Counter[str] = Counter()

    def add(self, episode: Episode | None) -> None:
        """None is a sample that stayed without a result."""
        if episode is None:
            self._missing += 1
            return
        self._samples[episode.task] += 1
        self._solved[episode.task] += episode.reward == 1.0
        self._ends[episode.end] += 1
        self._turns += episode.turns
        self._tokens += len(episode.trajectory.ids)
        kind = "solved" if episode.reward == 1.0 else "failed"
        kind = "format_error" if episode.end is EndReason.FORMAT_ERROR else kind
        if kind not in self._shown:
            parts = readable(episode.trajectory, self._dialect.decode)
            self._shown[kind] = Shown(episode.task, episode.end, episode.reward, parts, episode.patch, episode.detail)

    def result(self, version: int, seconds: float) -> EvalResult:
        count = max(1, self._samples.total())
        return EvalResult(
            version=version,
            tallies={name: Tally(self._samples[name], self._solved[name]) for name in self._tasks},
            ends=dict(self._ends),
            reruns=dict(self.reruns),
            missing=self._missing,
            turns=self._turns / count,
            tokens=self._tokens / count,
            seconds=seconds,
            shown=tuple(self._shown[kind] for kind in ("solved", "failed", "format_error") if kind in self._shown),
        )


def _seed(seed: int, task: str, number: int) -> int:
    """The same for every policy, so that differences between two of them are less noisy."""
    digest = hashlib.blake2b(f"eval/{seed}/{task}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
