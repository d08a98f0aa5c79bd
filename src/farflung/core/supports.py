"""Supports: for every sampled token, the candidates it was drawn from and their log-probabilities.

Compressed sparse rows: row t is ``ids[offsets[t]:offsets[t+1]]`` with log-probabilities over exactly that set, which sum
to one (they are renormalised after top-k and top-p). A row of one entry had no alternative and carries no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.core.errors import Corrupt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

SUM_TOLERANCE = 1e-3


def check_rows(where: str, **rows: tuple[npt.NDArray[Any], type]) -> None:
    """Raises Corrupt unless each array has one dimension and its type: what follows may index and count then."""
    for name, (array, dtype) in rows.items():
        if array.ndim != 1 or array.dtype != dtype:
            found = f"shape {array.shape} and type {array.dtype}"
            raise Corrupt(f"{name} has {found}, not one row of {dtype.__name__}", where=where)


@dataclass(frozen=True, slots=True)
class Supports:
    """ids [n] int32, logprobs [n] float32, offsets [rows + 1] int64."""

    ids: Int32
    logprobs: Float32
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Int64:
        """Candidates per row, [rows]."""
        return np.diff(self.offsets)

    def rows(self, start: int, stop: int) -> Supports:
        """Rows start..stop as their own Supports."""
        low, high = int(self.offsets[start]), int(self.offsets[stop])
        return Supports(self.ids[low:high], self.logprobs[low:high], self.offsets[start : stop + 1] - low)

    @staticmethod
    def empty() -> Supports:
        return Supports(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(1, np.int64))

    @staticmethod
    def concat(parts: Iterable[Supports]) -> Supports:
        """Stack the rows of several Supports in order."""
        parts = list(parts)
        sizes = np.concatenate([np.zeros(0, np.int64), *(p.sizes for p in parts)])
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return Supports(
            np.concatenate([np.zeros(0, np.int32), *(p.ids for p in parts)]).astype(np.int32),
            np.concatenate([np.zeros(0, np.float32), *(p.logprobs for p in parts)]).astype(np.float32),
            offsets,
        )

    def check(self, sampled: Int32, logprobs: Float32, *, where: str = "supports") -> None:
        """Fail closed unless every row is a distribution that holds its sampled token with its recorded log-probability.

        sampled [rows] int32 and logprobs [rows] float32 are what the sampler drew. Raises Corrupt with row and value.
        """
        check_rows(
            where,
            support_ids=(self.ids, np.int32),
            support_logprobs=(self.logprobs, np.float32),
            support_offsets=(self.offsets, np.int64),
        )
        offsets = self.offsets
        rows = len(sampled)
        if (
            len(offsets) != rows + 1
            or offsets[0] != 0
            or offsets[-1] != len(self.ids)
            or len(self.ids) != len(self.logprobs)
        ):
            raise Corrupt(
                f"{rows} sampled tokens, {len(offsets) - 1} rows, {len(self.ids)} ids, {len(self.logprobs)} log-probs",
                where=where,
            )
        if rows == 0:
            return
        sizes = self.sizes
        if (bad := np.flatnonzero(sizes <= 0)).size:
            raise Corrupt(f"row {bad[0]} has {sizes[bad[0]]} candidates", where=where)
        row_of = np.repeat(np.arange(rows), sizes)
        if (bad := np.flatnonzero(~np.isfinite(self.logprobs) | (self.logprobs > 1e-4))).size:
            what = f"candidate {self.ids[bad[0]]} has log-probability {self.logprobs[bad[0]]}"
            raise Corrupt(f"row {row_of[bad[0]]}'s {what}", where=where)
        totals = np.add.reduceat(np.exp(self.logprobs.astype(np.float64)), offsets[:-1])
        if (bad := np.flatnonzero(np.abs(totals - 1) > SUM_TOLERANCE)).size:
            raise Corrupt(f"row {bad[0]}'s probabilities sum to {totals[bad[0]]:.6f}, not 1", where=where)
        keys = np.sort(row_of.astype(np.int64) << 32 | self.ids.astype(np.int64))
        if (bad := np.flatnonzero(keys[1:] == keys[:-1])).size:
            row, candidate = divmod(int(keys[bad[0]]), 1 << 32)
            raise Corrupt(f"row {row} names candidate {candidate} twice", where=where)
        recorded = self.logprobs[self.find(sampled, where=where)]
        gap = np.abs(recorded - logprobs)
        if (bad := np.flatnonzero(~(gap <= 1e-4 * np.maximum(1, np.abs(logprobs))))).size:
            row = int(bad[0])
            raise Corrupt(
                f"row {row}'s sampled token has log-probability {logprobs[row]}, its entry {recorded[row]}", where=where
            )

    def find(self, sampled: Int32, *, where: str = "supports") -> Int64:
        """Where each row's sampled token [rows] stands among the entries, [rows]. Raises Corrupt if one is missing."""
        entries = np.flatnonzero(self.ids == np.repeat(sampled, self.sizes))
        rows = np.searchsorted(self.offsets, entries, side="right") - 1
        if (bad := np.flatnonzero(np.bincount(rows, minlength=len(self)) != 1)).size:
            row = int(bad[0])
            times = int((rows == row).sum())
            raise Corrupt(
                f"row {row}'s sampled token {sampled[row]} is {times} times among its candidates", where=where
            )
        return entries
