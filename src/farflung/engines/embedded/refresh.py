"""Brings an older version of prepared weights up to date by writing only the elements that changed since.

A change is named by its position in a tensor of the stream. What stands here is which weights that code or scale stands
for, and where these lie in the prepared matrices. Their values are read from the stream and go through the same float
operations in the same order as when a matrix is prepared whole (weights.py), so both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.engines.base import Positions
from farflung.engines.embedded.weights import (
    Intake,
    Matrix,
    Part,
    Weights,
    interleave,
    layer_matrices,
    outer_matrices,
)
from farflung.formats.selection import is_quantised
from farflung.formats.weights import FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK, Quantised, refuse_nonfinite

WHOLE_SHARE = 0.06
"""A matrix of which more than this share is to be written is prepared whole, which is cheaper then."""

Layout = Mapping[str, tuple[torch.dtype, torch.Size]]
Changed = Mapping[str, Positions]


@dataclass(frozen=True, slots=True)
class Standby:
    """What the next load can build upon. layout: of the stream of the version in use, whose positions mean nothing in another.

    weights: the version before that one, no longer in use, which lacks the changes ``lacks``; None: a copy is to be made.
    """

    layout: Layout
    weights: Weights | None = None
    lacks: Changed = field(default_factory=dict)


def layout(given: Mapping[str, Tensor]) -> Layout:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in given.items()}


def stage(standby: Standby | None, serving: Weights, intake: Intake, changed: Changed) -> tuple[Weights, int]:
    """A version ready to run beside ``serving``, and how many of its elements were written; whole without a standby.

    changed: since the version of ``serving``. Raises BadInput, with the standby half-written.
    """
    if standby is None:
        weights = intake.weights()
        return weights, weights.elements
    weights = standby.weights or serving.copy()
    for name, positions in changed.items():
        if positions.size:
            _check(name, positions, intake)
    names = standby.lacks.keys() | changed.keys()
    told = {n: [c[n] for c in (standby.lacks, changed) if n in c and c[n].size] for n in names}
    both = {n: np.concatenate(parts) for n, parts in told.items() if parts}
    return weights, refresh(weights, intake, both)


def refresh(weights: Weights, intake: Intake, changed: Changed) -> int:
    """Write into ``weights`` what ``intake`` holds at the positions ``changed``, of which some may stand there twice.

    Returns how many elements were written. Raises BadInput for values that are not finite, with ``weights`` half-written.
    """
    moved = {name: torch.tensor(at, device=intake.given[name].device) for name, at in changed.items()}
    a, written = intake.architecture, 0
    for name, matrix in outer_matrices(a).items():
        written += _write(getattr(weights, name), matrix, intake, moved)
    if "model.norm.weight" in moved:
        weights.final_gain.copy_(intake.gain("model.norm", a.width))
        written += a.width
    # Gains and biases are few: those of a layer are made anew together.
    vectors = {".".join(name.split(".")[:3]) for name in moved if intake.given[name].ndim == 1}
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        for name, matrix in layer_matrices(a, at, intake.dtype).items():
            written += _write(getattr(layer, name).t(), matrix, intake, moved)
        for name, vector in intake.vectors(at).items() if at in vectors else ():
            if vector is not None:
                getattr(layer, name).copy_(vector)
                written += vector.numel()
    return written


def _check(name: str, positions: Positions, intake: Intake) -> None:
    if name not in intake.given:
        raise BadInput(f"{name} is said to have changed, but the weights lack it")
    size = intake.given[name].numel() * (2 if intake.is_packed(name) else 1)
    if positions.dtype != np.int64 or positions.ndim != 1 or positions.min() < 0 or positions.max() >= size:
        raise BadInput(
            f"the positions of changes in {name} are {positions.dtype} {list(positions.shape)} in "
            f"[{positions.min()}, {positions.max()}]; they must be int64 [n] in [0, {size})"
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """What an element of a stream tensor stands for: height x width weights of the matrix, ``across`` such side by side."""

    across: int
    height: int = 1
    width: int = 1

    def cover(self, positions: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Row and column of every weight that the elements at ``positions`` [n] stand for; padding is left out."""
        top = torch.div(positions, self.across, rounding_mode="floor")
        left = (positions - top * self.across) * self.width
        top = top * self.height
        if self.height == self.width == 1 and self.across == columns:
            return top, left
        down = torch.arange(self.height, device=positions.device)[:, None]
        right = torch.arange(self.width, device=positions.device)
        grid = len(positions), self.height, self.width
        row, column = (top[:, None, None] + down).expand(grid), (left[:, None, None] + right).expand(grid)
        inside = (row < rows) & (column < columns)
        return row[inside], column[inside]


