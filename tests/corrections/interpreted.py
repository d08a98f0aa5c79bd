"""Compares the Triton kernels with the plain operations. Run by test_triton, in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from farflung.corrections import rows, triton_rows


def check(width: int, left_kind: torch.dtype, right_kind: torch.dtype) -> None:
    g = torch.Generator().manual_seed(width)
    sizes = torch.tensor([0, 3, 1, 0, 19, 2, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.randint(0, 23, (int(sizes.sum()),), generator=g)
    left = torch.randn(len(sizes), width, generator=g).to(left_kind)
    right = torch.randn(23, width, generator=g).to(right_kind)
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(
        triton_rows.dots(left, right, ids, offsets), rows.dots(left, right, ids, offsets), **close
    )
    # Rows whose columns do not lie side by side.
    aside = torch.empty(width, 23, dtype=right_kind).t().copy_(right)
    torch.testing.assert_close(
        triton_rows.dots(left, aside, ids, offsets), rows.dots(left, right, ids, offsets), **close
    )
    scale = torch.randn(len(ids), generator=g).to(rows.wide(left, right))
    got, want = triton_rows.bags(right, ids, offsets, scale), rows.bags(right, ids, offsets, scale)
    torch.testing.assert_close(got, want, **close)
    places = torch.randperm(23, generator=g)[: len(sizes)]
    got, want = right.clone(), right.clone()
    triton_rows.add_bags(got, places, left, ids % len(left), offsets, scale)
    rows.add_bags(want, places, left, ids % len(left), offsets, scale)
    turned = torch.empty(width, 23, dtype=right_kind).t().copy_(right)
    triton_rows.add_bags(turned, places, left, ids % len(left), offsets, scale)
    assert torch.equal(turned, got)
    narrow = right_kind == torch.bfloat16
    torch.testing.assert_close(got, want, **({"rtol": 2e-2, "atol": 2e-2} if narrow else close))
    untouched = torch.ones(23, dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(got[untouched], right[untouched])


def main() -> None:
    for width in (1, 40, 300, 1100):
        check(width, torch.float32, torch.float32)
    check(300, torch.bfloat16, torch.bfloat16)
    check(300, torch.bfloat16, torch.float32)
    check(40, torch.float64, torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    empty = triton_rows.dots(torch.ones(0, 4), torch.ones(3, 4), none, torch.zeros(1, dtype=torch.int64))
    assert empty.shape == (0,)
    assert not triton_rows.bags(torch.ones(3, 4), none, torch.zeros(3, dtype=torch.int64), torch.zeros(0)).any()


if __name__ == "__main__":
    main()
