"""The rows that decode together: one table of numbers per row, one forward pass and one draw per step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farflung.core.sampling import Completion, GenerateRequest, uniforms
from farflung.core.supports import Int32, Supports
from farflung.engines.embedded.cache import RowCache
from farflung.engines.embedded.decoder import Decoder, Workspace
from farflung.engines.embedded.sampling import Draw, Rules, draw
from farflung.engines.embedded.weights import Weights

_ROW = np.dtype(
    [
        ("length", "i8"),  # tokens in the cache
        ("last", "i8"),  # the id that is fed next
        ("remaining", "i8"),  # tokens that may still be sampled
        ("made", "i8"),  # tokens that were sampled
        ("candidates", "i8"),  # entries of the recorded supports
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("top_k", "i8"),
    ]
)


@dataclass(slots=True, eq=False)
class Turn:
    """A request on its way: where its answer goes, and how much of its prompt was found in the cache."""

    request: GenerateRequest
    budget: int
    """Tokens that it may sample."""
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    cached: int = 0
    cancelled: bool = False
    keep: bool = field(default=True)
    """Whether its keys and values are kept for the session's next turn."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a row made: ids, logprobs, versions [n]; supports, or None when the whole vocabulary was open."""

    ids: Int32
    logprobs: npt.NDArray[np.float32]
    versions: Int32
    supports: Supports | None


