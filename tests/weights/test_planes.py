"""Byte planes: near the entropy bound in size, and nothing taken on trust when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard

from farflung.core.errors import Corrupt
from farflung.weights import planes as module
from farflung.weights.changes import Changes
from farflung.weights.elements import ELEMENT_TYPES, Bytes
from farflung.weights.planes import Span, compress, entropy_bytes, pack

BF16, U8, F4, F32 = (ELEMENT_TYPES[name] for name in ("BF16", "U8", "F4", "F32"))
SPANS = [Span(1000, BF16, 20), Span(50_000, U8, 2), Span(600, F4, 0)]
CHANGES = [
    Changes(np.array([*range(19), 999]), np.array([0x8000] + 19 * [1], "<u2")),
    Changes(np.array([0, 49_999]), np.array([255, 128], np.uint8)),
    Changes(np.zeros(0, np.int64), np.zeros(0, np.uint8)),
]


def unpack(planes: dict[str, Bytes], spans: Any, where: str) -> list[Changes]:
    return [packed.changes() for packed in module.unpack(planes, spans, where)]


def refuse(planes: dict[str, Bytes], match: str, spans: Any = SPANS) -> None:
    with pytest.raises(Corrupt, match=f"object k.*{match}"):
        unpack(dict(planes), spans, "object k")


@pytest.mark.parametrize("gap", [0, 255, 256, 65_535, 65_536, 1 << 24])
@pytest.mark.parametrize("kind", [F4, U8, BF16, F32], ids=lambda kind: kind.name)
def test_gaps_and_steps_of_every_width(kind: Any, gap: int) -> None:
    """The smallest and the largest step, up and down, behind gaps that need one to four bytes."""
    top = 2**kind.bits - 1
    steps = np.array([1, top, top // 2, top // 2 + 1], kind.dtype)
    positions = np.arange(4) * (gap + 1) + gap
    spans = [Span(4 * gap + 8, kind, 4), Span(4, kind, 4)]
    planes, _ = pack(spans, [Changes(positions, steps), Changes(np.arange(4), steps)])
    first, second = unpack(planes, spans, "here")
    assert not planes, "every plane was taken"
    np.testing.assert_array_equal(first.positions, positions)
    np.testing.assert_array_equal(second.positions, np.arange(4))
    np.testing.assert_array_equal(first.steps, steps)
    np.testing.assert_array_equal(second.steps, steps)


@pytest.mark.parametrize("share", [0.03, 0.01, 0.001])
def test_uniform_changes_come_close_to_their_entropy(share: float) -> None:
    draw = np.random.default_rng(0)
    size = 4_000_000
    positions = np.flatnonzero(draw.random(size) < share)
    steps = draw.choice(np.array([1, 0xFFFF, 2, 0xFFFE], "<u2"), len(positions), p=[0.4, 0.4, 0.1, 0.1])
    span = Span(size, BF16, len(positions))
    planes, seen = pack([span], [Changes(positions, steps)])
    bound = entropy_bytes([span], seen)
    # By hand: positions H2(s) a weight, steps 1.72 bits each.
    s = len(positions) / size
    by_hand = size * (-s * np.log2(s) - (1 - s) * np.log2(1 - s)) + len(positions) * (0.8 * 1.3219 + 0.2 * 3.3219)
    assert bound == pytest.approx(by_hand / 8, rel=0.01)
    assert bound < sum(plane.size for plane in planes.values()) <= 1.10 * bound


def test_the_bound_of_nothing_is_nothing() -> None:
    assert entropy_bytes([], np.zeros(256, np.int64)) == 0
    full = Span(4, BF16, 4)
    planes, seen = pack([full], [Changes(np.arange(4), np.ones(4, "<u2"))])
    assert entropy_bytes([full], seen) == 0
    assert planes


def test_planes_that_are_missing_or_of_another_size_are_refused() -> None:
    planes, _ = pack(SPANS, CHANGES)
    assert set(planes) == {"control", "low0", "low1", "gap0", "step0", "step1"}
    for name in planes:
        if name != "step1":  # planes are left out where all further ones are zero, and so this one may be
            refuse({key: plane for key, plane in planes.items() if key != name}, f"plane {name}: it is missing")
        refuse(planes | {name: compress(np.zeros(99, np.uint8))}, f"plane {name}: 99 bytes where [0-9]+ belong")
        refuse(planes | {name: planes[name][:-1]}, f"plane {name}: not a zstd frame")
        refuse(planes | {name: np.append(planes[name], planes[name])}, f"plane {name}: not a zstd frame")
        refuse(planes | {name: np.zeros(9, np.uint8)}, f"plane {name}: not a zstd frame")
        refuse(planes | {name: np.zeros(0, np.uint8)}, f"plane {name}: not a zstd frame")


def test_a_decompression_bomb_is_refused_by_the_size_it_claims() -> None:
    planes, _ = pack(SPANS, CHANGES)
    bomb = compress(np.zeros(1 << 26, np.uint8))
    assert bomb.size < 10_000
    refuse(planes | {"control": bomb}, f"plane control: {1 << 26} bytes where 22 belong")
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    refuse(planes | {"control": np.frombuffer(silent, np.uint8)}, "plane control: -1 bytes where 22 belong")


def gap_planes(*gaps: int, control: int = 0xF0) -> dict[str, Bytes]:
    """Planes of one piece of 3 elements without low bits, all of whose gaps are escaped."""
    rows = np.array(gaps, "<u4").view(np.uint8).reshape(-1, 4)
    planes = {f"gap{i}": compress(np.ascontiguousarray(rows[:, i])) for i in range(4)}
    return planes | {"control": compress(np.full(len(gaps), control, np.uint8))}


@pytest.mark.parametrize("gaps", [[0, 0], [2**32 - 16] * 2, [2**32 - 1, 0], [1 << 31, 1 << 31]])
def test_indices_out_of_range_are_refused(gaps: list[int]) -> None:
    """15 are in the control byte already: no gap of these lies in a piece of 3 elements."""
    refuse(gap_planes(*gaps), "index is outside", [Span(3, BF16, 2)])


def test_indices_that_run_over_the_end_are_refused() -> None:
    planes = {"control": compress(np.array([0x10, 0x10], np.uint8))}
    refuse(planes, "index 3 is outside its 3 elements", [Span(3, BF16, 2)])


@pytest.mark.parametrize(("kind", "code"), [(F4, 15), (U8, 255), (BF16, 65_535), (F32, 2**32 - 1), (U8, 2**32 - 1)])
def test_steps_that_no_element_can_make_are_refused(kind: Any, code: int) -> None:
    rows = np.array([code - 15 if code < 2**32 - 15 else code], "<u4").view(np.uint8)
    planes = {f"step{i}": compress(rows[i : i + 1].copy()) for i in range(4)}
    refuse(planes | {"control": compress(np.array([0x0F], np.uint8))}, "step", [Span(1, kind, 1)])
