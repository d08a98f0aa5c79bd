"""The codec: exact for every bit pattern, small where little changed, and deaf to hostile objects."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from farflung.core import frame
from farflung.core.errors import Corrupt
from farflung.weights import delta
from tests.weights.parts import bits, flip

u16 = st.integers(0, 0xFFFF)
SHAPES = {"a": (2, 3), "b": (600,)}


def shapes_of(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors.items()}


@given(st.data())
def test_decode_gives_back_every_bit(data: st.DataObject) -> None:
    base, after = {}, {}
    for i in range(data.draw(st.integers(0, 4))):
        name = f"t{i}"
        after[name] = data.draw(
            hnp.arrays(np.uint16, hnp.array_shapes(min_dims=0, min_side=0, max_side=9), elements=u16)
        )
        kind = data.draw(st.sampled_from(["new", "same", "few", "all"]))
        old = after[name].copy()
        if kind == "few" and old.size:
            where = data.draw(st.lists(st.integers(0, old.size - 1), max_size=4))
            old.reshape(-1)[where] += np.uint16(data.draw(u16))
        if kind == "all":
            old = data.draw(hnp.arrays(np.uint16, old.shape, elements=u16))
        if kind != "new":
            base[name] = old
    before = {name: array.copy() for name, array in base.items()}
    raw, changed = delta.encode(after, base)
    found = delta.decode(raw, base, shapes_of(after))
    assert set(found) == set(after)
    for name, array in after.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].shape == array.shape
        assert changed[name] == (np.count_nonzero(array != base[name]) if name in base else array.size)
    for name, array in base.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("gap", [0, 255, 256, 65_535, 65_536, 1 << 24])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.zeros(gap + 8, np.uint16)
    new = old.copy()
    new[[gap, gap + 7]] = [0x8000, 0xFFFF]
    raw, changed = delta.encode({"a": new}, {"a": old})
    assert changed == {"a": 2}
    assert len(raw) < 500
    np.testing.assert_array_equal(delta.decode(raw, {"a": old}, {"a": old.shape})["a"], new)


def test_steps_of_one_cost_little() -> None:
    """One per cent of a million weights, each up or down by one step: 1.13 bytes per change is the least possible."""
    draw = np.random.default_rng(0)
    old = draw.integers(0x3C00, 0x3E00, 1_000_000).astype(np.uint16)
    new = old.copy()
    where = draw.choice(old.size, 10_000, replace=False)
    new[where] += draw.choice(np.array([1, 0xFFFF], np.uint16), where.size)
    raw, changed = delta.encode({"a": new}, {"a": old})
    assert changed["a"] == 10_000
    assert len(raw) < 1.5 * 10_000
    np.testing.assert_array_equal(delta.decode(raw, {"a": old}, {"a": old.shape})["a"], new)


def test_no_change_costs_tens_of_bytes() -> None:
    raw, _ = delta.encode({}, {})
    assert len(raw) < 80
    assert delta.decode(raw, {}, {}) == {}


def test_a_tensor_that_changed_much_is_sent_whole() -> None:
    old = np.zeros(100, np.uint16)
    for changes, form in ((25, "gaps"), (26, "whole")):
        new = old.copy()
        new[:changes] = 1
        header, _ = frame.decode(delta.encode({"a": new}, {"a": old})[0])
        assert header["tensors"] == [["a", [100], form, changes if form == "gaps" else 100]]


def sound() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Header and planes of an object with a whole tensor and a sparse one, and its base."""
    base = {"b": np.arange(600, dtype=np.uint16)}
    new = base["b"].copy()
    new[[3, 599]] = 7
    raw, _ = delta.encode({"a": bits([1, 2, 3, 4, 5, 6], (2, 3)), "b": new}, base)
    header, planes = frame.decode(raw)
    return header, dict(planes), base


def refuse(header: dict[str, Any], planes: dict[str, Any], base: dict[str, Any], match: str) -> None:
    with pytest.raises(Corrupt, match=match):
        delta.decode(frame.encode(header, planes), base, SHAPES, where="object k")


def packed(*values: int, level: int = 1) -> Any:
    return np.frombuffer(zstandard.compress(bytes(values), level), np.uint8)


