"""An engine that behaves like a remote accelerator: it answers at a set rate and leaves this machine's cores free.

For measurements of the loop around the sampler. What it says is valid and plausible: the turns of recorded episodes with
their own candidates where it has some, else uniform draws from a few candidates with their true log-probabilities.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING

import numpy as np

from farflung.core.episode import Trajectory
from farflung.core.errors import BadInput
from farflung.core.sampling import Completion, GenerateRequest, SamplingParams, Source, uniforms
from farflung.core.supports import Float32, Int32, Supports
from farflung.engines.base import EngineError, EngineStats, Positions, TooLong

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn: ids [n] int32, logprobs [n] float32, supports of n rows or None."""

    ids: Int32
    logprobs: Float32
    supports: Supports | None

    def first(self, count: int) -> Reply:
        supports = None if self.supports is None else self.supports.rows(0, count)
        return Reply(self.ids[:count], self.logprobs[:count], supports)


@dataclass(slots=True)
class Recording:
    """Turns of finished episodes, found again by the tokens before them.

    A context that was recorded gets one of the turns that followed it; as a deterministic tool then answers as it did,
    the whole episode goes as recorded, to the same reward. Any other context gets any of the turns.
    """

    turns: list[Reply] = field(default_factory=list)
    after: dict[bytes, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(trajectories: Iterable[Trajectory]) -> Recording:
        """Every run of sampled tokens in ``trajectories`` is one turn."""
        recording = Recording()
        for t in trajectories:
            edges = np.flatnonzero(np.diff(np.concatenate(([False], t.action, [False])).astype(np.int8)))
            at = 0
            for start, stop in edges.reshape(-1, 2):
                count = int(stop - start)
                supports = None if t.supports is None else t.supports.rows(at, at + count)
                recording.add(t.ids[:start], Reply(t.ids[start:stop], t.logprobs[at : at + count], supports))
                at += count
        return recording

    def add(self, context: Int32, reply: Reply) -> None:
        self.after.setdefault(_digest(context), []).append(len(self.turns))
        self.turns.append(reply)

    def choose(self, context: Int32, u: float) -> Reply:
        """One of the turns that followed ``context``, by u in [0, 1)."""
        rows = self.after.get(_digest(context))
        return self.turns[rows[int(u * len(rows))] if rows else int(u * len(self.turns))]


class PacedEngine:
    """Engine adapter: ``tokens_per_second`` for each of at most ``capacity`` turns at a time; the others wait in line.

    Token i of a turn comes (i + 1) / tokens_per_second after the turn's start and carries the version loaded by then.
    """

    def __init__(
        self,
        source: Source,
        *,
        tokens_per_second: float,
        capacity: int,
        recording: Recording | None = None,
        vocabulary: int = 256,
        context: int = 1 << 20,
        version: int = 0,
    ) -> None:
        if tokens_per_second <= 0 or capacity < 1 or vocabulary < 2:
            raise BadInput(
                f"{tokens_per_second} tokens/s, capacity {capacity}, vocabulary {vocabulary}: each must be positive",
                where="paced engine",
            )
        self.source = source
        self._rate = tokens_per_second
        self._recording = recording if recording and recording.turns else None
        self._vocabulary = vocabulary
        self._context = context
        self._places = asyncio.Semaphore(capacity)
        self._closed = False
        self._swap_times: list[float] = []
        self._versions = [version]
        self._active = self._waiting = 0
        self._sampled = self._prompt = self._cached = 0
        self._seen: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._versions[-1]

    async def generate(self, request: GenerateRequest) -> Completion:
        room = self._context - len(request.ids)
        if room < 1:
            raise TooLong(f"{len(request.ids)} ids leave no room in a context of {self._context}", where="generate")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        self._active += 1
        try:
            return await self._serve(request, min(room, request.params.max_tokens))
        finally:
            self._active -= 1
            self._places.release()

    async def _serve(self, request: GenerateRequest, most: int) -> Completion:
        if self._closed:
            raise EngineError("the engine is closed", where="paced engine")
        loop = asyncio.get_running_loop()
        start = loop.time()
        reply = self._reply(request, most)
        count = len(reply.ids)
        await asyncio.sleep(count / self._rate)
        if self._closed:
            raise EngineError("the engine was closed in mid-turn", where="paced engine")
        times = start + (np.arange(count) + 1) / self._rate
        versions = [self._versions[bisect_right(self._swap_times, t)] for t in times]
        cached = min(self._seen.get(request.session, 0), len(request.ids))
        self._seen[request.session] = len(request.ids) + count
        self._sampled += count
        self._prompt += len(request.ids)
        self._cached += cached
        stop = int(reply.ids[-1]) in request.params.stop_ids
        return Completion(
            reply.ids,
            reply.logprobs,
            np.array(versions, np.int32),
            reply.supports if request.params.top_k else None,
            "stop" if stop else "length",
            self.source,
            cached,
        )

    def _reply(self, request: GenerateRequest, most: int) -> Reply:
        """The turn's tokens, fixed by the request's seed and position: at most ``most``, none after a stop."""
        params = request.params
        seed = np.full(1, params.seed % (1 << 64), np.uint64)
        u = float(uniforms(seed, np.array([len(request.ids)], np.uint64))[0])
        if self._recording is not None:
            reply = self._recording.choose(request.ids, u)
            if reply.supports is None and params.top_k:
                reply = _uniform(reply.ids, self._vocabulary, params)
            stops = np.flatnonzero(np.isin(reply.ids, params.stop_ids))
            return reply.first(min(most, int(stops[0]) + 1 if stops.size else len(reply.ids)))
        count = 1 + int(u * most) if params.stop_ids else most
        positions = len(request.ids) + 1 + np.arange(count, dtype=np.uint64)
        ids = (uniforms(np.repeat(seed, count), positions) * self._vocabulary).astype(np.int32)
        ids[np.isin(ids, params.stop_ids)] = next(i for i in range(self._vocabulary) if i not in params.stop_ids)
        if params.stop_ids:
            ids[-1] = params.stop_ids[0]
        return _uniform(ids, self._vocabulary, params)

    async def load(
        self, version: int, weights: Mapping[str, Tensor], changed: Mapping[str, Positions] | None = None
    ) -> None:
        """Tokens from now on carry ``version``; the weights themselves are not needed."""
        self._swap_times.append(asyncio.get_running_loop().time())
        self._versions.append(version)

    def forget(self, session: str) -> None:
        self._seen.pop(session, None)

    def stats(self) -> EngineStats:
        return EngineStats(
            active=self._active,
            waiting=self._waiting,
            sampled_tokens=self._sampled,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            swaps=len(self._swap_times),
        )

    async def close(self) -> None:
        self._closed = True


def _uniform(ids: Int32, vocabulary: int, params: SamplingParams) -> Reply:
    """``ids`` as uniform draws: each row's candidates are its token and the next ids of the vocabulary, cyclically."""
    size = min(CANDIDATES, vocabulary, params.top_k or CANDIDATES)
    base = max(vocabulary, int(ids.max()) + 1)
    rows = (ids[:, None] + np.arange(size, dtype=np.int32)) % base
    offsets = np.arange(len(ids) + 1, dtype=np.int64) * size
    supports = Supports(rows.reshape(-1).astype(np.int32), np.full(len(ids) * size, -log(size), np.float32), offsets)
    return Reply(ids, np.full(len(ids), -log(size), np.float32), supports)


def _digest(context: Int32) -> bytes:
    return blake2b(np.ascontiguousarray(context, np.int32).tobytes(), digest_size=16).digest()
