"""From a trainer's tensors to what is published in each format: sections of tensors, cut into pieces.

A stream is a format's whole version. It has two sections: ``shared``, the tensors that no format quantises (embeddings, LM
head, norms, biases and what is excluded), in BF16 and the same objects for all formats; and the format's own: matrices in
BF16, or their codes and scales. ``native`` is a stream of tensors as they are, in one section of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.selection import Selection
from farflung.weights.elements import ELEMENT_TYPES, Bits, element_type, from_bits, to_bits
from farflung.weights.ranks import ALONE, Ranks, together
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

    @staticmethod
    def of(name: str, tensor: Tensor) -> Shard | None:
        """What this rank publishes of a tensor, or of a DTensor cut along its rows; None where another rank does.

        Raises BadInput for a DTensor that is cut otherwise.
        """
        import torch
        import torch.distributed as dist

        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            what = (
                "it is on the meta device, without values"
                if isinstance(tensor, torch.Tensor)
                else f"it is a {type(tensor)}"
            )
            raise BadInput(what, where=f"tensor {name}", mend="publish tensors that have values")
        if tensor.layout != torch.strided:
            raise BadInput(
                f"its layout is {tensor.layout}", where=f"tensor {name}", mend="publish it dense: .to_dense()"
            )
        if not dist.is_available() or not dist.is_initialized():
            return Shard(tensor, 0, tuple(tensor.shape))
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return Shard(tensor, 0, tuple(tensor.shape))
        mesh, rows = tensor.device_mesh, tensor.shape[0] if tensor.ndim else 1
        start, whole = 0, True
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                if mesh.get_local_rank(dim):
                    return None
            elif placement.is_shard(0) and whole:
                chunk = -(-rows // mesh.size(dim))
                start, whole = min(rows, chunk * mesh.get_local_rank(dim)), False
            else:
                what = f"it is cut as {', '.join(map(str, tensor.placements))}"
                raise BadInput(
                    what, where=f"tensor {name}", mend="shard along rows (dimension 0), over one mesh dimension"
                )
        local = tensor.to_local()
        return Shard(local, start, tuple(tensor.shape)) if local.numel() or not tensor.numel() else None


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
        if not callable(getattr(weights, "items", None)):
            what = f"the weights are a {type(weights).__name__}, not names with tensors"
            raise BadInput(what, where="publish", mend="give model.state_dict(), or dict(model.named_parameters())")
        if not weights:
            raise BadInput("there are no tensors to publish")
        runs: dict[str, Run] = {}
        tied: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, given in weights.items():
            shard = _checked(given, name) if isinstance(given, Shard) else Shard.of(name, given)
            if shard is None:
                continue
            tensor, start, shape = shard.rows, shard.start, shard.shape
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
            alone = not tensor.numel() or (selection is not None and _quantised_in(selection, name, shape))
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
    snapshot: Snapshot,
    formats: Sequence[str],
    selection: Selection,
    before: Mapping[str, Section],
    ranks: Ranks = ALONE,
) -> dict[str, Section]:
    """The snapshot in every format. ``before``: the last version's sections, whose scales are kept where they still fit.

    Every rank calls it; what one rank meets, all raise.
    """
    if NATIVE in formats:
        return {NATIVE: Section(snapshot.runs)}
    taken = {name for name, run in snapshot.runs.items() if _quantised_in(selection, name, run.type.shape)}
    found = {SHARED: Section({name: run for name, run in snapshot.runs.items() if name not in taken})}
    matrices = {name: run for name, run in snapshot.runs.items() if name in taken}
    for format in formats:
        if format == "bf16":
            found[format] = Section(matrices)
            continue
        like = before[format].runs if format in before else {}
        matrix = _matrix_scales(matrices, like, ranks) if format == "nvfp4" and ranks.size > 1 else {}
        runs: dict[str, Run] = {}
        together(ranks, partial(_quantise, matrices, format, like, matrix, runs))
        if clash := sorted(runs.keys() & found[SHARED].runs.keys()):
            what = f"{format} has a tensor of this name for the matrix's scales"
            raise BadInput(
                what, where=f"tensor {clash[0]}", mend="rename it, exclude its matrix, or leave the format out"
            )
        found[format] = Section(runs)
    return found


def _quantised_in(selection: Selection, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one of those that formats quantise: a matrix with elements that is not excluded."""
    return selection.takes(name) and len(shape) == 2 and 0 not in shape


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


