"""The subscriber: any version from any other, by the cheapest way, and exactly what changed."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, FolderStore, Missing, Publisher, StoreError, Subscriber, Update
from farflung.weights import schema as schema_module
from farflung.weights.history import History
from farflung.weights.manifest import Seal, manifest_key, object_key
from farflung.weights.retention import prune
from tests.weights.parts import (
    DOWN,
    QUERY,
    RUN,
    MemoryStore,
    Policy,
    copy,
    differing,
    equal,
    newest,
    publish,
    same,
    step,
    streams,
    version,
    walk,
    weights,
)

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")


@pytest.fixture
def all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are told however many elements changed: small policies change much at a time."""
    monkeypatch.setattr("farflung.weights.subscriber.MOST_CHANGED", 100)


@pytest.fixture(params=["memory", "folder"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What a subscriber is given to keep its bits in memory, or in a folder."""
    return {} if request.param == "memory" else {"folder": tmp_path / "image"}


def positions(update: Update) -> dict[str, list[int]] | None:
    return None if update.changed is None else {name: at.tolist() for name, at in update.changed.items()}


def brute(before: Policy, after: Policy) -> dict[str, list[int]]:
    return dict(differing(before, after))


@pytest.mark.usefixtures("all_told")
@pytest.mark.parametrize("format", FORMATS)
def test_a_subscriber_follows_and_tells_exactly_what_changed(format: str, room: dict[str, Any]) -> None:
    """Over one delta, over several, over jumps, back over them, and nowhere."""
    store, history = MemoryStore(), walk(12, size=2e-4)
    publish(store, history, formats=("bf16", format) if format != "bf16" else ("bf16",), anchor_every=100)
    expected = streams(history, format)
    subscriber = Subscriber(store, RUN, format=format, **room)
    assert subscriber.newest() == 12
    assert subscriber.fetch(0).changed is None, "nothing was there before"
    held = 0
    for number in (1, 2, 4, 4, 3, 9, 5, 12, 0):
        if number == 9:
            Compactor(store, RUN).step()
        update = subscriber.fetch(number)
        assert same(update.tensors, expected[number])
        assert update.version == subscriber.version == number
        assert positions(update) == brute(expected[held], expected[number])
        assert (update.bytes > 0) == (update.links > 0) == (held != number)
        held = number


def test_what_changed_is_told_under_every_name_of_a_tensor() -> None:
    """Whoever reads a head may know no embedding, and the other way round."""
    store, model = MemoryStore(), torch.zeros(4, 4, dtype=torch.bfloat16)
    publisher, subscriber = Publisher(store, RUN), Subscriber(store, RUN)
    for number, names in enumerate((("lm_head.weight", "model.embed_tokens.weight"),) * 2):
        model[1, 2] = number
        publisher.publish(number, dict.fromkeys(names, model) | {"other": torch.ones(9)})
        update = subscriber.fetch(number)
    assert positions(update) == {"lm_head.weight": [6], "model.embed_tokens.weight": [6]}


def test_elements_that_end_where_they_began_did_not_change(room: dict[str, Any]) -> None:
    one, two = walk(1, size=1e-4)
    three = copy(one)
    three["scale"] += 1
    store = MemoryStore()
    publish(store, [one, two, one, three])
    subscriber = Subscriber(store, RUN, **room)
    subscriber.fetch(0)
    assert subscriber.fetch(2).changed == {}
    subscriber.fetch(1)
    assert positions(subscriber.fetch(3)) == brute(streams([two], "bf16")[0], streams([three], "bf16")[0])


def test_where_most_is_new_no_positions_are_told() -> None:
    store, history = MemoryStore(), walk(2, size=1e-4)
    history[2] = {name: -tensor if name == DOWN else tensor for name, tensor in history[1].items()}
    history[2][QUERY] = history[2][QUERY].clone()
    history[2][QUERY][0, :7] *= -1
    publish(store, history)
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    few = subscriber.fetch(1).changed
    assert few is not None
    assert "scale" not in few or len(few["scale"]) == 1
    assert subscriber.fetch(2).changed is None


def test_one_that_holds_nothing_joins_from_an_anchor(room: dict[str, Any]) -> None:
    store, history = MemoryStore(), walk(7)
    publish(store, history, anchor_every=3)
    for number in (5, 0, 7):
        subscriber = Subscriber(store, RUN, **(room | ({"folder": room["folder"] / str(number)} if room else {})))
        assert (subscriber.version, subscriber.image) == (None, None)
        update = subscriber.fetch(number)
        assert equal(update.tensors, history[number])
        assert update.links == number % 3
        assert update.changed is None


def test_the_cheapest_way_is_taken() -> None:
    """Deltas rather than the full copy beside them; the full copy rather than deltas that cost more."""
    store, history = MemoryStore(), walk(4, size=1e-4)
    publisher = publish(store, history, anchor_every=4)
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    update = subscriber.fetch(4)
    assert update.links == 4
    assert update.bytes == sum(part.nbytes for n in range(1, 5) for part in version(store, n).stream("bf16").delta)
    for number in range(5, 9):
        history.append(step(copy(history[-1]), number, size=0.1))
        publisher.publish(number, history[-1])
    late = Subscriber(store, RUN)
    late.fetch(4)
    update = late.fetch(8)
    stream = version(store, 8).stream("bf16")
    assert equal(update.tensors, history[8])
    assert update.links == 0
    assert update.bytes == sum(part.nbytes for part in stream.anchor) + stream.schema.nbytes


def test_only_what_a_step_changed_is_fetched() -> None:
    store, policy = MemoryStore(), weights()
    publisher = publish(store, [policy])
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    policy["scale"] += 1
    publisher.publish(1, policy)
    store.reads.clear()
    subscriber.fetch(1)
    assert [key for key in store.reads if "/objects/" in key] == [
        object_key(RUN, part) for part in newest(store).stream("bf16").delta
    ]
    publisher.publish(2, policy)
    store.reads.clear()
    update = subscriber.fetch(2)
    assert (update.changed, update.bytes) == ({}, 0)
    assert not any("/objects/" in key for key in store.reads)


def test_a_version_that_is_not_there_is_missing() -> None:
    store = MemoryStore()
    with pytest.raises(Missing, match="version 0 does not exist; nothing is published yet"):
        Subscriber(store, RUN).fetch(0)
    publish(store, walk(1))
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(1)
    for number in (2, -1):
        with pytest.raises(Missing, match=f"version {number} does not exist; the newest is 1"):
            subscriber.fetch(number)
    assert subscriber.version == 1
    with pytest.raises(Missing, match=r"run run-1, version 1: it was not published as 'fp8'"):
        Subscriber(store, RUN, format="fp8").fetch(1)
    assert Subscriber(store, "run-2").newest() is None
    with pytest.raises(BadInput, match="is not the name of a subscriber"):
        Subscriber(store, RUN, name="a/b")


def test_newest_can_be_asked_while_a_fetch_is_at_work(tmp_path: Path) -> None:
    store, history = FolderStore(tmp_path), walk(10)
    publisher = publish(store, history[:1])
    subscriber = Subscriber(store, RUN, name="one")
    done = Event()

    def ask() -> list[int | None]:
        seen = [subscriber.newest()]
        while not done.wait(0.001):
            seen.append(subscriber.newest())
        return seen

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask) for _ in range(3)]
        try:
            for number in range(1, 11):
                publisher.publish(number, history[number])
                assert equal(subscriber.fetch(number).tensors, history[number])
        finally:
            done.set()
        for answers in asked:
            seen = [number for number in answers.result(30) if number is not None]
            assert seen == sorted(seen)


def damage(subscriber: Subscriber, name: str, at: int = 0) -> None:
    """A bit of what the subscriber holds is another: bad memory, or somebody wrote into its tensors."""
    assert subscriber.image is not None
    subscriber.image.arrays[name][at] ^= 1


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("to", [3, 6, 1])
def test_damaged_bits_are_found_when_they_are_built_upon_and_made_again(
    format: str, to: int, room: dict[str, Any]
) -> None:
    store, history = MemoryStore(), walk(6, size=0.02)
    publish(store, history, formats=("bf16", format) if format != "bf16" else ("bf16",), anchor_every=2)
    subscriber = Subscriber(store, RUN, format=format, **room)
    subscriber.fetch(2)
    damage(subscriber, QUERY, 5)
    damage(subscriber, DOWN)
    update = subscriber.fetch(to)
    assert same(update.tensors, streams(history, format)[to])
    assert update.changed is None
    assert same(subscriber.fetch(4).tensors, streams(history, format)[4])


@pytest.mark.usefixtures("all_told")
@pytest.mark.parametrize("forwards", [True, False])
def test_a_fetch_that_dies_while_it_applies_leaves_what_the_next_one_mends(
    forwards: bool, room: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of pieces, in this process and in the next, on to the same version, past it, or back."""
    from farflung.weights import delta

    store, history = MemoryStore(), walk(5, size=1e-3)
    publish(store, history, anchor_every=2)
    right, left = delta.apply, 0

    def dies(*arguments: Any) -> None:
        nonlocal left
        if left == 0:
            raise MemoryError
        left -= 1
        right(*arguments)

    for pieces in range(4):
        for then in (1, 2, 4, 5):
            subscriber = Subscriber(store, RUN, threads=1, **room)
            subscriber.fetch(2 if forwards else 4)
            left = pieces
            monkeypatch.setattr("farflung.weights.delta.apply", dies)
            with pytest.raises(MemoryError):
                subscriber.fetch(4 if forwards else 2)
            monkeypatch.setattr("farflung.weights.delta.apply", right)
            assert (subscriber.version, subscriber.image) == (None, None)
            if room:
                subscriber.close()
                subscriber = Subscriber(store, RUN, threads=1, **room)
            update = subscriber.fetch(then)
            assert equal(update.tensors, history[then])
            assert update.changed is None or pieces == 0
            if forwards and then == 4:
                deltas = [part for n in (3, 4) for part in version(store, n).stream("bf16").delta]
                assert update.bytes == sum(part.nbytes for part in deltas), "what was applied is not fetched whole"
            assert positions(subscriber.fetch(3)) == brute(*streams([history[then], history[3]], "bf16"))
            subscriber.close()


def test_what_changed_is_told_against_what_was_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch failed after it had applied: the next one must not speak of its own step alone."""
    store, history = MemoryStore(), walk(3, size=2e-4)
    publish(store, history)
    subscriber = Subscriber(store, RUN, folder=tmp_path)
    subscriber.fetch(0)
    staged = tmp_path / "state.json.new"
    staged.mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        subscriber.fetch(1)
    staged.rmdir()
    update = subscriber.fetch(2)
    assert equal(update.tensors, history[2])
    assert update.changed is None
    assert positions(subscriber.fetch(3)) == brute(*streams(history[2:], "bf16"))


def test_one_whose_versions_were_pruned_joins_anew(room: dict[str, Any]) -> None:
    """Also when it remembers manifests of versions whose objects are gone."""
    store, history = MemoryStore(), walk(9)
    publisher = publish(store, history[:2], anchor_every=3)
    subscriber = Subscriber(store, RUN, **room)
    subscriber.fetch(1)
    for number in range(2, 10):
        publisher.publish(number, history[number])
        subscriber.newest()
    store.now += 10_000
    assert prune(History(store, RUN, Seal(None)), 2).floor == 6
    assert equal(subscriber.fetch(9).tensors, history[9])
    for number in (1, 5):
        with pytest.raises(Missing, match=f"version {number} was pruned"):
            subscriber.fetch(number)
    assert subscriber.version == 9


def test_a_join_that_fails_half_way_leaves_nothing_half_way(
    room: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder it needs the room of what was held, in memory that stays."""
    monkeypatch.setattr("farflung.weights.schema.PIECE_BYTES", 1000)
    store, history = MemoryStore(), walk(4, size=0.1)
    publish(store, history, anchor_every=3)
    subscriber = Subscriber(store, RUN, threads=1, **room)
    subscriber.fetch(1)
    last = object_key(RUN, version(store, 3).stream("bf16").anchor[-1])
    lost = {last: store.objects[last]}
    for number in (1, 2):
        key = manifest_key(RUN, version(store, number).ref)
        lost[key] = store.objects[key]
    for key in lost:
        store.delete(key)
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"object {last}: a version needs it and it is not there"):
            subscriber.fetch(4)
        assert subscriber.version == (None if room else 1)
    store.put(last, lost[last])
    assert equal(subscriber.fetch(4).tensors, history[4])


def test_one_that_is_ahead_of_its_store_joins_anew_in_its_next_process(tmp_path: Path) -> None:
    """The store was set back to an older copy, and the run went on from there."""
    store, history, others = MemoryStore(), walk(5), walk(6, seed=7)
    publisher = publish(store, history[:3], anchor_every=2)
    older = dict(store.objects), dict(store.pointers)
    for number in (3, 4, 5):
        publisher.publish(number, history[number])
    first = Subscriber(store, RUN)
    first.fetch(5)
    Subscriber(store, RUN, folder=tmp_path / "kept").fetch(5)
    store.objects, store.pointers = older
    again = Publisher(store, RUN, anchor_every=2)
    again.resume()
    for number, match in ((3, "version 3"), (4, "version 4"), (5, "another version 5")):
        again.publish(number, others[number])
        with pytest.raises(Corrupt, match=f"it went back from version 5 to {match}"):
            first.fetch(number)
        kept = shutil.copytree(tmp_path / "kept", tmp_path / str(number))
        assert equal(Subscriber(store, RUN, folder=kept).fetch(number).tensors, others[number])
    assert first.version == 5
    again.publish(6, others[6])
    assert equal(first.fetch(6).tensors, others[6])


def test_a_folder_of_another_run_that_lacks_the_format_is_joined_anew(tmp_path: Path) -> None:
    """The other run's version of that number was published in another format only."""
    store, history = MemoryStore(), walk(3)
    publish(store, history, formats=("bf16", "fp8"))
    other = MemoryStore()
    publish(other, history[:3])
    publisher = Publisher(other, RUN, formats=("bf16", "fp8"))
    publisher.resume()
    publisher.publish(3, history[3])
    for held, wanted in ((1, 3), (2, 3)):
        folder = tmp_path / str(held)
        Subscriber(store, RUN, format="fp8", folder=folder).fetch(held)
        update = Subscriber(other, RUN, format="fp8", folder=folder).fetch(wanted)
        assert same(update.tensors, streams(history[3:], "fp8")[0])
    Subscriber(other, RUN, format="fp8", folder=tmp_path / "newer").fetch(3)
    back = MemoryStore()
    publish(back, history[:3], formats=("bf16", "fp8"))
    publisher = Publisher(back, RUN)
    publisher.resume()
    publisher.publish(3, history[3])
    update = Subscriber(back, RUN, format="fp8", folder=tmp_path / "newer").fetch(2)
    assert same(update.tensors, streams(history[:3], "fp8")[2])


def tiny(number: int) -> Policy:
    """Version ``number`` of a policy in which each version sets one element and clears the one set fifty versions before."""
    elements = torch.zeros(8192)
    elements[[7 * n for n in range(max(0, number - 49), number + 1)]] = 1
    return {"w": elements}


@pytest.fixture(scope="module")
def thousand() -> MemoryStore:
    """A thousand versions, without an anchor in between."""
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=10_000, threads=1)
    for number in range(1001):
        publisher.publish(number, tiny(number))
    return store


