"""Objects on their way in: all that becomes of each piece, whatever objects it came in, and few changes decoded at a time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.errors import Corrupt
from farflung.weights import Publisher, Subscriber, delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change, Content, Dense, Whole
from farflung.weights.elements import Bits, digest
from farflung.weights.schema import Schema
from farflung.weights.staging import Staged, by_tensor, changed_elements
from tests.weights.parts import RUN, MemoryStore, random_bits, schema

SIX = schema(**{f"t{i}": ("BF16", (50,)) for i in range(6)})


def walk(seed: int, links: int, share: float) -> tuple[list[Bits], list[list[Change]], list[Bits]]:
    """Pieces, what becomes of them over some links, and what they are then."""
    rng = np.random.default_rng(seed)
    before = [random_bits("BF16", 50, seed + i) for i in range(6)]
    now, rows = [bits.copy() for bits in before], []
    for _ in range(links):
        row = []
        for number, piece in enumerate(SIX.pieces):
            after = now[number].copy()
            after[rng.random(50) < share] += np.uint16(rng.integers(1, 4))
            if (change := delta.compare(number, piece, now[number], after)) is not None:
                row.append(change)
            now[number] = after
        rows.append(row)
    return before, rows, now


def objects(row: list[Change], cuts: list[int]) -> list[delta.Object]:
    """A link's objects, cut where it pleases."""
    parts = [[c for c in row if a <= c.piece < b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    return [delta.read(delta.encode(part, SIX).raw, SIX, where="object") for part in parts if part]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 9), st.sampled_from([0.02, 0.2, 0.9]), st.data())
def test_pieces_end_as_they_should_over_any_links_cut_anywhere(
    seed: int, links: int, share: float, data: st.DataObject
) -> None:
    before, rows, after = walk(seed, links, share)
    cuts = st.lists(st.integers(1, 5), unique=True, max_size=3).map(sorted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farflung.weights.schema.PIECE_BYTES", 250)
        staged = Staged(SIX, [(f"link {i}", objects(row, data.draw(cuts))) for i, row in enumerate(rows)])
    assert all(len(group.numbers) == 2 for group in staged.groups)
    held = [bits.copy() for bits in before]
    for group in staged.groups:
        for change in group.changes():
            assert change.piece in group.numbers
            assert change.after == staged.after[change.piece] == digest(after[change.piece])
            delta.apply(held[change.piece], change.content, SIX.pieces[change.piece].kind)
    for a, b in zip(held, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert staged.after.keys() == {change.piece for row in rows for change in row}


def test_a_piece_comes_once_in_a_link() -> None:
    _, (row,), _ = walk(0, 1, 0.5)
    with pytest.raises(Corrupt, match="version 7: two objects hold the same piece"):
        Staged(SIX, [("version 7", objects(row, [3]) + objects(row[2:3], []))])


def test_that_a_piece_comes_whole_is_known_before_it_is_decoded() -> None:
    bits = random_bits("BF16", 50)
    whole = [Change(1, digest(bits), Whole(bits))]
    assert Staged(SIX, [("a", objects(whole, []))]).whole
    assert not Staged(SIX, [("a", objects(walk(0, 1, 0.5)[1][0], []))]).whole


def content(*positions: int) -> Changes:
    return Changes(np.array(positions, np.int32), np.ones(len(positions), np.uint16))


def test_positions_count_from_the_tensor_s_start_and_dense_steps_have_them_too() -> None:
    piece = replace(SIX.pieces[0], start=20, size=5)
    given: list[tuple[Content, list[int]]] = [(content(0, 3), [20, 23])]
    given.append((Dense(np.array([0, 7, 0, 0, 65535], np.uint16)), [21, 24]))
    for each, expected in given:
        found = changed_elements(each, piece)
        assert found is not None
        assert found.dtype == np.int64
        assert found.tolist() == expected
    assert changed_elements(Whole(np.zeros(5, np.uint16)), piece) is None


def test_what_pieces_tell_is_put_together_by_tensor() -> None:
    schema = Schema(SIX.tensors, (*(replace(SIX.pieces[0], start=s, size=25) for s in (0, 25)), *SIX.pieces[1:]), {})
    told = {2: np.array([7]), 1: np.array([30, 41]), 0: np.array([3])}
    assert {name: at.tolist() for name, at in by_tensor(schema, told).items()} == {"t0": [3, 30, 41], "t1": [7]}


def test_elements_that_change_are_counted_by_link() -> None:
    _, rows, _ = walk(3, 4, 0.3)
    counts = [sum(len(c.content) if isinstance(c.content, Changes) else 0 for c in row) for row in rows]
    assert Staged(SIX, [(f"link {i}", objects(row, [2])) for i, row in enumerate(rows)]).changed == sum(counts)


def test_memory_holds_objects_as_they_came_and_few_of_their_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.weights.schema.PIECE_BYTES", 128 << 10)
    store, n = MemoryStore(), 4 << 20
    publisher = Publisher(store, RUN, anchor_every=100)
    weights = torch.randn(n, generator=torch.Generator().manual_seed(0)).bfloat16()
    publisher.publish(0, {"w": weights})
    subscriber = Subscriber(store, RUN, threads=1)
    subscriber.fetch(0)
    for version in (1, 2, 3):
        bits = weights.view(torch.int16)
        bits[torch.rand(n, generator=torch.Generator().manual_seed(version)) < 0.3] += 1
        publisher.publish(version, {"w": weights})
    tracemalloc.start()
    update = subscriber.fetch(3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(update.tensors["w"].view(torch.int16), weights.view(torch.int16))
    decoded = 3 * 0.3 * n * 6
    assert peak < update.bytes + 4e6 < decoded / 3