def _checked(shard: Shard, name: str) -> Shard:
    rows, shape = tuple(shard.rows.shape), shard.shape
    if not shape or rows[1:] != shape[1:] or not 0 <= shard.start <= shard.start + rows[0] <= shape[0]:
        raise BadInput(f"rows of shape {rows} from {shard.start} on are no part of {shape}", where=f"tensor {name}")
    return shard


def _copy(tensor: Tensor, shape: tuple[int, ...], start: int, native: bool, where: str) -> Run:
    import torch

    if not native and not tensor.is_floating_point():
        what, mend = (
            f"it has type {tensor.dtype}; weights are floating point",
            "leave buffers out, or publish as native",
        )
        raise BadInput(what, where=where, mend=mend)
    copied = tensor.detach().to("cpu", tensor.dtype if native else torch.bfloat16, copy=True)
    kind = element_type(copied, where=where) if native else BF16
    return Run(TensorType(kind, shape), start, to_bits(copied, kind))


@dataclass(frozen=True, slots=True)
class _MatrixScale:
    """Of a matrix that several ranks hold: its largest magnitude, and the scale that it had in the last version."""

    largest: float
    before: float | None


def _matrix_scales(matrices: Mapping[str, Run], like: Mapping[str, Run], ranks: Ranks) -> dict[str, _MatrixScale]:
    """What NVFP4 needs to know of whole matrices; every rank calls it."""
    mine: dict[str, tuple[float, float | None]] = {}
    for name, run in matrices.items():
        values = from_bits(run.bits, BF16, (run.size,))
        held = like.get(f"{name}_scale_2")
        scale = None if held is None else float(from_bits(held.bits, held.type.kind, ()))
        mine[name] = (float(values.abs().amax()) if run.size else 0.0, scale)
    found: dict[str, _MatrixScale] = {}
    for raw in ranks.gather(json.dumps(mine).encode()):
        for name, (largest, scale) in json.loads(raw).items():
            other = found.get(name, _MatrixScale(0.0, None))
            known = other.before if scale is None else scale
            found[name] = _MatrixScale(max(largest, other.largest), known)
    return found


def _quantise(
    matrices: Mapping[str, Run],
    format: str,
    like: Mapping[str, Run],
    scales: Mapping[str, _MatrixScale],
    runs: dict[str, Run],
) -> None:
    """Put the matrices' codes and scales into ``runs``."""
    for name, run in matrices.items():
        runs |= _quantised(name, run, format, like, scales.get(name))


