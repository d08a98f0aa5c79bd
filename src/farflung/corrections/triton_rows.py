"""The operations of ``rows`` as Triton kernels; imported only where a GPU and Triton are there.

One program per dot product, and one per bag and block of columns: rows are read where they lie and widened in registers,
nothing is written but the results, and no two programs write to one place, so there are no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from farflung.corrections.rows import wide

DOT_BLOCK = 1024
"""Columns at a time in a dot product."""
BAG_BLOCK, BAG_ROWS = 256, 8
"""Columns per program and rows at a time of a bag, so that several loads are under way."""


@triton.jit  # type: ignore[untyped-decorator]
def _dots(left, right, owner, ids, out, width, left_stride, right_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.program_id(0)
    left += tl.load(owner + k) * left_stride
    right += tl.load(ids + k) * right_stride
    kind = out.dtype.element_ty
    total = tl.zeros([BLOCK], kind)
    for at in range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < width
        a = tl.load(left + columns, mask=inside, other=0).to(kind)
        b = tl.load(right + columns, mask=inside, other=0).to(kind)
        total += a * b
    tl.store(out + k, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _bags(  # type: ignore[no-untyped-def]
    table, entries, offsets, scale, out, places, width, stride, out_stride, out_step,
    ADD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bag = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    kind = scale.dtype.element_ty
    end = tl.load(offsets + bag + 1)
    total = tl.zeros([BLOCK], kind)
    for at in range(tl.load(offsets + bag), end, ROWS):
        k = at + tl.arange(0, ROWS)
        live = k < end
        row = tl.load(entries + k, mask=live, other=0)
        factor = tl.load(scale + k, mask=live, other=0)
        tile = table + row[:, None] * stride + columns[None, :]
        values = tl.load(tile, mask=live[:, None] & inside[None, :], other=0).to(kind)
        total += tl.sum(values * factor[:, None], 0)
    place = bag.to(tl.int64)
    if ADD:
        place = tl.load(places + bag)
    where = out + place * out_stride + columns.to(tl.int64) * out_step
    if ADD:
        total += tl.load(where, mask=inside, other=0).to(kind)
    tl.store(where, total.to(out.dtype.element_ty), mask=inside)


def dots(left: Tensor, right: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """As ``rows.dots``."""
    left, right = _rows(left), _rows(right)
    out = torch.empty(len(ids), dtype=wide(left, right), device=left.device)
    owner = torch.repeat_interleave(offsets.diff())
    if len(ids):
        _dots[(len(ids),)](
            left, right, owner, ids, out, left.shape[1], left.stride(0), right.stride(0), BLOCK=DOT_BLOCK
        )
    return out


def bags(table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    """As ``rows.bags``."""
    out = torch.empty(len(offsets) - 1, table.shape[1], dtype=scale.dtype, device=table.device)
    _launch(table, entries, offsets, scale, out, None)
    return out


def add_bags(target: Tensor, places: Tensor, table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor) -> None:
    """As ``rows.add_bags``."""
    _launch(table, entries, offsets, scale, target, places)


def _launch(table: Tensor, entries: Tensor, offsets: Tensor, scale: Tensor, out: Tensor, places: Any) -> None:
    table, count, width = _rows(table), len(offsets) - 1, table.shape[1]
    if count and width:
        _bags[(count, triton.cdiv(width, BAG_BLOCK))](
            table, entries, offsets, scale.contiguous(), out, offsets if places is None else places,
            width, table.stride(0), out.stride(0), out.stride(1), ADD=places is not None, BLOCK=BAG_BLOCK, ROWS=BAG_ROWS,
        )  # fmt: skip


def _rows(table: Tensor) -> Tensor:
    """The same values with columns side by side, as the kernels read them."""
    return table if table.stride(1) == 1 else table.contiguous()
