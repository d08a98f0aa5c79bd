"""The compactor: jumps that are the deltas they stand for, and smaller than those together."""

from __future__ import annotations

import pytest
import torch

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, Publisher, Subscriber
from farflung.weights.history import History
from farflung.weights.manifest import Jump, Seal, jump_key, manifest_key, object_key, read_jump
from farflung.weights.retention import prune
from tests.weights.parts import (
    KEY,
    QUERY,
    RUN,
    Crash,
    MemoryStore,
    equal,
    overwrite,
    publish,
    same,
    streams,
    version,
    walk,
    weights,
)

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")


def jump(store: MemoryStore, number: int, span: int, format: str = "bf16") -> Jump:
    found = read_jump(store, RUN, format, number, span, Seal(None))
    assert found is not None
    return found


def size(found: Jump) -> int:
    return sum(part.nbytes for part in found.delta)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("change", [1e-4, 2e-3, 0.2], ids=["sparse", "both", "dense"])
def test_a_jump_leads_where_its_deltas_lead(format: str, change: float) -> None:
    store, history = MemoryStore(), walk(9, size=change)
    publish(store, history, formats=(format,), anchor_every=100)
    made = Compactor(store, RUN).step()
    assert sorted((one.version - one.span, one.version) for one in made) == [
        (0, 2), (0, 4), (0, 8), (2, 4), (4, 6), (4, 8), (6, 8)
    ]  # fmt: skip
    expected = streams(history, format)
    for number in range(9):
        subscriber = Subscriber(store, RUN, format=format)
        subscriber.fetch(0)
        update = subscriber.fetch(number)
        assert update.links == number.bit_count()
        assert same(update.tensors, expected[number])


@pytest.mark.parametrize("format", FORMATS)
def test_a_jump_is_no_larger_than_what_it_replaces(format: str) -> None:
    """With an object's header and hashes once instead of twice. A policy of a size at which bytes mean something."""
    draw = torch.Generator().manual_seed(0)
    policy = {
        QUERY: torch.randn(400, 500, generator=draw) * 0.02,
        "embed.weight": torch.randn(300, 100, generator=draw),
    }
    store = MemoryStore()
    publisher = Publisher(store, RUN, formats=(format,), anchor_every=100)
    for number in range(17):
        publisher.publish(number, policy)
        for tensor in policy.values():
            tensor += 3e-5 * torch.randn(tensor.shape, generator=draw) * tensor.abs()
    Compactor(store, RUN).step()
    for number in range(2, 17, 2):
        span = 2
        while number % span == 0:
            deltas = [version(store, n).stream(format).delta for n in range(number - span + 1, number + 1)]
            assert 0 < size(jump(store, number, span, format)) <= sum(part.nbytes for delta in deltas for part in delta)
            assert jump(store, number, span, format).changed <= sum(
                version(store, n).stream(format).changed for n in range(number - span + 1, number + 1)
            )
            span *= 2


def test_steps_that_cancel_leave_nothing() -> None:
    store, one, two = MemoryStore(), weights(), walk(1, size=1e-4)[1]
    publish(store, [one, two, one, two, one])
    Compactor(store, RUN).step()
    for number, span in ((2, 2), (4, 2), (4, 4)):
        assert jump(store, number, span).delta == ()
        assert jump(store, number, span).before == jump(store, number, span).root
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    update = subscriber.fetch(4)
    assert (update.links, update.bytes, update.changed) == (0, 0, {}), "the roots are the same"
    assert equal(subscriber.fetch(3).tensors, two)