def _quantised(
    name: str, run: Run, format: str, like: Mapping[str, Run], matrix: _MatrixScale | None
) -> dict[str, Run]:
    """The codes and scales of a matrix, or of the rows of it that this rank holds, by their names in a checkpoint."""
    import torch

    from farflung.formats.checkpoint import from_tensors, to_tensors
    from farflung.formats.weights import FP8_BLOCK, quantise

    rows, columns = run.type.shape
    first, last = run.start // columns, (run.start + run.size) // columns
    if format == "fp8" and (first % FP8_BLOCK or (last % FP8_BLOCK and last < rows)):
        what = f"rows {first} to {last} of {rows} do not end where blocks of {FP8_BLOCK} do"
        raise BadInput(
            what, where=f"tensor {name}", mend=f"shard it at multiples of {FP8_BLOCK} rows, or leave fp8 out"
        )

    def height(key: str) -> int:
        """Rows of the matrix that a row of one of its tensors is for."""
        return FP8_BLOCK if key.endswith("_scale_inv") else 1

    chosen = next(f for f in get_args(WeightFormat) if f == format)
    keys = [
        key
        for s in SUFFIXES
        if (key := name + s) in like and like[key].type.shape[:1] in ((), (-(-rows // height(key)),))
    ]
    before = None
    with suppress(BadInput):  # it is new, or had another shape, or was not quantised
        held = {key: _rows(like[key], first // height(key), -(-last // height(key))) for key in keys}
        if matrix is not None and matrix.before is not None:
            held[f"{name}_scale_2"] = torch.tensor(matrix.before, dtype=torch.float32)
        before = from_tensors(held, name, chosen, last - first, columns)
    weight = from_bits(run.bits, BF16, (last - first, columns))
    largest = None if matrix is None else matrix.largest
    found: dict[str, Run] = {}
    for key, tensor in to_tensors(name, quantise(weight, chosen, name=name, like=before, largest=largest)).items():
        packed = key == name and format in ("mxfp4", "nvfp4")
        kind = element_type(tensor, where=f"tensor {key}", packed=packed)
        if not tensor.ndim:
            if not first:  # a matrix's own scale is published by the rank that has its first row
                found[key] = Run(TensorType(kind, ()), 0, to_bits(tensor, kind))
            continue
        shape = (-(-rows // height(key)), *tensor.shape[1:])
        start = first // height(key) * math.prod(shape[1:]) * kind.per_item
        found[key] = Run(TensorType(kind, shape), start, to_bits(tensor, kind))
    return found


def _rows(run: Run, first: int, last: int) -> Tensor:
    """Rows ``first`` to ``last`` of a run that holds them; a scale of a whole matrix has no rows."""
    shape = run.type.shape
    if not shape:
        return from_bits(run.bits, run.type.kind, ())
    row, offset = math.prod(shape[1:]), run.start // run.type.kind.per_item
    part = run.bits[first * row - offset : last * row - offset]
    return from_bits(part, run.type.kind, (last - first, *shape[1:]))


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
        suffixes = SUFFIXES[:1] if format == "bf16" else SUFFIXES
        weights = [w for suffix in suffixes if name.endswith(suffix) and (w := name.removesuffix(suffix)) in types]
        own = any(_quantised_in(selection, weight, types[weight].shape) for weight in weights)
        shared = format != NATIVE and not own
        runs[SHARED if shared else format][name] = Run(type, 0, image.arrays[name])
    return {name: Section(found) for name, found in runs.items()}


def layout(section: Section) -> list[Any]:
    """What another rank must know of this one's section, as plain data."""
    return [[name, run.type.kind.name, list(run.type.shape), run.start, run.size] for name, run in section.runs.items()]


def merge_layouts(ranks: Sequence[Sequence[tuple[Sequence[Any], Mapping[str, str]]]]) -> Schema:
    """The schema of a stream of which every rank holds a part. ``ranks``: by rank, by section, (layout, tied).

    Raises BadInput when the parts do not cover each tensor once, in the order of ranks.
    """
    types: dict[str, TensorType] = {}
    covered: dict[str, int] = {}
    pieces: list[Piece] = []
    tied: dict[str, str] = {}
    for section in range(len(ranks[0])):
        for rank, parts in enumerate(ranks):
            tied |= parts[section][1]
            for name, kind, shape, start, size in parts[section][0]:
                type = types.setdefault(name, TensorType(ELEMENT_TYPES[kind], tuple(shape)))
                if type != TensorType(ELEMENT_TYPES[kind], tuple(shape)) or start != covered.get(name, 0):
                    what = f"rank {rank} holds elements from {start} on, but the ranks before it end at {covered.get(name, 0)}"
                    raise BadInput(what, where=f"tensor {name}", mend="shard by rows, in the order of ranks")
                covered[name] = start + size
                pieces += cut(name, type, start, size)
    for name, type in types.items():
        if covered[name] != type.size:
            raise BadInput(f"the ranks hold {covered[name]} of its {type.size} elements", where=f"tensor {name}")
    return Schema(types, tuple(pieces), tied)
