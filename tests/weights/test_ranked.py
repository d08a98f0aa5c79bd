"""Changes in the words of the old weights: exact, smaller than plain ones, and refused for other weights."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import FolderStore, Publisher, Subscriber, changes, delta, kernels, ranked
from farflung.weights.delta import Change
from farflung.weights.elements import ELEMENT_TYPES, Bits
from farflung.weights.schema import Schema, TensorType, cut

BF16 = ELEMENT_TYPES["BF16"]


def bits(values: torch.Tensor) -> Bits:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16).copy()


def step(size: int, seed: int, lr: float) -> tuple[Bits, Bits]:
    """Gaussian weights before and after a step of about ``lr`` for each."""
    draw = torch.Generator().manual_seed(seed)
    weights = 0.028 * torch.randn(size, generator=draw)
    return bits(weights), bits(weights + lr * torch.randn(size, generator=draw))


@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
@given(
    seed=st.integers(0, 999),
    size=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    wild=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_changes_come_back_in_place(compiled: bool, seed: int, size: int, share: float, wild: bool) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 2**16, size, np.uint64).astype(np.uint16) if wild else step(size, seed, 0.0)[0]
    after = before.copy()
    after[rng.random(size) < share] += 1
    change = changes.find(before, after, BF16)
    with mock.patch.object(kernels, "worth", return_value=compiled):
        told = ranked.rank(before, change)
        back = ranked.place(before, told, "object")
    assert sum(told.sizes) == size
    assert len(told) == len(change)
    assert back.positions.tolist() == change.positions.tolist()
    assert back.steps.tolist() == change.steps.tolist()


@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
def test_other_weights_are_refused(compiled: bool) -> None:
    before, after = step(5000, 1, 1e-5)
    told = ranked.rank(before, changes.find(before, after, BF16))
    with mock.patch.object(kernels, "worth", return_value=compiled):
        for other in (step(5000, 2, 0.0)[0], before[:-1], np.zeros_like(before)):
            with pytest.raises(Corrupt, match="other weights"):
                ranked.place(other, told, "object")


@pytest.mark.parametrize(("lr", "most"), [(1e-5, 0.8), (1e-6, 0.8), (1e-7, 0.8)])
def test_it_is_smaller_than_positions_without_structure_can_be(lr: float, most: float) -> None:
    """On steps that are about as large for all weights. 0.8 of the plain object's bytes, and below its entropy bound."""
    before, after = step(8 << 20, 0, lr)
    schema = Schema({"w": TensorType(BF16, (len(before),))}, tuple(cut("w", TensorType(BF16, (len(before),)))), {})
    plain = delta.compare(0, schema.pieces[0], before, after)
    assert plain is not None
    small = delta.smaller(plain, schema.pieces[0], before)
    as_plain, as_small = delta.encode([plain], schema), delta.encode([small], schema)
    assert len(as_small.raw) < most * len(as_plain.raw)
    assert len(as_small.raw) < as_plain.bound
    (back,) = delta.decode(as_small.raw, schema, where="object", ranked=True)
    found = before.copy()
    delta.apply(found, back.content, BF16)
    assert np.array_equal(found, after)


def test_without_the_old_bits_it_is_neither_taken_back_nor_folded() -> None:
    before, after = step(1 << 16, 0, 1e-5)
    plain = changes.find(before, after, BF16)
    told = ranked.rank(before, plain)
    with pytest.raises(BadInput, match="taken back"):
        delta.invert(told, BF16)
    for pair in ((told, plain), (plain, told)):
        first, second = (Change(0, b"", content) for content in pair)
        with pytest.raises(BadInput, match="folded where the old bits are"):
            delta.fold(first, second, BF16)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_spoilt_object_is_refused_or_right(data: st.DataObject) -> None:
    before, after = step(1 << 16, 3, 1e-5)
    kind = TensorType(BF16, (len(before),))
    schema = Schema({"w": kind}, tuple(cut("w", kind)), {})
    plain = delta.compare(0, schema.pieces[0], before, after)
    assert plain is not None
    raw = bytearray(delta.encode([delta.smaller(plain, schema.pieces[0], before)], schema).raw)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        (change,) = delta.decode(bytes(raw), schema, where="object", ranked=True)
        delta.apply(before, change.content, BF16)
    except Corrupt:
        return
    assert change.piece == 0


def test_a_subscriber_that_asks_for_it_fetches_less_and_gets_the_same(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.up_proj.weight"
    policy = {name: 0.028 * torch.randn(1024, 1024, generator=draw), "model.norm.weight": torch.ones(1024)}
    store = FolderStore(tmp_path)
    publisher = Publisher(store, "run", formats=("bf16", "fp8"), small=True)
    plain, small = Subscriber(store, "run"), Subscriber(store, "run", small=True)
    publisher.publish(0, policy)
    plain.fetch(0)
    small.fetch(0)
    for version in (1, 2, 3):
        policy[name] += 1e-6 * torch.randn(1024, 1024, generator=draw)
        publisher.publish(version, policy)
        if version == 2:
            continue  # both are two versions behind then, and take what can be folded
        left, right = plain.fetch(version), small.fetch(version)
        assert torch.equal(left.tensors[name], policy[name].bfloat16())
        assert torch.equal(right.tensors[name], policy[name].bfloat16())
        assert left.changed is not None
        assert right.changed is not None
        assert left.changed[name].tolist() == right.changed[name].tolist()
        assert (right.bytes < 0.85 * left.bytes) == (version == 1)