def test_jumps_of_large_streams_are_several_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a version changed pieces of one group only."""
    monkeypatch.setattr("farflung.weights.schema.PIECE_BYTES", 1000)
    history = walk(4)
    history[2] = history[1] | {QUERY: history[2][QUERY]}
    history[3] = history[2] | {"scale": history[3]["scale"]}
    store = MemoryStore()
    publish(store, history, formats=("bf16", "nvfp4"), anchor_every=100)
    Compactor(store, RUN).step()
    for format in ("bf16", "nvfp4"):
        assert len(jump(store, 4, 4, format).delta) > 3
        for number in (2, 4):
            subscriber = Subscriber(store, RUN, format=format)
            subscriber.fetch(0)
            update = subscriber.fetch(number)
            assert update.links == 1
            assert same(update.tensors, streams(history, format)[number])


def test_versions_are_compacted_as_they_come_and_up_to_a_level() -> None:
    store, history = MemoryStore(), walk(8)
    compactor = Compactor(store, RUN, key=KEY, levels=2)
    assert compactor.step() == []
    publisher = Publisher(store, RUN, key=KEY)
    made: list[tuple[int, int]] = []
    for number, policy in enumerate(history):
        publisher.publish(number, policy)
        made += [(one.version, one.span) for one in compactor.step()]
        store.reads.clear()
        assert compactor.step() == []
        assert store.reads == [], "it knows what it has done"
    assert made == [(2, 2), (4, 2), (4, 4), (6, 2), (8, 2), (8, 4)]
    with pytest.raises(Corrupt, match="signed with another key"):
        Compactor(store, RUN, key=b"another").step()
    for levels in (0, 31):
        with pytest.raises(BadInput, match=f"compactor: {levels} levels"):
            Compactor(store, RUN, levels=levels)


def test_a_new_compactor_begins_where_its_jumps_do() -> None:
    """It asks for the pointer once a step, and for nothing of what lies far below."""
    store = MemoryStore()
    publisher = publish(store, [weights()] * 40, anchor_every=100)
    pointers, read_pointer = 0, store.read_pointer

    def counted(key: str) -> bytes | None:
        nonlocal pointers
        pointers += 1
        return read_pointer(key)

    store.read_pointer = counted  # type: ignore[method-assign]
    compactor = Compactor(store, RUN, levels=2)
    assert [(one.version, one.span) for one in compactor.step()] == [(36, 2), (36, 4), (38, 2)]
    assert pointers == 1
    for number in (40, 41, 42):
        publisher.publish(number, weights())
    assert [(one.version, one.span) for one in compactor.step()] == [(40, 2), (40, 4), (42, 2)]
    everything = [(number, span) for number in range(2, 36, 2) for span in (2, 4) if number % span == 0]
    assert [(one.version, one.span) for one in Compactor(store, RUN, levels=2, first=1).step()] == everything


@pytest.mark.parametrize("late", [False, True])
def test_a_compactor_that_stops_at_any_write_goes_on(late: bool) -> None:
    history = walk(4)
    whole = MemoryStore()
    publish(whole, history, formats=("bf16", "fp8"))
    before = len(whole.writes)
    Compactor(whole, RUN).step()
    for crash_in in range(len(whole.writes) - before):
        store = MemoryStore()
        publish(store, history, formats=("bf16", "fp8"))
        store.crash_in, store.crash_after = crash_in, late
        compactor = Compactor(store, RUN)
        with pytest.raises(Crash):
            compactor.step()
        store.crash_in = None
        subscriber = Subscriber(store, RUN)
        for number in (0, 4, 1):
            assert equal(subscriber.fetch(number).tensors, history[number])
        (compactor if late else Compactor(store, RUN)).step()
        assert store.objects == whole.objects


def test_of_two_compactors_the_first_is_right() -> None:
    """Also where the second packs differently, and so would write other bytes under the same key."""
    store, history = MemoryStore(), walk(4)
    publish(store, history)
    first, second = Compactor(store, RUN, levels=1, first=1), Compactor(store, RUN)
    assert [(one.version, one.span) for one in first.step()] == [(2, 2), (4, 2)]
    assert [(one.version, one.span) for one in second.step()] == [(4, 4)]

    class Late(MemoryStore):
        """It looks for a jump before the other has written it, and writes its own after that."""

        def get(self, key: str, max_bytes: int) -> bytes:
            if "/jumps/" in key and key not in seen:
                seen.add(key)
                return MemoryStore.get(empty, key, max_bytes)
            return super().get(key, max_bytes)

    seen: set[str] = set()
    empty, racing = MemoryStore(), Late()
    racing.objects, racing.pointers, racing.written = store.objects, store.pointers, store.written
    other = jump(store, 2, 2).encode().replace(b'"changed":', b'"changed":1')
    store.objects[jump_key(RUN, "bf16", 2, 2)] = other
    assert Compactor(racing, RUN, levels=1, first=1).step()[0] == jump(store, 2, 2)
    assert store.objects[jump_key(RUN, "bf16", 2, 2)] == other
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    assert equal(subscriber.fetch(4).tensors, history[4])


def test_there_are_no_jumps_over_a_whole_version_or_what_was_pruned() -> None:
    store, history = MemoryStore(), walk(9)
    history[5:] = [policy | {"new": torch.ones(2)} for policy in history[5:]]
    publisher = publish(store, history[:8], anchor_every=3)
    compactor = Compactor(store, RUN)
    made = [(one.version, one.span) for one in compactor.step()]
    assert made == [(2, 2), (4, 2), (4, 4)], "6 and 8 would lead over 5, and 8 - 6 comes yet"
    publisher.publish(8, history[8])
    assert [(one.version, one.span) for one in compactor.step()] == [(8, 2)]
    store.now += 10_000
    late = Compactor(store, RUN)
    late._history.newest()
    for number in range(9):
        late._history.find(number)
    for key in [key for key in store.objects if "/jumps/" in key]:
        store.delete(key)
    assert prune(History(store, RUN, Seal(None)), 1).floor == 6
    assert [(one.version, one.span) for one in late.step()] == [(8, 2)]


def test_what_is_lost_or_spoiled_is_named_once_and_the_rest_is_made(caplog: pytest.LogCaptureFixture) -> None:
    """An object of version 3's delta is gone and the jump 4 - 6 spoiled: no jump leads over them, all others are made."""
    store, history = MemoryStore(), walk(8, size=1e-3)
    publisher = publish(store, history[:8], anchor_every=100)
    Compactor(store, RUN).step()
    for key in [key for key in store.objects if "/jumps/" in key]:
        if not key.endswith("/00000006-2"):
            store.delete(key)
    spoiled = jump_key(RUN, "bf16", 6, 2)
    overwrite(store, spoiled, b"spoiled")
    lost = object_key(RUN, version(store, 3).stream("bf16").delta[0])
    store.delete(lost)
    compactor = Compactor(store, RUN)
    assert [(one.version, one.span) for one in compactor.step()] == [(2, 2)]
    publisher.publish(8, history[8])
    assert [(one.version, one.span) for one in compactor.step()] == [(8, 2), (8, 4)]
    expected = [
        f"object {lost}: a version needs it and it is not there",
        f"jump {spoiled}: not a jump",
    ]
    assert [said.partition(": ")[0] for said in compactor.skipped] == [said.partition(": ")[0] for said in expected]
    for said in expected:
        assert said in caplog.text
    subscriber = Subscriber(store, RUN)
    with pytest.raises(Corrupt, match=lost):
        subscriber.fetch(4)
    assert compactor.step() == []


