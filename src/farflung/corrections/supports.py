"""Supports on a device: for each position, what the sampler recorded of its distribution, as compressed sparse rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farflung.core.errors import BadInput

Kind = Literal["top_p", "top_k"]

SUM_TOLERANCE = 1e-3
"""How far the recorded probabilities of a row may be from what their kind says."""

LARGEST_VOCABULARY = 1 << 31
"""Where the vocabulary is not known, ids need only be those of some: so many still have one key for each row and id."""

_WHERE = "supports"


@dataclass(frozen=True, slots=True)
class Supports:
    """Row t holds candidates ``ids[offsets[t]:offsets[t+1]]`` with log-probabilities (base e, after temperature).

    - "top_p": everything that could have been drawn, renormalised: the probabilities of a row sum to one, and the sampled
      token is one of its candidates.
    - "top_k": the most likely tokens of the whole vocabulary with their probabilities in it, not renormalised: they sum to
      at most one, and the sampled token may be another.

    ids [n] int32 or int64, logprobs [n] float32 or float64, offsets [rows + 1] int32 or int64 from 0 to n, all on one
    device; indices are kept as int64. Raises BadInput for other shapes, types and mixed devices; ``check`` looks at values.
    """

    ids: Tensor
    logprobs: Tensor
    offsets: Tensor
    kind: Kind = "top_p"

    def __post_init__(self) -> None:
        for name in ("ids", "logprobs", "offsets"):
            if not isinstance(getattr(self, name), Tensor):
                raise BadInput(f"{name} is a {type(getattr(self, name)).__name__}, not a tensor", where=_WHERE)
        if (
            self.ids.shape != self.logprobs.shape
            or self.ids.dim() != 1
            or self.offsets.dim() != 1
            or not len(self.offsets)
        ):
            raise BadInput(
                f"ids {tuple(self.ids.shape)}, log-probs {tuple(self.logprobs.shape)}, "
                f"offsets {tuple(self.offsets.shape)}",
                where=_WHERE,
            )
        if self.kind not in ("top_p", "top_k"):
            raise BadInput(f"unknown kind {self.kind!r}", where=_WHERE, mend="valid kinds: top_p, top_k")
        whole, real = (torch.int32, torch.int64), (torch.float32, torch.float64)
        for name, dtypes in (("ids", whole), ("logprobs", real), ("offsets", whole)):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype not in dtypes:
                raise BadInput(f"{name} are {tensor.dtype}, not {dtypes[0]} or {dtypes[1]}", where=_WHERE)
            if tensor.device != self.ids.device:
                raise BadInput(f"ids are on {self.ids.device}, {name} on {tensor.device}", where=_WHERE)
        object.__setattr__(self, "ids", self.ids.to(torch.int64))
        object.__setattr__(self, "offsets", self.offsets.to(torch.int64))

    @staticmethod
    def blank(rows: int, device: torch.device) -> Supports:
        """``rows`` rows of which nothing was recorded: everything lies in the tail. ``check`` would refuse them."""
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Supports(nothing, nothing.float(), nothing.new_zeros(rows + 1), "top_k")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """Candidates per row, [rows] int64."""
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:
        """The row of every entry, [n] int64."""
        return torch.repeat_interleave(self.sizes)

    def sum(self, values: Tensor) -> Tensor:
        """[n] -> [rows]: sums over each row's entries."""
        return values.new_zeros(len(self)).index_add_(0, self.rows, values)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[n] -> [n]: log-probabilities over each row's candidates."""
        rows = self.rows
        top = logits.new_full((len(self),), -torch.inf).scatter_reduce_(0, rows, logits, "amax")
        shifted = logits - top[rows]
        return shifted - shifted.new_zeros(len(self)).index_add_(0, rows, shifted.exp()).log()[rows]

    def select(self, rows: Tensor) -> Supports:
        """The given rows, in the given order, as their own Supports."""
        sizes = self.sizes[rows]
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device=sizes.device)
        torch.cumsum(sizes, 0, out=offsets[1:])
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], sizes)
        entries = torch.arange(len(shift), device=shift.device) + shift
        return Supports(self.ids[entries], self.logprobs[entries], offsets, self.kind)

    def find(self, sampled: Tensor) -> Tensor:
        """Where each row's sampled token stands among the entries, [rows] int64. Raises BadInput unless it does, once."""
        entries = torch.nonzero(self.ids == torch.repeat_interleave(sampled, self.sizes)).squeeze(1)
        found = self.rows[entries]
        if len(found) != len(self) or not torch.equal(found, torch.arange(len(self), device=found.device)):
            times = torch.bincount(found, minlength=len(self))
            _refuse(times == 0, lambda t: f"row {t}'s sampled token {int(sampled[t])} is not among its candidates")
            _refuse(times > 1, lambda t: f"row {t} names candidate {int(sampled[t])} twice")
        return entries

    def check(self, sampled: Tensor, vocabulary: int = LARGEST_VOCABULARY) -> None:
        """Fail closed, with the first row and value that is wrong, unless the rows are what their kind says.

        sampled [rows] int: what was drawn; vocabulary: the number of token ids. Raises BadInput for: another number of
        rows than tokens; offsets that do not rise from 0 to n; a row without candidates or with more than the vocabulary
        has; an id outside the vocabulary; a log-probability that is NaN or infinite; one candidate twice in a row; sums
        that are not the kind's; with "top_p", a sampled token that is no candidate or had probability 0.
        """
        n, sizes = len(self.ids), self.sizes
        if len(self) != len(sampled):
            raise BadInput(f"{len(self)} rows for {len(sampled)} sampled tokens", where=_WHERE)
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != n:
            raise BadInput(f"offsets {self.offsets[[0, -1]].tolist()} do not span {n} entries", where=_WHERE)
        _refuse(sizes < 0, lambda t: f"offsets fall from {self.offsets[t]} to {self.offsets[t + 1]} at row {t}")
        _refuse(sizes == 0, lambda t: f"row {t} has no candidates")
        _refuse(sizes > vocabulary, lambda t: f"row {t} has {sizes[t]} candidates of a vocabulary of {vocabulary}")
        rows, ids, log_q = self.rows, self.ids, self.logprobs
        _refuse(
            (ids < 0) | (ids >= vocabulary),
            lambda k: f"row {rows[k]}'s candidate {ids[k]} is outside the vocabulary of {vocabulary}",
        )
        keys = (rows * vocabulary + ids).sort().values
        _refuse(
            keys[1:] == keys[:-1],
            lambda k: f"row {keys[k] // vocabulary} names candidate {keys[k] % vocabulary} twice",
        )
        if self.kind == "top_p":
            drawn = log_q[self.find(sampled)]
            _refuse(drawn == -torch.inf, lambda t: f"row {t}'s sampled token {int(sampled[t])} has probability 0")
        _refuse(
            ~torch.isfinite(log_q),
            lambda k: f"row {rows[k]}'s candidate {ids[k]} has log-probability {float(log_q[k])}",
        )
        totals = self.sum(log_q.exp())
        excess = totals - 1
        if self.kind == "top_p":
            _refuse(excess.abs() > SUM_TOLERANCE, lambda t: f"row {t}'s probabilities sum to {totals[t]:.6f}, not 1")
        else:
            _refuse(excess > SUM_TOLERANCE, lambda t: f"row {t}'s probabilities sum to {totals[t]:.6f}, above 1")