@pytest.mark.usefixtures("all_told")
def test_a_thousand_versions_behind_over_every_delta_or_over_few_jumps(thousand: MemoryStore) -> None:
    plain = Subscriber(thousand, RUN)
    plain.fetch(1)
    update = plain.fetch(1000)
    assert update.links == 999
    assert equal(update.tensors, tiny(1000))
    Compactor(thousand, RUN, levels=10, first=1).step()
    for start, stop in ((1, 1000), (0, 1000), (0, 512), (511, 513), (3, 999), (127, 640)):
        behind = Subscriber(thousand, RUN)
        behind.fetch(start)
        update = behind.fetch(stop)
        assert equal(update.tensors, tiny(stop))
        assert update.links <= 2 * math.log2(stop - start)
        assert positions(update) == brute(tiny(start), tiny(stop))
        back = behind.fetch(start)
        assert equal(back.tensors, tiny(start))
        assert back.links == update.links


def test_a_damaged_piece_is_made_again_from_the_objects_that_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many objects a few are fetched."""
    monkeypatch.setattr(schema_module, "PIECE_BYTES", 4096)
    draw = torch.Generator().manual_seed(0)
    policy = {f"w{i:02d}": torch.randn(2048, generator=draw) for i in range(32)}
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish(0, policy)
    for tensor in policy.values():
        tensor[::100] += 1
    publisher.publish(1, policy)
    subscriber = Subscriber(store, RUN, folder=tmp_path)
    whole = subscriber.fetch(1).bytes
    subscriber.close()
    (bits,) = tmp_path.glob("bits-*")
    raw = bytearray(bits.read_bytes())
    raw[len(raw) // 2] ^= 1
    bits.write_bytes(raw)
    mended = Subscriber(store, RUN, folder=tmp_path).fetch(1)
    assert all(torch.equal(mended.tensors[name], tensor.bfloat16()) for name, tensor in policy.items())
    assert 0 < mended.bytes < whole / 10
