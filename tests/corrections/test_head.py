"""The candidate-only head: values and gradients, gradients put in place, and what it never allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from farflung.corrections import (
    Masked,
    Plain,
    Supports,
    candidate_loss,
    rows,
    vocabulary,
    vocabulary_loss,
)
from farflung.corrections.head import candidate_logits
from farflung.corrections.supports import Kind

ROWS, WIDTH, VOCABULARY = 7, 5, 11
KINDS = [torch.float64, torch.float32, torch.bfloat16]


def draw(
    seed: int, *, least: int = 0, vocabulary: int = VOCABULARY, count: int = ROWS, kind: Kind = "top_p"
) -> Supports:
    """Supports with repeated candidates between rows and, unless ``least`` forbids them, empty rows."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(least, 5, (count,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.cat([torch.randperm(vocabulary, generator=g)[:n] for n in sizes.tolist()])
    parts = torch.randn(len(ids), generator=g, dtype=torch.float64).split(sizes.tolist())
    return Supports(ids, torch.cat([part.log_softmax(-1) for part in parts]), offsets, kind)


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, supports: Supports, softcap: float | None) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits[supports.rows, supports.ids]


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 2**31), st.sampled_from(KINDS), st.sampled_from(KINDS), st.booleans(),
    st.sampled_from([None, 0.8, 30.0]), st.sampled_from([1, 2 * WIDTH, 1 << 18]),
)  # fmt: skip
def test_logits_and_gradients_are_those_of_the_dense_product(
    seed: int, hidden_kind: torch.dtype, weight_kind: torch.dtype, with_bias: bool, softcap: float | None, cached: int
) -> None:
    """For every pair of types, in pieces of any size. In bfloat16 gradients are right to its rounding."""
    g = torch.Generator().manual_seed(seed)

    def leaf(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(kind).requires_grad_()

    hidden, weight = leaf(hidden_kind, ROWS, WIDTH), leaf(weight_kind, VOCABULARY, WIDTH)
    bias = leaf(weight_kind, VOCABULARY) if with_bias else None
    supports = draw(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CACHED", cached)
        got = candidate_logits(hidden, weight, bias, supports, softcap=softcap)
        upstream = torch.randn(len(got), generator=g, dtype=torch.float64).to(got.dtype)
        inputs = [t for t in (hidden, weight, bias) if t is not None]
        gradients = torch.autograd.grad(got, inputs, upstream)
    want = dense(hidden, weight, bias, supports, softcap)
    assert got.dtype == want.dtype
    exact = got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    for tensor, a, b in zip(inputs, gradients, torch.autograd.grad(want, inputs, upstream), strict=True):
        assert a.dtype == tensor.dtype
        tolerance = 2e-2 if a.dtype == torch.bfloat16 else 1e-10 if exact and a.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_weight_that_does_not_lie_in_rows() -> None:
    supports, hidden, weight = draw(0), torch.randn(ROWS, WIDTH), torch.randn(WIDTH, VOCABULARY)
    got = candidate_logits(hidden, weight.T, None, supports)
    torch.testing.assert_close(got, candidate_logits(hidden, weight.T.contiguous(), None, supports))


@pytest.mark.parametrize("count", [0, 3])
def test_no_candidates_at_all(count: int) -> None:
    hidden, weight = torch.randn(count, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logits = candidate_logits(
        hidden, weight, None, Supports(none, torch.zeros(0), none.new_zeros(count + 1)), in_place=True
    )
    assert logits.shape == (0,)
    logits.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


# In place.


def both(run: Callable[[Tensor, bool], None], weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The weight's gradient by the ordinary way and in place."""
    found = []
    for in_place in (False, True):
        leaf = weight.clone().requires_grad_()
        run(leaf, in_place)
        found.append(leaf.grad)
    return found[0], found[1]


def same(run: Callable[[Tensor, bool], None], dtype: torch.dtype = torch.float64) -> None:
    torch.manual_seed(0)
    ordinary, placed = both(run, torch.randn(VOCABULARY, WIDTH, dtype=dtype))
    assert ordinary is not None
    assert ordinary.any()
    torch.testing.assert_close(placed, ordinary, rtol=1e-12, atol=1e-12)


def states(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss(hidden: Tensor, weight: Tensor, seed: int, in_place: bool) -> Tensor:
    """One whose gradient depends on the logits."""
    return candidate_logits(hidden, weight, None, draw(seed), in_place=in_place).square().sum()


def test_in_place_over_packs() -> None:
    def run(weight: Tensor, in_place: bool) -> None:
        for seed in range(3):
            loss(states(seed), weight, seed, in_place).backward()

    same(run)


def test_in_place_used_twice_and_kept() -> None:
    def run(weight: Tensor, in_place: bool) -> None:
        total = loss(states(0), weight, 0, in_place) + loss(states(1), weight, 1, in_place)
        total.backward(retain_graph=True)
        total.backward()

    same(run)


@pytest.mark.parametrize("sparse", [False, True])
def test_in_place_with_a_tied_embedding(sparse: bool) -> None:
    """The embedding's gradient comes after the head's, and in the second pack to a gradient that is there already."""

    def run(weight: Tensor, in_place: bool) -> None:
        for seed in range(2):
            tokens = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(seed))
            hidden = embedding(tokens, weight, sparse=sparse).sin()
            loss(hidden, weight, seed, in_place).backward()

    same(run)


def test_in_place_when_the_gradient_is_sparse() -> None:
    def run(weight: Tensor, in_place: bool) -> None:
        embedding(torch.tensor([1, 1, 4]), weight, sparse=True).sum().backward()
        loss(states(0), weight, 0, in_place).backward()
        assert weight.grad is not None
        weight.grad = weight.grad.to_dense()

    same(run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_place_within_a_checkpoint(reentrant: bool) -> None:
    def run(weight: Tensor, in_place: bool) -> None:
        hidden = states(0).requires_grad_()
        checkpoint(lambda h: loss(h.sin(), weight, 0, in_place), hidden, use_reentrant=reentrant).backward()
        assert hidden.grad is not None

    same(run)


def test_in_place_of_what_is_computed() -> None:
    """A weight that is no leaf has no gradient of its own to add to: autograd carries it on."""

    def run(weight: Tensor, in_place: bool) -> None:
        loss(states(0), 2 * weight, 0, in_place).backward()

    same(run)


@pytest.mark.parametrize("post", [False, True])
def test_in_place_leaves_hooks_their_gradient(post: bool) -> None:
    calls = []

    def run(weight: Tensor, in_place: bool) -> None:
        if post:
            weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.norm()))
        else:
            weight.register_hook(lambda grad: calls.append(grad.norm()))
        loss(states(0), weight, 0, in_place).backward()

    same(run)
    assert calls[0] == calls[1] > 0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_frozen_weight_gets_nothing(in_place: bool) -> None:
    hidden, weight = states(0).requires_grad_(), torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    loss(hidden, weight, 0, in_place).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.any()


def test_frozen_hidden_states_and_a_weight_in_bfloat16() -> None:
    def run(weight: Tensor, in_place: bool) -> None:
        for seed in range(2):
            loss(states(seed, torch.bfloat16), weight, seed, in_place).backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16

    torch.manual_seed(0)
    ordinary, placed = both(run, torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16))
    torch.testing.assert_close(placed, ordinary, rtol=2e-2, atol=2e-2)


def test_the_gradient_in_place_stays_the_tensor_it_was() -> None:
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    weight.grad = mine = torch.ones_like(weight)
    loss(states(0), weight, 0, True).backward()
    assert weight.grad is mine
    used = torch.zeros(VOCABULARY, dtype=torch.bool)
    used[draw(0).ids] = True
    assert (mine[~used] == 1).all()
    assert (mine[used] != 1).any(1).all()


# What it costs.


class Allocations(TorchDispatchMode):
    """The largest tensor made while this is active, in elements; views and what ``known`` holds do not count."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_nothing_is_as_large_as_the_weight_or_the_logits(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CACHED", 1 << 10)
    count, width, vocabulary = 60, 64, 5000
    supports = draw(3, least=1, vocabulary=vocabulary, count=count)
    hidden = torch.randn(count, width).to(kind).requires_grad_()
    weight = torch.randn(vocabulary, width).to(kind).requires_grad_()
    weight.grad, bias = torch.zeros_like(weight), torch.randn(vocabulary, requires_grad=True)
    sampled, advantages = supports.ids[supports.offsets[:-1]], torch.ones(count)
    with Allocations(hidden, weight, weight.grad) as made:
        total, _ = candidate_loss(
            hidden, weight, bias, supports, sampled, advantages,
            weight=Plain(), softcap=30.0, denominator=count, in_place=True,
        )  # fmt: skip
        total.backward()
    assert weight.grad.any()
    # The largest are the hidden states' gradient and the bias's.
    assert made.largest == max(count * width, vocabulary)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_logits_of_a_chunk_are_all_there_is(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the whole vocabulary: three rows' logits at a time, and blocks of a narrow weight."""
    count, width, size = 60, 64, 5000
    monkeypatch.setattr(vocabulary, "CHUNK", 3 * size)
    monkeypatch.setattr(vocabulary, "BLOCK", 1 << 13)
    supports = draw(3, least=1, vocabulary=size, count=count, kind="top_k")
    hidden, weight = (torch.randn(n, width).to(kind).requires_grad_() for n in (count, size))
    weight.grad, bias = torch.zeros_like(weight), torch.randn(size, requires_grad=True)
    with Allocations(hidden, weight, weight.grad) as made:
        total, _ = vocabulary_loss(
            hidden, weight, bias, torch.arange(count), torch.full((count,), -9.0), torch.ones(count),
            supports=supports, weight=Plain(), softcap=30.0, denominator=count, in_place=True,
        )  # fmt: skip
        total.backward()
    assert weight.grad.any()
    assert made.largest == 3 * size


@pytest.mark.parametrize("kind", ["top_p", "top_k"])
@pytest.mark.parametrize("narrow", ["bias", "hidden", "head"])
def test_thousands_of_rows_add_up_in_bfloat16(kind: Kind, narrow: str) -> None:
    """4,000 rows of the same two candidates: what is narrow is rounded once and never added up in its own type."""
    count = 4000
    parts = {"hidden": torch.ones(count, 2), "head": torch.zeros(3, 2), "bias": torch.zeros(3)}
    supports = Supports(
        torch.arange(2).repeat(count), torch.full((2 * count,), 0.5).log(), torch.arange(count + 1) * 2, kind
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = {n: t.to(dtype if n == narrow else torch.float32).requires_grad_() for n, t in parts.items()}
        sampled, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count)
        how = {"weight": Plain(), "centering": False, "denominator": count}
        if kind == "top_p":
            total, _ = candidate_loss(*given.values(), supports, sampled, ones, **how)  # type: ignore[arg-type]
        else:
            total, _ = vocabulary_loss(*given.values(), sampled, -ones, ones, supports=supports, **how)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(total, list(given.values())))
    assert found[0][2][0] == pytest.approx(-0.5 if kind == "top_p" else -2 / 3, rel=1e-4)
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-6)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_determinism_can_be_asked_for() -> None:
    """Every operation, with and without candidates, has a deterministic form; and the results are equal to the bit."""
    supports, heads = (draw(5, least=1, count=40, kind=kind) for kind in ("top_p", "top_k"))
    sampled = supports.ids[supports.offsets[:-1]]
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        hidden, weight = torch.randn(40, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
        bias = torch.randn(VOCABULARY, requires_grad=True)
        with deterministic():
            for run in (
                lambda **kw: candidate_loss(*kw.pop("head"), supports, sampled, torch.ones(40), **kw),
                lambda **kw: vocabulary_loss(
                    *kw.pop("head"), sampled, torch.full((40,), -1.0), torch.ones(40), supports=heads, **kw
                ),
            ):
                total, _ = run(head=(hidden, weight, bias), weight=Masked(0.5, 5.0), denominator=1, in_place=True)
                total.backward()
        results.append([hidden.grad, weight.grad, bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