class Batch:
    """Rows 0 .. n-1 are active; a row that leaves is replaced by the last one, so that no step gathers anything."""

    def __init__(self, decoder: Decoder, cache: RowCache, workspace: Workspace, capacity: int) -> None:
        self._decoder, self._workspace = decoder, workspace
        self.cache = cache
        self.turns: list[Turn] = []
        self._table = np.zeros(capacity, _ROW)
        self._rows = _columns(self._table)
        self._active = _columns(self._table[:0])
        self._stops = np.full((capacity, 1), -1, np.int64)
        # Per sampled token, and per recorded candidate; the second axis grows by doubling.
        self._uniforms = np.zeros((capacity, 64), np.float64)
        self._ids = np.zeros((capacity, 64), np.int32)
        self._logprobs = np.zeros((capacity, 64), np.float32)
        self._versions = np.zeros((capacity, 64), np.int32)
        self._counts = np.zeros((capacity, 64), np.int32)
        self._support_ids = np.zeros((capacity, 256), np.int32)
        self._support_logprobs = np.zeros((capacity, 256), np.float32)

    def __len__(self) -> int:
        return len(self.turns)

    def join(self, turn: Turn, kv: torch.Tensor) -> None:
        """Start decoding: ``kv`` holds all of the request's ids but the last, which the next step feeds."""
        row, params = len(self.turns), turn.request.params
        length = kv.shape[3]
        self.cache.reserve(row + 1, length + 1)
        self.cache.write(row, kv)
        self._table[row] = (
            length, turn.request.ids[-1], turn.budget, 0, 0, params.temperature, params.top_p, params.top_k,
        )  # fmt: skip
        # Known from the start, since they depend on nothing but the seed and a token's place in the sequence.
        places = np.arange(length + 1, length + 1 + turn.budget, dtype=np.uint64)
        self._uniforms = _wider(self._uniforms, turn.budget)
        self._uniforms[row, : turn.budget] = uniforms(np.full_like(places, params.seed & (2**64 - 1)), places)
        self._stops = _wider(self._stops, len(params.stop_ids), fill=-1)
        self._stops[row] = -1
        self._stops[row, : len(params.stop_ids)] = params.stop_ids
        self.turns.append(turn)
        self._active = _columns(self._table[: row + 1])

    def leave(self, row: int) -> Turn:
        """Free a row; the last one takes its place."""
        last = len(self.turns) - 1
        if row != last:
            self.cache.write(row, self.cache.read(last, int(self._rows["length"][last])))
            made, candidates = int(self._rows["made"][last]), int(self._rows["candidates"][last])
            for array in (self._ids, self._logprobs, self._versions, self._counts):
                array[row, :made] = array[last, :made]
            self._uniforms[row] = self._uniforms[last]
            for array in (self._support_ids, self._support_logprobs):
                array[row, :candidates] = array[last, :candidates]
            self._table[row] = self._table[last]
            self._stops[row] = self._stops[last]
        turn, self.turns[row] = self.turns[row], self.turns[last]
        self.turns.pop()
        self._active = _columns(self._table[:last])
        return turn

    def fed(self, row: int) -> Int32:
        """The ids whose keys and values the row holds."""
        ids = np.concatenate([self.turns[row].request.ids, self._ids[row, : self._rows["made"][row]]])
        return ids[: self._rows["length"][row]].astype(np.int32)

    def sampled(self, row: int) -> Sampled:
        made = int(self._rows["made"][row])
        supports = None
        if self._rows["top_k"][row] > 0:
            total = int(self._rows["candidates"][row])
            offsets = np.zeros(made + 1, np.int64)
            np.cumsum(self._counts[row, :made], out=offsets[1:])
            supports = Supports(
                self._support_ids[row, :total].copy(), self._support_logprobs[row, :total].copy(), offsets
            )
        return Sampled(
            self._ids[row, :made].copy(), self._logprobs[row, :made].copy(), self._versions[row, :made].copy(), supports
        )

    def step(self, weights: Weights, version: int, device: torch.device) -> tuple[list[int], list[int]]:
        """One token for every row. Returns the rows that are finished, and those whose logits were not finite."""
        n, rows = len(self.turns), self._active
        lengths, last, made = rows["length"], rows["last"], rows["made"]
        self.cache.reserve(n, int(lengths.max()) + 1)
        self.cache.begin(lengths)
        ids, positions = torch.from_numpy(last.copy()).to(device), torch.from_numpy(lengths.copy()).to(device)
        self._decoder.hidden(weights, ids, positions, self.cache.attend, self._workspace)
        logits = self._decoder.logits(weights, self._workspace)
        rules = Rules(rows["temperature"], rows["top_p"], rows["top_k"])
        drawn = draw(logits, rules, self._uniforms[np.arange(n), made])
        self._record(drawn, version)
        lengths += 1
        last[:] = drawn.ids
        rows["remaining"] -= 1
        bad = np.isnan(drawn.logprobs)
        done = (rows["remaining"] <= 0) | (self._stops[:n] == drawn.ids[:, None]).any(-1)
        if not (done.any() or bad.any()):
            return [], []
        return np.flatnonzero(done & ~bad).tolist(), np.flatnonzero(bad).tolist()

    def stopped(self, row: int) -> bool:
        """Whether the row's last id is one of its stop ids."""
        return bool((self._stops[row] == self._rows["last"][row]).any())

    def _record(self, drawn: Draw, version: int) -> None:
        n = len(drawn.ids)
        made, candidates = self._rows["made"][:n], self._rows["candidates"][:n]
        most = int(made.max()) + 1
        if most > self._ids.shape[1]:
            self._ids, self._logprobs, self._versions, self._counts = (
                _wider(array, 2 * most) for array in (self._ids, self._logprobs, self._versions, self._counts)
            )
        at = np.arange(n)
        self._ids[at, made] = drawn.ids
        self._logprobs[at, made] = drawn.logprobs
        self._versions[at, made] = version
        self._counts[at, made] = drawn.counts
        if len(drawn.support_ids):
            most = int((candidates + drawn.counts).max())
            if most > self._support_ids.shape[1]:
                self._support_ids = _wider(self._support_ids, 2 * most)
                self._support_logprobs = _wider(self._support_logprobs, 2 * most)
            starts = np.cumsum(drawn.counts) - drawn.counts
            row = np.repeat(at, drawn.counts)
            column = np.arange(len(row)) + np.repeat(candidates - starts, drawn.counts)
            self._support_ids[row, column] = drawn.support_ids
            self._support_logprobs[row, column] = drawn.support_logprobs
            candidates += drawn.counts
        made += 1


def _columns(table: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    return {name: table[name] for name in _ROW.names or ()}


def _wider(array: npt.NDArray[Any], width: int, fill: int = 0) -> npt.NDArray[Any]:
    """The array, or a copy with at least ``width`` columns."""
    if width <= array.shape[1]:
        return array
    wide = np.full((len(array), width), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