ENTRIES = [
    (["c", [6], "whole", 6], "unknown or comes twice"),
    (["b", [600], "gaps", 2], "unknown or comes twice"),
    (["a", [3, 2], "whole", 6], "tensor a: its shape"),
    (["a", [1 << 60, 1 << 60], "whole", 6], "tensor a: its shape"),
    (["a", [2, 3.0], "whole", 6], None),
    (["a", [2, 3], "whole", 5], "tensor a: 5 of 6"),
    (["a", [2, 3], "whole", 7], "tensor a: form 'whole' with 7 of 6"),
    (["a", [2, 3], "whole", -6], "with -6 of 6"),
    (["a", [2, 3], "whole", True], "with True of 6"),
    (["a", [2, 3], "whole", 6.0], "with 6.0 of 6"),
    (["a", [2, 3], "gaps", 6], "tensor a: the change has no base"),
    (["a", [2, 3], "pickle", 6], "form 'pickle'"),
    (["a", [2, 3], ["gaps"], 6], "form"),
    ([["a"], [2, 3], "whole", 6], "unknown"),
    (["a", [2, 3], "whole"], "not a tensor's entry"),
    ("a", "not a tensor's entry"),
]


@pytest.mark.parametrize(("entry", "match"), [(e, m) for e, m in ENTRIES if m])
def test_entries_are_checked_before_use(entry: Any, match: str) -> None:
    header, planes, base = sound()
    header["tensors"][0] = entry
    refuse(header, planes, base, match)


def test_the_header_is_strict() -> None:
    header, planes, base = sound()
    refuse(header | {"kind": "other"}, planes, base, "not a bf16-delta-1 object")
    refuse(header | {"more": 1}, planes, base, "not a bf16-delta-1 object")
    refuse({"kind": delta.KIND}, planes, base, "not a bf16-delta-1 object")
    refuse(header | {"tensors": {}}, planes, base, "not a bf16-delta-1 object")


def test_planes_are_checked_before_use() -> None:
    header, planes, base = sound()
    refuse(header, planes | {"extra": planes["ulp0"]}, base, "no part of the form.*extra")
    for name in ("gap0", "ulp1", "whole0"):
        refuse(header, {k: v for k, v in planes.items() if k != name}, base, f"plane {name} is missing")
    refuse(header, planes | {"ulp0": packed(1, 2, 3)}, base, "plane ulp0: 3 bytes where 2 belong")
    refuse(header, planes | {"ulp0": np.zeros(9, np.uint8)}, base, "plane ulp0: not a zstd frame")
    refuse(header, planes | {"ulp0": np.zeros(0, np.uint8)}, base, "plane ulp0: not a zstd frame")
    refuse(header, planes | {"ulp0": planes["ulp0"][:-1]}, base, "plane ulp0: not a zstd frame")
    refuse(header, planes | {"ulp0": np.append(planes["ulp0"], planes["ulp0"])}, base, "plane ulp0: not a zstd frame")


def test_a_decompression_bomb_is_refused_by_the_size_it_claims() -> None:
    header, planes, base = sound()
    bomb = np.frombuffer(zstandard.compress(bytes(1 << 30 >> 4)), np.uint8)
    assert bomb.size < 10_000
    refuse(header, planes | {"whole0": bomb}, base, f"plane whole0: {1 << 26} bytes where 6 belong")
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    refuse(header, planes | {"whole0": np.frombuffer(silent, np.uint8)}, base, "plane whole0: -1 bytes where 6 belong")


@pytest.mark.parametrize(
    "gaps",
    [[3, 596], [600, 0], [0xFFFFFFFF, 3], [1 << 63, 1 << 63], [(1 << 64) - 1, 5], [(1 << 63) - 1, (1 << 63) - 1]],
)
def test_indices_out_of_range_are_refused(gaps: list[int]) -> None:
    header, planes, base = sound()
    rows = np.array(gaps, "<u8").view(np.uint8).reshape(2, 8)
    planes |= {f"gap{i}": packed(*rows[:, i].tolist()) for i in range(8)}
    refuse(header, planes, base, "object k, tensor b: .*index")


def test_a_base_of_another_shape_is_refused() -> None:
    header, planes, _ = sound()
    refuse(header, planes, {"b": np.zeros((2, 300), np.uint16)}, "tensor b: the change has no base of its shape")


@given(st.data())
def test_flipped_bits_give_an_error_or_an_answer_of_the_right_shape(data: st.DataObject) -> None:
    """Without the hashes around it, the codec alone neither crashes nor allocates more than the shapes allow."""
    header, planes, base = sound()
    raw = frame.encode(header, planes)
    for _ in range(data.draw(st.integers(1, 3))):
        raw = flip(raw, data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 255)))
    try:
        found = delta.decode(raw, base, SHAPES)
    except Corrupt:
        return
    assert all(array.shape == SHAPES[name] for name, array in found.items())


@given(st.binary(max_size=200))
def test_noise_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        delta.decode(raw, {}, SHAPES)
