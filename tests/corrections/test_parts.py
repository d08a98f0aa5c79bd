"""The candidate-only head on its own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.corrections import Supports
from farflung.corrections.head import candidate_logits


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_candidate_logits_are_rows_of_the_head(seed: int, dtype: torch.dtype, with_bias: bool) -> None:
    """Values and gradients against the dense product, from hidden states of any type and repeated candidates."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(6, 3, generator=g, dtype=wide).to(dtype).requires_grad_()
    head = torch.randn(9, 3, generator=g, dtype=wide).requires_grad_()
    bias = torch.randn(9, generator=g, dtype=wide).requires_grad_() if with_bias else None
    sizes = torch.randint(1, 6, (6,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.cat([torch.randperm(9, generator=g)[:n] for n in sizes.tolist()])
    supports = Supports(ids, torch.zeros(len(ids)), offsets)
    logits = candidate_logits(hidden, head, bias, supports)
    dense = hidden.to(wide) @ head.T + (0 if bias is None else bias)
    expected = dense[supports.rows, ids]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if wide == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits, expected, **tolerance)
    upstream = torch.randn(len(ids), generator=g, dtype=wide)
    inputs = [t for t in (hidden, head, bias) if t is not None]
    got, want = torch.autograd.grad(logits, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