def test_a_jump_whose_objects_are_lost_is_named_and_wider_ones_are_made_of_deltas() -> None:
    store, history = MemoryStore(), walk(8, size=1e-3)
    publish(store, history, anchor_every=100)
    made = Compactor(store, RUN, levels=1, first=1).step()
    (lost,) = (object_key(RUN, part) for one in made if one.version == 4 for part in one.delta)
    store.delete(lost)
    compactor = Compactor(store, RUN)
    assert [(one.version, one.span) for one in compactor.step()] == [(4, 4), (8, 4), (8, 8)]
    assert compactor.skipped == [f"object {lost}: a version needs it and it is not there"]
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    update = subscriber.fetch(8)
    assert update.links == 1
    assert equal(update.tensors, history[8])


def test_a_version_that_cannot_be_read_is_named_and_those_after_it_get_jumps() -> None:
    store, history = MemoryStore(), walk(8)
    publish(store, history, anchor_every=100)
    key = manifest_key(RUN, version(store, 1).ref)
    overwrite(store, key, b"spoiled")
    compactor = Compactor(store, RUN)
    assert [(one.version, one.span) for one in compactor.step()] == [(4, 2), (6, 2), (8, 2), (8, 4)]
    assert all(f"manifest {key}" in said for said in compactor.skipped)
