"""The embedded engine: one thread that reads prompts and decodes, behind the asynchronous engine port.

Everything that changes the engine's state runs on that thread, between two steps: new turns, cancelled ones, forgotten
sessions, new weights. The event loop only posts these and waits for answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import Completion, GenerateRequest, Source
from farflung.core.supports import Int32
from farflung.engines.base import EngineError, EngineStats, Positions, TooLong
from farflung.engines.embedded.architecture import Architecture
from farflung.engines.embedded.batch import Batch, Turn
from farflung.engines.embedded.cache import IdleSessions, Reading, RowCache, Stored, kv_shape
from farflung.engines.embedded.decoder import Decoder, Workspace
from farflung.engines.embedded.refresh import Standby, layout, stage
from farflung.engines.embedded.threads import answer, in_background
from farflung.engines.embedded.weights import Intake, Weights, let_go, read_folder
from farflung.formats import kv as kv_formats
from farflung.formats.selection import Selection
from farflung.formats.weights import FORMATS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an embedded engine computes and what it may hold.

    capacity: turns that decode at a time; more wait. context: longest sequence, at most (and by default) the model's.
    compute: auto is float32 on a CPU and bfloat16 on a GPU. prefill_tokens: prompt tokens read between two decoding
    steps, so that long prompts do not hold up the others. session_bytes: memory for sessions between their turns.
    recompute_on_swap: new weights read every sequence again, instead of going on with the old keys and values.
    standby: keep the version before the one in use, so that a load writes only the elements that changed since; this takes
    the memory of the prepared weights once more. exclude: glob patterns of weights that stay BF16 where all come so.
    """

    capacity: int = 16
    context: int | None = None
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    prefill_tokens: int = 512
    session_bytes: int = 1 << 30
    recompute_on_swap: bool = False
    standby: bool = True
    exclude: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Prompt:
    """A turn whose prompt is being read: ``kv`` has room for all ids but the last, ``held`` of them are there."""

    turn: Turn
    kv: Tensor
    held: int

    @property
    def left(self) -> int:
        return self.kv.shape[3] - self.held


