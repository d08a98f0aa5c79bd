"""The buffer between sampling and training: which episode to sample next, which groups to train on next.

A state machine over the ledger without tasks, clocks or sockets of its own. Everything that matters lies in the ledger;
what is kept here (who samples which episode right now) may be lost: those episodes are simply handed out again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from farflung.config import Recipe
from farflung.core.episode import DropCause, Episode
from farflung.core.errors import BadInput
from farflung.run.ledger import Ledger

MIN_SURVIVORS = 2  # a group of one has no baseline


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to sample one episode. ``seed`` fixes its random numbers; ``min_version`` is the oldest policy allowed."""

    group: int
    index: int
    task: str
    seed: int
    attempt: int
    min_version: int


@dataclass(slots=True)
class _Group:
    """A group that is still being sampled: what became of each of its episodes."""

    task: str
    waiting: list[tuple[int, int]]  # (index, attempt) that nobody samples
    leased: dict[int, tuple[str, int]] = field(default_factory=dict)  # index -> (worker, attempt)
    finished: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)


class Buffer:
    """Hands out tickets while there is room, and batches once enough groups are ready."""

    def __init__(self, ledger: Ledger, recipe: Recipe, tasks: Sequence[str]) -> None:
        if not tasks:
            raise BadInput("there are no training tasks", where="tasks.train")
        self._ledger = ledger
        self._recipe = recipe
        self._tasks = list(tasks)
        self._order: dict[int, list[int]] = {}
        self._open: dict[int, _Group] = {}
        self._ready = len(ledger.groups("ready"))
        self.lost_in_a_row = 0  # groups of which too few episodes survived, since one was ready
        size = recipe.train.group_size
        for row in ledger.groups("open"):
            left = [(i, 0) for i in range(size) if i not in row.finished | row.dropped]
            self._open[row.id] = _Group(row.task, left, {}, set(row.finished), set(row.dropped))
        for group in list(self._open):
            self._settle(group)

    # Sampling

    def tickets(self, worker: str, most: int) -> list[Ticket]:
        """Up to ``most`` episodes to sample; an empty list while the buffer is full."""
        given: list[Ticket] = []
        while len(given) < most:
            group = next((g for g, state in self._open.items() if state.waiting), None)
            if group is None:
                if not self._room():
                    break
                group = self._open_group()
            state = self._open[group]
            index, attempt = state.waiting.pop(0)
            state.leased[index] = (worker, attempt)
            given.append(Ticket(group, index, state.task, self._seed(group, index, attempt), attempt, self.min_version))
        return given

    @property
    def min_version(self) -> int:
        """The oldest version that may still sample: the newest when synchronous, else as far back as the bound allows."""
        newest = self._ledger.last_update()
        if self._recipe.run.sync:
            return newest
        bound = self._recipe.run.max_staleness
        return 0 if bound is None else max(0, newest - bound)

    def finish(self, episode: Episode, raw: bytes) -> bool:
        """Record a finished episode. False, and nothing changes, if it was recorded or given up before."""
        state = self._open.get(episode.group)
        if state is None or episode.index in state.finished | state.dropped:
            return False
        if not 0 <= episode.index < self._recipe.train.group_size or episode.task != state.task:
            raise BadInput(f"group {episode.group} has no episode {episode.index} of {episode.task!r}", where="episode")
        self._ledger.add_episode(episode, raw)
        state.leased.pop(episode.index, None)
        state.waiting = [(i, a) for i, a in state.waiting if i != episode.index]
        state.finished.add(episode.index)
        self._settle(episode.group)
        return True

    def fail(self, group: int, index: int, attempt: int, cause: DropCause, detail: str) -> None:
        """Machinery failed: try the episode again, or give it up once it has been tried ``sandbox.retries`` more times."""
        state = self._open.get(group)
        if state is None or state.leased.get(index, ("", -1))[1] != attempt:
            return  # reported twice, or handed to somebody else since
        state.leased.pop(index)
        retried = attempt < self._recipe.sandbox.retries
        self._ledger.add_drop(group, index, attempt, cause, detail, retried=retried)
        if retried:
            state.waiting.append((index, attempt + 1))
        else:
            state.dropped.add(index)
            self._settle(group)

    def release(self, worker: str, but: Collection[tuple[int, int, int]] = ()) -> int:
        """The worker samples none of what it was given (``but`` these: group, index, attempt): it is handed out again.
        Returns how many episodes that were."""
        count = 0
        for group, state in self._open.items():
            again = [(i, n) for i, (holder, n) in state.leased.items() if holder == worker and (group, i, n) not in but]
            for index, _ in again:
                del state.leased[index]
            state.waiting = again + state.waiting
            count += len(again)
        return count

    # Training

    def batch(self, update: int) -> list[int] | None:
        """The groups of an update, the same ones each time it is asked for; None until enough groups are ready.

        The trainer may be one update ahead of its report: the one before, whose batch it has, is being published.
        """
        if taken := self._ledger.batch(update):
            return taken
        done = self._ledger.last_update()
        if update != done + 1 and not (update == done + 2 and self._ledger.batch(done + 1)):
            raise BadInput(f"update {update} cannot come after update {done}", where="batch")
        ready = self._ledger.groups("ready")
        bound = self._recipe.run.max_staleness
        if bound is not None:
            fresh = []
            for row in ready:
                oldest = self._ledger.oldest_version(row.id)
                if update - 1 - oldest > bound:
                    self._ledger.drop_group(row.id, DropCause.STALE, f"oldest token is of version {oldest}")
                else:
                    fresh.append(row)
            ready = fresh
        self._ready = len(ready)
        if len(ready) < self._recipe.train.groups:
            return None
        chosen = [row.id for row in ready[: self._recipe.train.groups]]
        self._ledger.take_batch(update, chosen)
        self._ready -= len(chosen)
        return chosen

    def counts(self) -> Mapping[str, int]:
        """What is where now: groups open and ready, episodes being sampled and waiting for a worker."""
        return {
            "open": len(self._open),
            "ready": self._ready,
            "sampling": sum(len(s.leased) for s in self._open.values()),
            "waiting": sum(len(s.waiting) for s in self._open.values()),
        }

    # Inside

    def _room(self) -> bool:
        """Whether another group may be opened."""
        per_batch = self._recipe.train.groups
        done = self._ledger.last_update()
        if self._recipe.run.sync:
            under_way = len(self._ledger.batch(done + 1))
            return under_way + self._ready + len(self._open) < per_batch
        taken = len(self._ledger.batch(done + 1)) + len(self._ledger.batch(done + 2))
        left = (self._recipe.run.updates - done) * per_batch - taken
        limit = math.ceil(self._recipe.run.buffer_batches * per_batch)
        return self._ready + len(self._open) < min(limit, left)

    def _open_group(self) -> int:
        group = self._ledger.next_group()
        task = self._task(group)
        self._ledger.open_group(group, task)
        self._open[group] = _Group(task, [(i, 0) for i in range(self._recipe.train.group_size)])
        return group

    def _settle(self, group: int) -> None:
        """A group whose every episode has come to something is ready, or dropped when too few survived."""
        state = self._open[group]
        if len(state.finished) + len(state.dropped) < self._recipe.train.group_size:
            return
        del self._open[group]
        if len(state.finished) < MIN_SURVIVORS:
            self._ledger.drop_group(group, DropCause.GROUP, f"{len(state.finished)} of its episodes survived")
            self.lost_in_a_row += 1
        else:
            self.lost_in_a_row = 0
            self._ledger.group_ready(group, self._ledger.oldest_version(group))
            self._ready += 1

    def _task(self, group: int) -> str:
        """Each pass over the tasks is a new order, fixed by the run's seed."""
        epoch, at = divmod(group, len(self._tasks))
        if epoch not in self._order:
            generator = np.random.default_rng([self._recipe.run.seed, epoch])
            self._order = {epoch: generator.permutation(len(self._tasks)).tolist()}
        return self._tasks[self._order[epoch][at]]

    def _seed(self, group: int, index: int, attempt: int) -> int:
        digest = hashlib.blake2b(f"{self._recipe.run.seed}/{group}/{index}/{attempt}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