def _tiles(format: WeightFormat, name: str, rows: int, columns: int) -> dict[str, _Tiles]:
    """Of each stream tensor of a weight that comes as codes and scales, what its elements stand for."""
    match format:
        case "bf16":
            return {name: _Tiles(columns)}
        case "fp8":
            scales = _Tiles(-(-columns // FP8_BLOCK), FP8_BLOCK, FP8_BLOCK)
            return {name: _Tiles(columns), f"{name}_scale_inv": scales}
        case "mxfp4":
            blocks = -(-columns // MXFP4_BLOCK)
            return {name: _Tiles(blocks * MXFP4_BLOCK), f"{name}_scale": _Tiles(blocks, width=MXFP4_BLOCK)}
        case "nvfp4":
            blocks = -(-columns // NVFP4_BLOCK)
            return {
                name: _Tiles(blocks * NVFP4_BLOCK),
                f"{name}_scale": _Tiles(blocks, width=NVFP4_BLOCK),
                f"{name}_scale_2": _Tiles(1, rows, columns),
            }


def _write(held: Tensor, matrix: Matrix, intake: Intake, moved: Mapping[str, Tensor]) -> int:
    """Bring held [out, in], a view of a prepared matrix, up to date."""
    if _is_cheaper_whole(matrix, intake, moved, held.numel()):
        held.copy_(intake.matrix(matrix))
        return held.numel()
    first = written = 0
    for part in matrix.parts:
        for tiles, positions in _touched(part, matrix.columns, intake, moved):
            rows, columns = tiles.cover(positions, part.rows, matrix.columns)
            values = _values(part, matrix, intake, rows, columns)
            places = _order(part, intake).add_(first).index_select(0, rows)
            held.index_put_((places.to(held.device), columns.to(held.device)), values)
            written += len(values)
        first += part.rows
    return written


def _is_cheaper_whole(matrix: Matrix, intake: Intake, moved: Mapping[str, Tensor], size: int) -> bool:
    if f"{matrix.norm}.weight" in moved:
        return True
    count = 0
    for part in matrix.parts:
        touched = _touched(part, matrix.columns, intake, moved)
        if touched and intake.is_quantised_here(part.name):
            return True  # one weight more may move its block's scale, or the matrix's
        count += sum(len(positions) * tiles.height * tiles.width for tiles, positions in touched)
    return count > WHOLE_SHARE * size


def _touched(part: Part, columns: int, intake: Intake, moved: Mapping[str, Tensor]) -> list[tuple[_Tiles, Tensor]]:
    format = intake.format if intake.is_coded(part.name) else "bf16"
    tiles = _tiles(format, part.name, part.rows, columns)
    return [(tiles[name], moved[name]) for name in tiles if name in moved]


def _values(part: Part, matrix: Matrix, intake: Intake, rows: Tensor, columns: Tensor) -> Tensor:
    """What the prepared matrix is to hold for the projection's weights at [rows[i], columns[i]]."""
    if intake.is_coded(part.name):
        values = intake.coded(part, matrix.columns).at(rows, columns, intake.dtype)
    else:
        plain = intake.raw(part.name, part.rows, matrix.columns)
        values = Quantised("bf16", part.rows, matrix.columns, plain).at(rows, columns, intake.dtype)
    if is_quantised(part.name):
        refuse_nonfinite(values, part.name)
    values = values.to(intake.device)
    if matrix.norm is not None:
        values.mul_(intake.gain(matrix.norm, matrix.columns).index_select(0, columns.to(intake.device)))
    if part.factor is not None:
        values.mul_(part.factor)
    return values


def _order(part: Part, intake: Intake) -> Tensor:
    """Where each row of the projection stands among its rows in the matrix."""
    order = torch.arange(part.rows, device=intake.given[part.name].device)
    return interleave(order, intake.architecture.head_dim).argsort() if part.interleaved else order
