"""From a trainer's tensors to what is published in each format: sections of tensors, cut into pieces.

A stream is a format's whole version. It has two sections: ``shared``, the tensors that no format quantises (embeddings, LM
head, norms, biases and what is excluded), in BF16 and the same objects for all formats; and the format's own: matrices in
BF16, or their codes and scales. ``native`` is a stream of tensors as they are, in one section of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.selection import Selection
from farflung.weights.elements import ELEMENT_TYPES, Bits, element_type, from_bits, to_bits
from farflung.weights.schema import Piece, Schema, TensorType, cut

if TYPE_CHECKING:
    from torch import Tensor

    from farflung.weights.image import Image

NATIVE, SHARED = "native", "shared"
FORMATS = (*get_args(WeightFormat), NATIVE)
BF16 = ELEMENT_TYPES["BF16"]
SUFFIXES = ("", "_scale", "_scale_inv", "_scale_2")
"""What a format's tensors add to a weight's name (``formats/checkpoint.py``)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``start`` to ``start + len(rows)`` of a tensor of shape ``shape``, which this rank holds."""

    rows: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A tensor's type, and the bits of its elements from ``start`` on that this rank holds."""

    type: TensorType
    start: int
    bits: Bits

    @property
    def size(self) -> int:
        return len(self.bits) * self.type.kind.per_item


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy at one moment, in memory of its own. ``tied``: another name -> its tensor's."""

    runs: Mapping[str, Run]
    tied: Mapping[str, str]

    @staticmethod
    def of(
        weights: Mapping[str, Tensor | Shard], *, native: bool = False, selection: Selection | None = None
    ) -> Snapshot:
        """A copy: BF16, rounded to nearest even, or with ``native`` each tensor in its own type.

        Tensors that lie in the same memory are tied: the first name has the bits. Those that ``selection`` takes are not,
        as each has scales under its own name. Raises BadInput for no tensors, for types that are not published, and for
        a shard that does not lie in its tensor.
        """
        if not weights:
            raise BadInput("there are no tensors to publish")
        runs: dict[str, Run] = {}
        tied: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, given in weights.items():
            if isinstance(given, Shard):
                tensor, start, shape = _checked(given, name), given.start, given.shape
            else:
                tensor, start, shape = given, 0, tuple(given.shape)
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            alone = not tensor.numel() or (selection is not None and selection.takes(name))
            if not alone and (owner := first.setdefault(memory, name)) != name:
                tied[name] = owner
                continue
            runs[name] = _copy(tensor, shape, start * math.prod(shape[1:]), native, f"tensor {name}")
        return Snapshot(runs, tied)


@dataclass(frozen=True, slots=True)
class Section:
    """Runs by name, and their pieces in order with the bits of each."""

    runs: Mapping[str, Run]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for name, run in self.runs.items() for piece in cut(name, run.type, run.start, run.size)]

    def bits(self, piece: Piece) -> Bits:
        run = self.runs[piece.tensor]
        first = run.start // run.type.kind.per_item
        return run.bits[piece.items.start - first : piece.items.stop - first]


def sections(
    snapshot: Snapshot, formats: Sequence[str], selection: Selection, before: Mapping[str, Section]
) -> dict[str, Section]:
    """The snapshot in every format. ``before``: the last version's sections, whose scales are kept where they still fit."""
    if NATIVE in formats:
        return {NATIVE: Section(snapshot.runs)}
    taken = {name for name, run in snapshot.runs.items() if selection.takes(name) and len(run.type.shape) == 2}
    found = {SHARED: Section({name: run for name, run in snapshot.runs.items() if name not in taken})}
    matrices = {name: run for name, run in snapshot.runs.items() if name in taken}
    for format in formats:
        if format == "bf16":
            found[format] = Section(matrices)
            continue
        like = before[format].runs if format in before else {}
        runs: dict[str, Run] = {}
        for name, run in matrices.items():
            runs |= _quantised(name, run, format, like)
        found[format] = Section(runs)
    return found