def check_sampled(sampled: Tensor, logprobs: Tensor, vocabulary: int) -> None:
    """Raises BadInput unless every sampled token [N] is in the vocabulary and its log-probability [N] could be one."""
    if sampled.shape != logprobs.shape or sampled.dim() != 1:
        raise BadInput(f"{tuple(sampled.shape)} sampled tokens, {tuple(logprobs.shape)} log-probs", where=_WHERE)
    _refuse(
        (sampled < 0) | (sampled >= vocabulary),
        lambda t: f"row {t}'s sampled token {int(sampled[t])} is outside the vocabulary of {vocabulary}",
    )
    _refuse(logprobs == -torch.inf, lambda t: f"row {t}'s sampled token {int(sampled[t])} has probability 0")
    _refuse(
        ~(logprobs <= SUM_TOLERANCE),
        lambda t: f"row {t}'s sampled token {int(sampled[t])} has log-probability {float(logprobs[t])}",
    )


def check_echo(**values: tuple[float, float | None]) -> None:
    """For each name (temperature, top_p, ...) what was asked for and what the sampler says it used (None: nothing).

    Raises BadInput where they differ by more than float32 rounds: log-probabilities of another distribution are of no use.
    """
    for name, (asked, used) in values.items():
        if used is None or not math.isclose(asked, used, rel_tol=1e-6):
            said = "the sampler does not say what" if used is None else used
            raise BadInput(f"{name} {asked} was asked for, {said} was used", where="sampler")


def _refuse(wrong: Tensor, what: Callable[[int], str]) -> None:
    if wrong.any():
        raise BadInput(what(int(torch.nonzero(wrong)[0])), where=_WHERE)
