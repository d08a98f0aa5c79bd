"""The compiled loops do what numpy does, bit for bit, and refuse what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import Corrupt
from farflung.weights import changes, kernels, planes
from farflung.weights.elements import ELEMENT_TYPES, ElementType
from farflung.weights.planes import Span, compress

KINDS = [ELEMENT_TYPES[name] for name in ("F32", "BF16", "U8", "F4")]


@contextmanager
def compiled(on: bool) -> Iterator[None]:
    with mock.patch.object(kernels, "worth", return_value=on):
        yield


def test_they_can_be_tested() -> None:
    assert kernels.available(), "numba belongs to the extra dev"
    assert kernels.worth(1 << 20)
    assert not kernels.worth((1 << 20) - 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(
    seed=st.integers(0, 999),
    items=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.4, 1.0]),
    near=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_both_ways_give_the_same(kind: ElementType, seed: int, items: int, share: float, near: bool) -> None:
    rng = np.random.default_rng(seed)
    bits = 8 * kind.dtype.itemsize
    before = rng.integers(0, 2**bits, items, np.uint64).astype(kind.dtype)
    after = before.copy()
    where = np.flatnonzero(rng.random(items) < share)
    after[where] += (
        rng.integers(-3, 4, len(where)) if near else rng.integers(0, 2**bits, len(where), np.uint64)
    ).astype(kind.dtype)
    found: list[Any] = []
    for on in (False, True):
        with compiled(on):
            change = changes.find(before, after, kind)
            span = Span(items * kind.per_item, kind, len(change))
            packed, seen = planes.pack([span], [change])
            (there,) = planes.unpack(dict(packed), [span], "object")
            back, moved, again = there.changes(), before.copy(), before.copy()
            changes.apply(moved, back, kind)
            there.apply(again)
        assert np.array_equal(moved, after)
        assert np.array_equal(again, after)
        assert np.array_equal(back.positions, change.positions)
        assert np.array_equal(back.steps, change.steps)
        assert seen.sum() == len(change)
        found.append(
            (
                change.positions.tolist(),
                change.steps.tolist(),
                {n: p.tobytes() for n, p in packed.items()},
                seen.tolist(),
            )
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("on", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize(
    ("control", "gaps", "codes", "why"),
    [
        ([0x10, 0x10], [], [], "is outside its"),
        ([0xF0], [2**32 - 16], [], "is outside its"),
        ([0xF0, 0xF0], [2**31, 2**31], [], "is outside its"),
        ([0x0F], [], [2**16 - 1 - 15], "step"),
        ([0x0F], [], [2**32 - 16], "step"),
    ],
)
def test_both_refuse_what_does_not_fit(
    on: bool, control: list[int], gaps: list[int], codes: list[int], why: str
) -> None:
    parts = {"control": compress(np.array(control, np.uint8))}
    for name, numbers in (("gap", gaps), ("step", codes)):
        rows = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4)
        parts |= {f"{name}{i}": compress(np.ascontiguousarray(rows[:, i])) for i in range(4) if numbers}
    with compiled(on):
        (packed,) = planes.unpack(parts, [Span(len(control), ELEMENT_TYPES["BF16"], len(control))], "object")
        with pytest.raises(Corrupt, match=why):
            packed.changes()
        with pytest.raises(Corrupt, match=why):
            packed.apply(np.zeros(len(control), np.uint16))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 999), items=st.integers(0, 500), shares=st.tuples(*[st.sampled_from([0.0, 0.05, 0.6])] * 2))
@settings(max_examples=30, deadline=None)
def test_both_fold_alike(kind: ElementType, seed: int, items: int, shares: tuple[float, float]) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 256, items).astype(kind.dtype)
    arrays = [start]
    for share in shares:
        after = arrays[-1].copy()
        where = rng.random(items) < share
        after[where] = np.where(rng.random(items) < 0.3, start, after + rng.integers(0, 3, items).astype(kind.dtype))[
            where
        ]
        arrays.append(after)
    first, second = changes.find(arrays[0], arrays[1], kind), changes.find(arrays[1], arrays[2], kind)
    found = []
    for on in (False, True):
        with compiled(on):
            folded = changes.fold(first, second, kind)
        assert folded.steps.dtype == kind.dtype
        found.append((folded.positions.tolist(), folded.steps.tolist()))
    whole = changes.find(arrays[0], arrays[2], kind)
    assert found == [(whole.positions.tolist(), whole.steps.tolist())] * 2


@pytest.mark.parametrize("on", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_changes_in_one_room_do_not_touch_each_other(on: bool, share: float) -> None:
    """Types of every width in turn, of odd lengths, all changed: more than the room has place for."""
    rng, found = np.random.default_rng(0), []
    arrays = [rng.integers(0, 100, 5 + 2 * i).astype(KINDS[i % 3].dtype) for i in range(90)]
    room = changes.Room(sum(array.nbytes for array in arrays))
    with compiled(on):
        for i, before in enumerate(arrays):
            after = before.copy()
            after[rng.random(len(after)) < share] += before.dtype.type(1 + i)
            found.append((before, after, changes.find(before, after, KINDS[i % 3], room=room)))
    for before, after, change in found:
        before[change.positions] += change.steps
        np.testing.assert_array_equal(before, after)


def test_compiled_code_is_kept_for_the_next_process_once(tmp_path: Path) -> None:
    program = (
        "import numpy as np\n"
        "from farflung.weights import changes\n"
        "from farflung.weights.elements import ELEMENT_TYPES\n"
        "before = np.zeros(1 << 20, np.uint16)\n"
        "changes.apply(before.copy(), changes.find(before, before + 1, ELEMENT_TYPES['BF16']), ELEMENT_TYPES['BF16'])\n"
    )
    kept = []
    for _ in range(2):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
        kept.append(sorted(path.name for path in tmp_path.rglob("*.nb*")))
    assert kept[0] == kept[1]
    assert {name.split(".")[1].split("-")[0] for name in kept[0]} == {"find", "add"}
