"""Rows of large matrices picked by id: dot products with them, weighted sums of them, sums added into them.

All the work of a candidate-only head is one of these three, and none of them makes a copy of the rows it reads unless the
matrix is narrower than float32 (then in pieces that fit a cache). Sums run in a fixed order, so results do not depend on
the run. On a GPU with Triton the kernels in ``triton_rows`` do the same.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

CACHED, STREAMED = 1 << 18, 1 << 22
"""Values in a temporary at once, on a CPU (1 MiB in float32 stays in a core's cache) and on other devices."""

TRITON = importlib.util.find_spec("triton") is not None


def dots(left: Tensor, right: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """<left_t, right[ids_k]> for offsets[t] <= k < offsets[t + 1]: [n], float32 or wider.

    left [N, d], right [V, d] of any float types; ids [n] and offsets [N + 1] int64. ``ids`` must be within ``right``.
    """
    if left.is_cuda and TRITON:
        from farflung.corrections import triton_rows

        return triton_rows.dots(left, right, ids, offsets)
    dtype = wide(left, right)
    if right.device.type == "cpu" and right.dtype == dtype:
        return _sampled(left.to(dtype), right, ids, offsets)
    out = torch.empty(len(ids), dtype=dtype, device=left.device)
    owner = torch.repeat_interleave(offsets.diff())
    for piece in _pieces(len(ids), right):
        rows = right.index_select(0, ids[piece]).to(dtype)
        torch.sum(rows.mul_(left.index_select(0, owner[piece])), -1, out=out[piece])
    return out


def bags(table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    """Row t: the sum of scale_k * table[entries_k] over offsets[t] <= k < offsets[t + 1]; [bags, d] in scale's type."""
    if table.is_cuda and TRITON:
        from farflung.corrections import triton_rows

        return triton_rows.bags(table, entries, offsets, scale)
    if table.dtype == scale.dtype:
        return _bags(table, entries, offsets, scale)
    sums = torch.zeros(len(offsets) - 1, table.shape[1], dtype=scale.dtype, device=table.device)
    for piece in _pieces(len(entries), table):
        # A bag may lie in several pieces; each adds its part to the bags that it touches.
        first = int(torch.searchsorted(offsets, piece.start, right=True)) - 1
        last = int(torch.searchsorted(offsets, piece.stop))
        part = offsets[first : last + 1].clamp(piece.start, piece.stop) - piece.start
        rows = table.index_select(0, entries[piece]).to(scale.dtype)
        sums[first:last] += _bags(rows, torch.arange(len(rows), device=rows.device), part, scale[piece])
    return sums


def add_bags(target: Tensor, places: Tensor, table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> None:
    """target[places_t] += bag t, in place and touching no other row; ``places`` [bags] int64 are all different.

    Sums are in scale's type and rounded to the target's once.
    """
    if target.is_cuda and TRITON:
        from farflung.corrections import triton_rows

        triton_rows.add_bags(target, places, table, entries, offsets, scale)
        return
    table = table.to(scale.dtype)
    for piece in _pieces(len(places), target):
        ends = offsets[piece.start : piece.stop + 1]
        low, high = int(ends[0]), int(ends[-1])
        sums = _bags(table, entries[low:high], ends - low, scale[low:high])
        target.index_add_(0, places[piece], sums.to(target.dtype))


def wide(*tensors: Tensor) -> torch.dtype:
    """The type to compute in: float32, or float64 where one of the tensors has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _pieces(count: int, table: Tensor) -> list[slice]:
    step = max(1, (CACHED if table.device.type == "cpu" else STREAMED) // table.shape[1])
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def _sampled(left: Tensor, right: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """torch's product of two matrices at chosen entries: each row is read once, where it lies."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        chosen = torch.sparse_csr_tensor(
            offsets, ids, torch.zeros(len(ids), dtype=left.dtype), (len(left), len(right)), check_invariants=False
        )
    values: Tensor = torch.sparse.sampled_addmm(chosen, left, right.t(), beta=0.0).values()
    return values


def _bags(table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    return embedding_bag(entries, table, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True)