def stream_sections(format: str) -> tuple[str, ...]:
    """The sections that make a stream, in the order of its schema's pieces."""
    return (NATIVE,) if format == NATIVE else (SHARED, format)


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Raises BadInput for none, unknown ones, repeated ones, and native beside others."""
    odd = [name for name in formats if name not in FORMATS]
    if not formats or odd or len(set(formats)) < len(formats) or (NATIVE in formats and len(formats) > 1):
        mend = f"one or more of {', '.join(f for f in FORMATS if f != NATIVE)}, each once, or {NATIVE} alone"
        raise BadInput(f"cannot publish in {', '.join(formats) or 'no format'}", where="formats", mend=mend)
    return tuple(formats)


def _checked(shard: Shard, name: str) -> Tensor:
    rows, shape = tuple(shard.rows.shape), shard.shape
    if not shape or rows[1:] != shape[1:] or not 0 <= shard.start <= shard.start + rows[0] <= shape[0]:
        raise BadInput(f"rows of shape {rows} from {shard.start} on are no part of {shape}", where=f"tensor {name}")
    return shard.rows


def _copy(tensor: Tensor, shape: tuple[int, ...], start: int, native: bool, where: str) -> Run:
    import torch

    if not native and not tensor.is_floating_point():
        raise BadInput(f"it has type {tensor.dtype}; weights are floating point", where=where)
    copied = tensor.detach().to("cpu", tensor.dtype if native else torch.bfloat16, copy=True)
    kind = element_type(copied, where=where) if native else BF16
    return Run(TensorType(kind, shape), start, to_bits(copied, kind))


def _quantised(name: str, run: Run, format: str, like: Mapping[str, Run]) -> dict[str, Run]:
    """A matrix's codes and scales as tensors, by their names in a checkpoint."""
    from farflung.formats.checkpoint import from_tensors, to_tensors
    from farflung.formats.weights import quantise

    rows, columns = run.type.shape
    if run.size != rows * columns:
        raise BadInput(
            f"{format} cannot be made of a part of it", where=f"tensor {name}", mend="publish bf16 from shards"
        )
    chosen = next(f for f in get_args(WeightFormat) if f == format)
    parts = {name + suffix: like[name + suffix] for suffix in SUFFIXES if name + suffix in like}
    held = {key: from_bits(part.bits, part.type.kind, part.type.shape) for key, part in parts.items()}
    try:
        last = from_tensors(held, name, chosen, rows, columns)
    except BadInput:
        last = None  # it is new, or had another shape, or was not quantised
    tensors = to_tensors(name, quantise(from_bits(run.bits, BF16, (rows, columns)), chosen, name=name, like=last))
    found: dict[str, Run] = {}
    for key, tensor in tensors.items():
        packed = key == name and format in ("mxfp4", "nvfp4")
        kind = element_type(tensor, where=f"tensor {key}", packed=packed)
        found[key] = Run(TensorType(kind, tuple(tensor.shape)), 0, to_bits(tensor, kind))
    return found


def schema_of(parts: Sequence[Section], tied: Mapping[str, str]) -> Schema:
    """The schema of sections that one process holds whole. Raises BadInput for a tensor of which it holds a part."""
    runs = {name: run for section in parts for name, run in section.runs.items()}
    for name, run in runs.items():
        if run.size != run.type.size:
            raise BadInput(f"{run.size} of its {run.type.size} elements are here", where=f"tensor {name}")
    types = {name: run.type for name, run in runs.items()}
    return Schema(types, tuple(piece for section in parts for piece in section.pieces), tied)


def split(image: Image, format: str, selection: Selection) -> dict[str, Section]:
    """A stream's image as its sections, over the same memory."""
    types = image.schema.tensors
    runs: dict[str, dict[str, Run]] = {name: {} for name in stream_sections(format)}
    for name, type in types.items():
        weight = next((w for suffix in SUFFIXES if selection.takes(w := name.removesuffix(suffix))), None)
        shared = format != NATIVE and (weight is None or weight not in types or len(types[weight].shape) != 2)
        runs[SHARED if shared else format][name] = Run(type, 0, image.arrays[name])
    return {name: Section(found) for name, found in runs.items()}
