from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.agents.transcript import Transcript, readable
from farflung.core.errors import Corrupt
from farflung.core.sampling import Completion, Source
from farflung.core.supports import Supports

SOURCES = [Source(f"pool{i}", f"r{i}", "bf16", "bf16") for i in range(3)]


def completion(ids: list[int], source: int = 0, *, supports: bool = True) -> Completion:
    """Every token with itself and one other candidate; the version is the first id."""
    n = len(ids)
    half = np.full(n, np.log(0.5), np.float32)
    pairs = np.array([[i, i + 1000] for i in ids], np.int32).reshape(-1)
    rows = Supports(pairs, np.repeat(half, 2), np.arange(n + 1, dtype=np.int64) * 2) if supports else None
    return Completion(np.array(ids, np.int32), half, np.full(n, ids[0], np.int32), rows, "stop", SOURCES[source])


tokens = st.lists(st.integers(0, 999), min_size=1, max_size=5)


@given(tokens, st.lists(st.tuples(tokens, st.integers(0, 2), tokens), max_size=6))
def test_it_keeps_every_id_in_order_with_its_origin(
    opening: list[int], turns: list[tuple[list[int], int, list[int]]]
) -> None:
    transcript = Transcript(np.array(opening, np.int32))
    expected: list[tuple[int, bool]] = [(i, False) for i in opening]
    origins: list[tuple[int, int, Source]] = []
    for reply, source, told in turns:
        before = transcript.ids.tolist()
        transcript.sampled(completion(reply, source))
        transcript.told(np.array(told, np.int32))
        assert transcript.ids.tolist()[: len(before)] == before
        expected += [(i, True) for i in reply] + [(i, False) for i in told]
        origins += [(i, reply[0], SOURCES[source]) for i in reply]
    t = transcript.trajectory(0.7)
    t.check()
    assert len(transcript) == len(expected)
    assert list(zip(t.ids.tolist(), t.action.tolist(), strict=True)) == expected
    got = zip(t.ids[t.action].tolist(), t.versions.tolist(), t.source.tolist(), strict=True)
    assert [(i, version, t.sources[source]) for i, version, source in got] == origins
    assert len(set(t.sources)) == len(t.sources)
    assert (t.ids.dtype, t.logprobs.dtype, t.versions.dtype, t.source.dtype) == (
        np.int32,
        np.float32,
        np.int32,
        np.int16,
    )
    assert t.temperature == 0.7
    if turns:
        assert t.supports is not None
        assert t.supports.ids[::2].tolist() == [i for i, _, _ in origins]


def test_some_supports_are_worse_than_none() -> None:
    transcript = Transcript(np.array([1], np.int32))
    transcript.sampled(completion([2], supports=False))
    assert transcript.trajectory(1.0).supports is None
    transcript.sampled(completion([3]))
    with pytest.raises(Corrupt, match="some replies"):
        transcript.trajectory(1.0)


def test_it_reads_in_turns() -> None:
    transcript = Transcript(np.array([1, 2], np.int32))
    transcript.sampled(completion([3, 4]))
    transcript.told(np.array([5], np.int32))
    transcript.sampled(completion([6]))
    parts = readable(transcript.trajectory(1.0), lambda ids: " ".join(map(str, ids)))
    assert parts == (("world", "1 2"), ("policy", "3 4"), ("world", "5"), ("policy", "6"))
    assert readable(Transcript(np.array([1], np.int32)).trajectory(1.0), str) == (("world", "[1]"),)
