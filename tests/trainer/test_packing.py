"""Packed passes give what separate passes give: hidden states, logits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import farflung.trainer.attention as attention
from farflung.core.errors import BadInput
from farflung.trainer.model import Policy
from farflung.trainer.packing import pack
from tests.trainer.episodes import load

CPU = torch.device("cpu")
Folder = Callable[[str], Path]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Groups whose sequences begin alike for a while, some of them equal or one the beginning of another."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found, groups = [], []
    for group in range(draw(st.integers(1, 4))):
        stem = rng.integers(0, 9, 60).astype(np.int32)
        for _ in range(draw(st.integers(1, 5))):
            kept = draw(st.integers(0, 60))
            tail = rng.integers(0, 9, draw(st.integers(0 if kept else 1, 20))).astype(np.int32)
            found.append(np.concatenate([stem[:kept], tail]))
            groups.append(group)
    return found, groups


@settings(deadline=None, max_examples=150)
@given(sequences(), st.integers(1, 200), st.booleans())
def test_every_sequence_lies_whole_in_one_pack(
    drawn: tuple[list[np.ndarray], list[int]], budget: int, share: bool
) -> None:
    found, groups = drawn
    packs = pack(found, groups, budget, CPU, share=share)
    assert sorted(i for p in packs for i in p.paths) == list(range(len(found)))
    for each in packs:
        rows = len(each.ids)
        assert rows <= max(budget, *(len(found[i]) for i in each.paths))
        if len(each.paths) > 1:
            assert rows <= budget
        layout = each.layout
        assert sum(layout.own) == rows
        assert all(0 < own <= length for own, length in zip(layout.own, layout.lengths, strict=True))
        assert (layout.gather is None) == (layout.own == layout.lengths)
        used = np.zeros(rows, bool)
        for index, path in each.paths.items():
            assert torch.equal(each.ids[path], torch.from_numpy(found[index]).long())
            assert each.positions[path].tolist() == list(range(len(path)))
            used[path] = True
        assert used.all()
        if not share:
            assert rows == sum(len(found[i]) for i in each.paths)


def test_a_common_beginning_is_stored_once() -> None:
    stem = np.arange(40, dtype=np.int32)
    found = [np.append(stem, [7, 7]), np.append(stem, [8]), stem[:30], np.append(stem, [7, 7])]
    (one,) = pack([a.astype(np.int32) for a in found], [0, 0, 0, 0], 1000, CPU)
    assert len(one.ids) == 43
    assert len(pack([a.astype(np.int32) for a in found], [0, 1, 2, 3], 1000, CPU)[0].ids) == 42 + 41 + 30 + 42


def _compare(policy: Policy, reference: torch.nn.Module, rng: np.random.Generator, tolerance: float) -> None:
    """Logits and the gradients of a loss over them, for two groups with shared beginnings and a loner."""
    size = policy.vocabulary
    stem, other = rng.integers(0, size, 30), rng.integers(0, size, 20)
    found = [
        np.concatenate([stem[:n], rng.integers(0, size, m)]).astype(np.int32)
        for n, m in ((30, 9), (30, 4), (22, 11), (0, 13))
    ] + [np.concatenate([other, rng.integers(0, size, m)]).astype(np.int32) for m in (3, 8)]
    found.append(found[0].copy())
    weights = [torch.from_numpy(rng.normal(size=(len(ids), size))).float() for ids in found]
    expected = []
    for ids, weight in zip(found, weights, strict=True):
        logits = reference(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
        expected.append(logits.detach())
        (logits * weight).sum().backward()
    packs = pack(found, [0, 0, 0, 0, 1, 1, 0], 1000, CPU)
    assert len(packs) == 1
    assert len(packs[0].ids) < sum(map(len, found)) - 60
    states = policy.hidden(packs[0])
    logits = torch.nn.functional.linear(states, policy.head, policy.bias)
    total = torch.zeros(())
    for index, path in packs[0].paths.items():
        torch.testing.assert_close(logits[path], expected[index], rtol=tolerance, atol=tolerance)
        total = total + (logits[path] * weights[index]).sum()
    total.backward()
    gradients = dict(policy.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name].grad / scale, parameter.grad / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen3", "sliding"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_separate(kind: str, checkpointing: bool, model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder(kind)
    policy = Policy(folder, device=CPU, compute=torch.float32, gradient_checkpointing=checkpointing)
    assert policy.packs
    _compare(policy, load(folder), rng, 1e-5)


def test_the_variable_length_kernel_is_asked_for_the_same(
    model_folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU kernel's documented meaning, written plainly, in its place: same arguments, same result."""

    def plain(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert enable_gqa
        parts = []
        for i in range(len(cu_q) - 1):
            a, b = (t[cu_q[i] : cu_q[i + 1]].transpose(0, 1) if t is q else t[cu_k[i] : cu_k[i + 1]].transpose(0, 1)
                    for t in (q, k))  # fmt: skip
            c = v[cu_k[i] : cu_k[i + 1]].transpose(0, 1)
            assert a.shape[1] <= max_q
            assert b.shape[1] <= max_k
            row = torch.arange(a.shape[1])[:, None] + b.shape[1] - a.shape[1]
            column = torch.arange(b.shape[1])
            seen = column <= row + window_size[1]
            if window_size[0] >= 0:
                seen &= column >= row - window_size[0]
            out = torch.nn.functional.scaled_dot_product_attention(
                a[None], b[None], c[None], attn_mask=seen, scale=scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    def packed(module, query, key, value, mask, *, scaling, sliding_window=None, layout=None, **_):  # type: ignore[no-untyped-def]
        return attention._varlen_attention(query, key, value, scaling, sliding_window, layout), None

    monkeypatch.setattr(attention, "_varlen", plain)
    for kind in ("qwen3", "sliding"):
        policy = Policy(model_folder(kind), device=CPU, compute=torch.float32)
        transformers.AttentionInterface.register(attention.NAME, packed)
        try:
            _compare(policy, load(model_folder(kind)), rng, 1e-5)
        finally:
            transformers.AttentionInterface.register(attention.NAME, attention.packed_attention)


def test_a_model_that_cannot_be_packed_runs_alone(model_folder: Folder) -> None:
    """Gemma 2 caps its attention scores, which packed attention refuses."""
    policy = Policy(model_folder("gemma2"), device=CPU, compute=torch.float32)
    assert not policy.packs
    ids = np.arange(20, dtype=np.int32)
    (alone,) = pack([ids], [0], 1, CPU, share=False)
    expected = load(model_folder("gemma2"))(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
    torch.testing.assert_close(policy.hidden(alone) @ policy.head.T, expected, rtol=1e-5, atol=1e-5)


def test_scaled_logits_are_refused(model_folder: Folder) -> None:
    with pytest.raises(BadInput, match="more than its LM head's product"):
        Policy(model_folder("granite"), device=CPU, compute=torch.float32)


def test_bfloat16_compute_is_close(model_folder: Folder) -> None:
    policy = Policy(model_folder("llama"), device=CPU, compute=torch.bfloat16)
    assert policy.packs
    ids = np.arange(30, dtype=np.int32)
    (one,) = pack([ids], [0], 1000, CPU)
    states = policy.hidden(one)
    expected = load(policy.folder).model(torch.from_numpy(ids).long()[None]).last_hidden_state[0]
    error = ((states.float() - expected).abs().max() / expected.abs().max()).item()
    assert 0 < error < 0.1