class EmbeddedEngine:
    """``source.weights`` and ``source.kv`` are the formats that it serves. See engines/base.py for the port."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, Tensor],
        source: Source,
        options: EngineOptions | None = None,
        version: int = 0,
    ) -> None:
        """Raises BadInput when formats or weights do not fit."""
        options = options or EngineOptions()
        formats = [f for f in FORMATS if f == source.weights]
        kv = [f for f in kv_formats.KV_FORMATS if f == source.kv]
        if not formats or not kv:
            raise BadInput(
                f"formats {source.weights!r} and {source.kv!r} are not served",
                where="embedded engine",
                mend=f"weights: {', '.join(FORMATS)}; cache: {', '.join(kv_formats.KV_FORMATS)}",
            )
        self.source = source
        self._format = formats[0]
        self.context = min(options.context or architecture.context, architecture.context)
        self.vocabulary = architecture.vocabulary
        self._options = options
        self._architecture = architecture
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        compute = options.compute
        if compute == "auto":
            compute = "float32" if self._device.type == "cpu" else "bfloat16"
        self._dtype = torch.float32 if compute == "float32" else torch.bfloat16
        with torch.inference_mode():
            self._weights = self._intake(weights).weights()
            self._decoder = Decoder(architecture, self.context, kv_formats.rounding(kv[0]), self._device)
            cache = RowCache(architecture, self._dtype, self._device)
            self._workspace = Workspace(architecture, self._dtype, self._device)
            decoding = Workspace(architecture, self._dtype, self._device)
        self._version = version
        self._standby = Standby(layout(weights)) if options.standby else None
        self._batch = Batch(self._decoder, cache, decoding, options.capacity)
        self._waiting: deque[Turn] = deque()
        self._prompts: deque[_Prompt] = deque()
        self._idle = IdleSessions(options.session_bytes)
        self._counts = dict.fromkeys(("sampled_tokens", "prompt_tokens", "cached_tokens", "swaps", "refreshed"), 0)
        self._swap_seconds = self._load_seconds = 0.0
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended: str | None = None
        self._loading = asyncio.Lock()
        self._asked = self._loaded = 0  # number of the last load, and of the last that came to its end
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @staticmethod
    def from_folder(
        folder: Path, source: Source, options: EngineOptions | None = None, version: int = 0
    ) -> EmbeddedEngine:
        """Serve a Hugging Face folder (config.json and safetensors). Raises BadInput with what is missing or unsupported."""
        return EmbeddedEngine(Architecture.read(folder), read_folder(folder), source, options, version)

    # --- The port: called on the event loop ---

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn; a turn that would outgrow the context ends there, with ``finish`` "length"."""
        room = self.context - len(request.ids)
        if room < 1:
            raise TooLong(f"{len(request.ids)} ids leave no room in a context of {self.context}", where="generate")
        if request.ids.min() < 0 or request.ids.max() >= self.vocabulary:
            raise BadInput(f"ids must lie in [0, {self.vocabulary})", where="generate")
        loop = asyncio.get_running_loop()
        turn = Turn(request, min(request.params.max_tokens, room), loop.create_future(), loop)
        self._post(lambda: self._waiting.append(turn))
        try:
            return await turn.future
        except asyncio.CancelledError:
            turn.cancelled = True
            with suppress(EngineError):
                self._post(self._drop_cancelled)
            raise

    def load(
        self, version: int, weights: Mapping[str, Tensor], changed: Mapping[str, Positions] | None = None
    ) -> Coroutine[Any, Any, None]:
        """See the port. Raises BadInput; the old weights stay then."""
        # Counted here: a task that is cancelled before it first runs has missed changes, too.
        self._asked += 1
        return self._load(self._asked, version, weights, changed)

    async def _load(
        self, number: int, version: int, weights: Mapping[str, Tensor], changed: Mapping[str, Positions] | None
    ) -> None:
        async with self._loading:
            loop, held = asyncio.get_running_loop(), layout(weights)
            # Taken for good: a load that fails or is cancelled leaves it half-written, and the next one starts whole.
            standby, self._standby = self._standby, None
            # One that failed or was cancelled, wherever it was by then, had changes that this one does not tell.
            missed = number != self._loaded + 1
            if standby is not None and (changed is None or missed or standby.layout != held):
                standby = None
            started = time.monotonic()
            staged, written = await in_background(
                lambda: stage(standby, self._weights, self._intake(weights), changed or {}), loop
            )
            self._load_seconds += time.monotonic() - started
            self._counts["refreshed"] += written
            swapped: asyncio.Future[None] = loop.create_future()
            before: list[Weights] = []  # which alone holds them then
            self._post(lambda: self._swap(version, staged, before, loop, swapped))
            await swapped
            self._loaded = number
            if standby is not None and changed is not None:
                self._standby = Standby(held, before.pop(), changed)
                return
            if self._options.standby:
                self._standby = Standby(held)
            await in_background(lambda: let_go(before.pop()), loop)

    def forget(self, session: str) -> None:
        with suppress(EngineError):  # an engine that has ended has forgotten everything
            self._post(lambda: self._forget(session))

    def stats(self) -> EngineStats:
        active = len(self._batch) + len(self._prompts)
        return EngineStats(
            active, len(self._waiting), **self._counts,
            swap_seconds=self._swap_seconds, load_seconds=self._load_seconds,
        )  # fmt: skip

    async def close(self) -> None:
        """Stop the thread; turns in flight fail with EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 30)

    def _post(self, action: Callable[[], None]) -> None:
        """Have the thread do this between two steps. Raises EngineError when it has ended."""
        with self._wake:
            if self._ended is not None:
                raise EngineError(self._ended, where=self.source.replica)
            self._inbox.append(action)
            self._wake.notify()

    def _intake(self, weights: Mapping[str, Tensor]) -> Intake:
        return Intake(
            self._architecture, weights, self._format, self._dtype, self._device, Selection(self._options.exclude)
        )

    # --- The engine's thread ---

    @torch.inference_mode()
    def _run(self) -> None:
        ended = "the engine is closed"
        try:
            while (actions := self._next_actions()) is not None:
                while actions:
                    actions.popleft()()
                self._step()
        except BaseException as error:
            log.exception("the engine's thread ended")
            ended = f"the engine broke: {error!r}"
        with self._wake:
            self._ended = ended
            late, self._inbox = self._inbox, deque()
        for action in late:
            # They only hand over turns and weights now; the turns fail with the others.
            with suppress(Exception):
                action()
        for turn in (*self._batch.turns, *(p.turn for p in self._prompts), *self._waiting):
            self._fail(turn, EngineError(ended, where=self.source.replica))

    def _next_actions(self) -> deque[Callable[[], None]] | None:
        """Everything that was posted, once there is anything to do; None when the engine was closed."""
        with self._wake:
            while not (self._inbox or self._closing or self._busy):
                self._wake.wait()
            if self._closing:
                return None
            actions, self._inbox = self._inbox, deque()
            return actions

    def _step(self) -> None:
        self._admit()
        if self._prompts:
            parts = self._next_parts()
            self._guarded(lambda: self._read(parts), [p.turn for p, _ in parts])
        if len(self._batch):
            self._guarded(self._decode, list(self._batch.turns))

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._prompts or self._batch.turns)

    def _admit(self) -> None:
        while self._waiting and len(self._batch) + len(self._prompts) < self._options.capacity:
            turn = self._waiting.popleft()
            if turn.cancelled:
                continue
            ids = turn.request.ids
            found = self._idle.take(turn.request.session, ids)
            kv = torch.empty(kv_shape(self._architecture, len(ids) - 1), dtype=self._dtype, device=self._device)
            if found is not None:
                turn.cached = len(found.ids)
                kv[:, :, :, : turn.cached] = found.kv
            self._counts["prompt_tokens"] += len(ids)
            self._counts["cached_tokens"] += turn.cached
            self._prompts.append(_Prompt(turn, kv, turn.cached))

    def _next_parts(self) -> list[tuple[_Prompt, int]]:
        """The oldest prompts and how many ids of each to read now, at most ``prefill_tokens`` in all.

        Only a prompt that is longer than that by itself is cut.
        """
        parts: list[tuple[_Prompt, int]] = []
        budget = self._options.prefill_tokens
        for prompt in self._prompts:
            if parts and prompt.left > budget:
                break
            added = min(prompt.left, budget)
            parts.append((prompt, added))
            budget -= added
        return parts

    def _read(self, parts: list[tuple[_Prompt, int]]) -> None:
        """Read these parts in one pass; prompts that are through join the batch; only a single one can be left over."""
        self._feed([(p.turn.request.ids, p.kv, p.held, added) for p, added in parts if added])
        for prompt, added in parts:
            prompt.held += added
            if not prompt.left:
                self._prompts.popleft()
                self._batch.join(prompt.turn, prompt.kv)

    def _feed(self, parts: list[tuple[Int32, Tensor, int, int]]) -> None:
        """Compute keys and values of ids[held : held + added] into each store, in one pass."""
        if not parts:
            return
        ids = np.concatenate([ids[held : held + added] for ids, _, held, added in parts]).astype(np.int64)
        positions = np.concatenate([np.arange(held, held + added) for _, _, held, added in parts])
        reading = Reading(self._architecture, [(kv, held, added) for _, kv, held, added in parts])
        self._decoder.hidden(
            self._weights,
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            reading.attend,
            self._workspace,
        )

    def _decode(self) -> None:
        done, bad = self._batch.step(self._weights, self._version, self._device)
        self._counts["sampled_tokens"] += len(self._batch)
        # From the last row to the first, since a leaving row is replaced by the last one.
        for row in sorted(done + bad, reverse=True):
            if row in bad:
                error = EngineError(
                    f"version {self._version} gave logits that are not finite", where=self.source.replica
                )
                self._fail(self._batch.leave(row), error)
            else:
                self._finish(row)

    def _finish(self, row: int) -> None:
        sampled = self._batch.sampled(row)
        finish: Literal["stop", "length"] = "stop" if self._batch.stopped(row) else "length"
        self._keep(row)
        turn = self._batch.leave(row)
        completion = Completion(
            sampled.ids, sampled.logprobs, sampled.versions, sampled.supports, finish, self.source, turn.cached
        )
        answer(turn.loop, turn.future, completion)

    def _keep(self, row: int) -> None:
        """Store the row's keys and values for the session's next turn, in bfloat16: both cache formats fit in it exactly."""
        turn, ids = self._batch.turns[row], self._batch.fed(row)
        if turn.keep:
            kv = self._batch.cache.read(row, len(ids)).to(torch.bfloat16, copy=True)
            self._idle.put(turn.request.session, Stored(ids, kv))

    def _drop_cancelled(self) -> None:
        for row in reversed(range(len(self._batch))):
            if self._batch.turns[row].cancelled:
                self._keep(row)
                self._batch.leave(row)
        self._prompts = deque(p for p in self._prompts if not p.turn.cancelled)
        self._waiting = deque(t for t in self._waiting if not t.cancelled)

    def _forget(self, session: str) -> None:
        self._idle.drop(session)
        for turn in (*self._batch.turns, *(p.turn for p in self._prompts), *self._waiting):
            if turn.request.session == session:
                turn.keep = False

    def _swap(
        self,
        version: int,
        weights: Weights,
        before: list[Weights],
        loop: asyncio.AbstractEventLoop,
        swapped: asyncio.Future[None],
    ) -> None:
        """The weights that served until now go into ``before``: this thread keeps none that it would have to free."""
        started = time.monotonic()
        before.append(self._weights)
        self._weights, self._version = weights, version
        if self._options.recompute_on_swap:
            self._guarded(self._recompute, [*self._batch.turns, *(p.turn for p in self._prompts)])
        self._counts["swaps"] += 1
        self._swap_seconds += time.monotonic() - started
        answer(loop, swapped, None)

    def _recompute(self) -> None:
        self._idle.clear()
        for prompt in self._prompts:
            prompt.held = 0
        for row in range(len(self._batch)):
            ids = self._batch.fed(row)
            kv = torch.empty(kv_shape(self._architecture, len(ids)), dtype=self._dtype, device=self._device)
            for held in range(0, len(ids), self._options.prefill_tokens):
                self._feed([(ids, kv, held, min(len(ids) - held, self._options.prefill_tokens))])
            self._batch.cache.write(row, kv)

    # --- Trouble ---

    def _guarded(self, step: Callable[[], None], turns: list[Turn]) -> None:
        """Run a step; when it breaks, the turns that it served fail, and the engine goes on."""
        try:
            step()
        except Exception as error:
            log.exception("a step failed; its %d turns fail", len(turns))
            failed = set(map(id, turns))
            for row in reversed(range(len(self._batch))):
                if id(self._batch.turns[row]) in failed:
                    self._batch.leave(row)
            self._prompts = deque(p for p in self._prompts if id(p.turn) not in failed)
            for turn in turns:
                self._fail(turn, EngineError(f"a step failed: {error!r}", where=self.source.replica))

    def _fail(self, turn: Turn, error: EngineError) -> None:
        answer(turn.loop, turn.future, error)
