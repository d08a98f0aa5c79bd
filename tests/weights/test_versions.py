"""Publisher and subscriber over every store: the same bits arrive, in order, and what was published stays published."""

from __future__ import annotations

import math
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Conflict, FolderStore, Missing, Publisher, StoreError, Subscriber
from farflung.weights.manifest import pointer_key
from farflung.weights.store import Store
from tests.weights.parts import RUN, Crash, MemoryStore, copy, equal, head, overwrite, published, step, weights


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path) if request.param == "folder" else MemoryStore()


def fresh(store: Store) -> Publisher:
    publisher = Publisher(store, RUN)
    publisher.publish_base(weights())
    return publisher


def test_a_subscriber_follows(store: Store) -> None:
    subscriber = Subscriber(store, RUN)
    assert subscriber.newest() is None
    policy = weights()
    publisher = Publisher(store, RUN)
    base = publisher.publish_base(policy)
    assert (base.version, base.changed, base.total, base.bytes) == (0, 2705, 2705, 0)
    assert base.anchor_bytes > 0
    for version in range(1, 6):
        step(policy, version)
        done = publisher.publish(version, policy)
        assert publisher.version == subscriber.newest() == done.version == version
        assert 0 < done.changed < done.total
        assert done.anchor_bytes == 0
        assert not done.repeated
        found = subscriber.fetch(version)
        assert equal(found, policy)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_versions_are_fetched_forward_backward_and_from_nothing(store: Store) -> None:
    history = published(store, 7, anchor_every=3)
    subscriber = Subscriber(store, RUN)
    for version in (0, 5, 5, 7, 2, 6, 3, 1, 4):
        assert equal(subscriber.fetch(version), history[version])
        assert equal(Subscriber(store, RUN).fetch(version), history[version])


def test_the_cheapest_way_is_taken() -> None:
    """One delta rather than the full copy that lies beside it; the full copy rather than deltas that cost more."""
    store = MemoryStore()
    policy = weights()
    publisher = Publisher(store, RUN, anchor_every=4)
    publisher.publish_base(policy)
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    reads: list[str] = []
    get = store.get
    store.get = lambda key, n: (reads.append(key), get(key, n))[1]  # type: ignore[method-assign]
    for version in range(1, 4):
        step(policy, version, size=1e-4)
        publisher.publish(version, policy)
    subscriber.fetch(3)
    policy["scale"] += 1
    publisher.publish(4, policy)
    reads.clear()
    assert equal(subscriber.fetch(4), policy)
    delta = f"{RUN}/objects/{head(store)[1].delta[0].sha256}"
    assert [key for key in reads if "/objects/" in key] == [delta]
    late = Subscriber(store, RUN)
    late.fetch(0)
    for version in range(5, 9):
        step(policy, version, size=0.1)
        publisher.publish(version, policy)
    reads.clear()
    assert equal(late.fetch(8), policy)
    anchor = f"{RUN}/objects/{head(store)[1].anchor[0].sha256}"
    assert [key for key in reads if "/objects/" in key] == [anchor]


def test_a_step_that_changes_nothing_costs_no_object(store: Store) -> None:
    publisher = fresh(store)
    done = publisher.publish(1, weights())
    assert (done.changed, done.bytes) == (0, 0)
    assert equal(Subscriber(store, RUN).fetch(1), weights())


def test_every_bit_pattern_arrives(store: Store) -> None:
    """All 65,536 of them: both zeros, subnormals, infinities and every NaN."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    publisher = Publisher(store, RUN)
    publisher.publish_base({"w": every.view(torch.bfloat16)})
    subscriber = Subscriber(store, RUN)
    assert torch.equal(subscriber.fetch(0)["w"].view(torch.int16), every)
    publisher.publish(1, {"w": every.flip(0).view(torch.bfloat16)})
    assert torch.equal(subscriber.fetch(1)["w"].view(torch.int16), every.flip(0))
    few = every.flip(0).clone()
    few[:4] = torch.tensor([0x7F80, -0x80, -0x8000, 0x7FC1], dtype=torch.int32).to(torch.int16)
    publisher.publish(2, {"w": few.view(torch.bfloat16)})
    found = subscriber.fetch(2)["w"]
    assert torch.equal(found.view(torch.int16), few)
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert math.copysign(1, found[2].item()) == -1


def test_masters_are_rounded_to_nearest_even_and_copied(store: Store) -> None:
    policy = {"w": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.5e38])}
    publisher = Publisher(store, RUN)
    publisher.publish_base(policy)
    assert Subscriber(store, RUN).fetch(0)["w"].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, math.inf]
    bf16 = {"w": policy["w"].bfloat16()}
    publisher.publish(1, bf16)
    bf16["w"][0] = 2
    assert publisher.publish(2, bf16).changed == 1
    assert Subscriber(store, RUN).fetch(2)["w"][0] == 2


def test_a_strided_tensor_and_an_empty_one_arrive(store: Store) -> None:
    policy = {"t": torch.randn(4, 6).T, "s": torch.randn(8)[::2], "e": torch.zeros(0, 3), "f": torch.zeros(0, 3)}
    Publisher(store, RUN).publish_base(policy)
    assert equal(Subscriber(store, RUN).fetch(0), policy)


def test_large_policies_are_split_into_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.weights.publisher.PART_BYTES", 3000)
    history = published(store, 2)
    assert len(head(store)[1].delta) == 3
    for version in (0, 1, 2):
        assert equal(Subscriber(store, RUN).fetch(version), history[version])


def test_publishing_again_changes_nothing(store: Store) -> None:
    publisher, policy = fresh(store), weights()
    assert publisher.publish_base(policy).repeated
    assert Publisher(store, RUN).publish_base(policy).repeated
    step(policy, 1)
    first = publisher.publish(1, policy)
    keys = store.list(RUN)
    again = publisher.publish(1, policy)
    resumed = Publisher.resume(store, RUN)
    once_more = resumed.publish(1, policy)
    for other in (again, once_more):
        assert other.repeated
        assert (other.changed, other.bytes) == (first.changed, first.bytes)
    assert store.list(RUN) == keys


def test_a_version_never_changes(store: Store) -> None:
    publisher, policy = fresh(store), weights()
    step(policy, 1)
    with pytest.raises(Conflict, match=r"version 0 was published with other weights \(tensor embed.weight\)"):
        publisher.publish_base(policy)
    with pytest.raises(Conflict, match="version 0 was published with other weights"):
        Publisher(store, RUN).publish_base(policy)
    publisher.publish(1, policy)
    policy["norm.weight"][3] = 7
    with pytest.raises(Conflict, match=r"version 1 was published with other weights \(tensor norm.weight\)"):
        publisher.publish(1, policy)


def test_versions_neither_skip_nor_go_back(store: Store) -> None:
    with pytest.raises(BadInput, match="nothing is published yet"):
        Publisher(store, RUN).publish(1, weights())
    published(store, 2)
    publisher = Publisher.resume(store, RUN)
    for version in (-1, 0, 1, 4, 9):
        with pytest.raises(BadInput, match=f"version {version} cannot follow version 2"):
            publisher.publish(version, weights())
    for other in (publisher, Publisher(store, RUN)):
        with pytest.raises(Conflict, match="the run is at version 2 already"):
            other.publish_base(weights())


def test_tensors_stay_the_same_ones(store: Store) -> None:
    publisher, policy = fresh(store), weights()
    with pytest.raises(BadInput, match="new tensors: a, b"):
        publisher.publish(1, policy | {"b": torch.ones(1), "a": torch.ones(1)})
    with pytest.raises(BadInput, match=r"missing tensors: norm\.weight"):
        publisher.publish(1, {name: tensor for name, tensor in policy.items() if name != "norm.weight"})
    with pytest.raises(BadInput, match=re.escape("tensor norm.weight has shape (4, 4), not (16,)")):
        publisher.publish(1, policy | {"norm.weight": torch.ones(4, 4)})
    with pytest.raises(BadInput, match=r"new tensors: head.weight"):
        publisher.publish(1, policy | {"head.weight": policy["embed.weight"].clone()})
    with pytest.raises(BadInput, match="tied tensors are"):
        publisher.publish(1, {name: tensor for name, tensor in policy.items() if name != "head.weight"})
    with pytest.raises(BadInput, match=r"tensor ids: it has type torch\.int64"):
        publisher.publish(1, policy | {"ids": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(BadInput, match="no tensors"):
        Publisher(store, "empty").publish_base({})
    assert publisher.publish(1, policy).changed == 0


def test_a_version_that_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(Missing, match="version 0 does not exist; nothing is published yet"):
        Subscriber(store, RUN).fetch(0)
    published(store, 1)
    subscriber = Subscriber(store, RUN)
    for version in (2, -1):
        with pytest.raises(Missing, match=f"version {version} does not exist; the newest is 1"):
            subscriber.fetch(version)
    assert Subscriber(store, "run-2").newest() is None
    assert Publisher.resume(store, "run-2").version is None


def test_of_two_publishers_one_wins(store: Store) -> None:
    first, mine = fresh(store), weights()
    second = Publisher.resume(store, RUN)
    theirs = copy(mine)
    step(mine, 1)
    step(theirs, 2)
    first.publish(1, mine)
    with pytest.raises(Conflict, match="version 1 was not published: another publisher moved the run to version 1"):
        second.publish(1, theirs)
    assert second.version == 0
    assert equal(Subscriber(store, RUN).fetch(1), mine)
    step(mine, 3)
    first.publish(2, mine)
    with pytest.raises(Conflict, match="moved the run to version 2"):
        second.publish(1, theirs)
    assert equal(Subscriber(store, RUN).fetch(2), mine)


def test_two_publishers_with_the_same_bytes_agree(store: Store) -> None:
    first, policy = fresh(store), weights()
    second = Publisher.resume(store, RUN)
    step(policy, 1)
    assert not first.publish(1, policy).repeated
    assert second.publish(1, policy).repeated
    assert second.version == 1


def test_two_bases_at_once(store: Store) -> None:
    late = Publisher(store, RUN)
    fresh(store)
    other = weights(9)
    with pytest.raises(Conflict, match="version 0 was published with other weights"):
        late.publish_base(other)


@pytest.mark.parametrize("late", [False, True])
def test_a_publisher_killed_between_any_two_writes_repeats(late: bool) -> None:
    """Both with the process gone (a resumed publisher) and with the store's error survived (the same publisher)."""
    for survives in (False, True):
        for crash_in in range(20):
            store = MemoryStore()
            store.crash_after = late
            policy = weights()
            publisher = Publisher(store, RUN, anchor_every=1)
            publisher.publish_base(policy)
            before = copy(policy)
            step(policy, 1)
            store.crash_in = crash_in
            try:
                publisher.publish(1, policy)
            except Crash:
                newest = Subscriber(store, RUN).newest()
                assert newest in (0, 1)
                assert equal(Subscriber(store, RUN).fetch(newest), policy if newest else before)
                again = publisher if survives else Publisher.resume(store, RUN, anchor_every=1)
                again.publish(1, policy)
            else:
                assert crash_in == 4
                break
            assert equal(Subscriber(store, RUN).fetch(1), policy)
            step(policy, 2)
            again.publish(2, policy)
            assert equal(Subscriber(store, RUN).fetch(2), policy)


def test_what_a_killed_publisher_left_does_not_bind_the_next(store: Store) -> None:
    """Objects and manifest of version 1 lie there, the pointer does not name them, and version 1 becomes another."""

    class Killed(type(store)):  # type: ignore[misc]
        def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
            raise StoreError("killed")

    policy = weights()
    publisher = fresh(store)
    step(policy, 1)
    whole, store.__class__ = store.__class__, Killed
    with pytest.raises(StoreError):
        publisher.publish(1, policy)
    store.__class__ = whole
    assert publisher.version == 0
    step(policy, 2)
    publisher.publish(1, policy)
    assert equal(Subscriber(store, RUN).fetch(1), policy)


def test_pruning_keeps_what_is_needed(store: Store) -> None:
    history = published(store, 9, anchor_every=3)
    held = Subscriber(store, RUN)
    held.fetch(1)
    publisher = Publisher.resume(store, RUN, anchor_every=3)
    assert publisher.prune(99) == 0
    keys = len(store.list(RUN))
    assert publisher.prune(3) == 6
    assert publisher.prune(3) == 0
    assert len(store.list(RUN)) < keys
    for version in (6, 7, 8, 9):
        assert equal(Subscriber(store, RUN).fetch(version), history[version])
    for version in (0, 5):
        with pytest.raises(Missing, match=f"version {version} was pruned"):
            Subscriber(store, RUN).fetch(version)
    assert equal(held.fetch(9), history[9])
    policy = history[9]
    step(policy, 10)
    publisher.publish(10, policy)
    assert equal(held.fetch(10), policy)
    with pytest.raises(BadInput, match="cannot keep 0"):
        publisher.prune(0)


def test_pruning_keeps_objects_that_newer_versions_share() -> None:
    """The weights go there and back, so that old and new versions have the very same objects."""
    store = MemoryStore()
    one, two = weights(1), weights(2)
    publisher = Publisher(store, RUN, anchor_every=2)
    publisher.publish_base(one)
    for version in range(1, 9):
        publisher.publish(version, two if version % 2 else one)
    assert publisher.prune(2) == 6
    for version in (6, 7, 8):
        assert equal(Subscriber(store, RUN).fetch(version), two if version % 2 else one)


def test_pruning_can_be_killed_anywhere() -> None:
    for crash_in in range(40):
        store = MemoryStore()
        history = published(store, 6, anchor_every=2)
        publisher = Publisher.resume(store, RUN)
        store.crash_in = crash_in
        try:
            publisher.prune(1)
        except Crash:
            assert equal(Subscriber(store, RUN).fetch(6), history[6])
            publisher.prune(1)
        else:
            break
        assert equal(Subscriber(store, RUN).fetch(6), history[6])
        assert [key for key in store.list(RUN) if "/manifests/0000000" in key and "-" in key] == [
            key for key in store.list(RUN) if "/manifests/00000006-" in key
        ]
        kept = {part.sha256 for part in (*head(store)[1].anchor, *head(store)[1].delta)}
        assert {key.rsplit("/", 1)[1] for key in store.list(f"{RUN}/objects")} == kept
    else:
        pytest.fail("pruning never finished")


def test_a_full_disk_publishes_nothing_and_the_next_try_does(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    publisher, policy = fresh(store), weights()
    step(policy, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(StoreError, match="no space for"):
            publisher.publish(1, policy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert publisher.version == 0
    assert Subscriber(store, RUN).newest() == 0
    publisher.publish(1, policy)
    assert equal(Subscriber(store, RUN).fetch(1), policy)


def test_a_bad_run_id_is_refused(store: Store) -> None:
    for run in ("", "a/b", "..", "a b"):
        with pytest.raises(BadInput):
            Publisher(store, run)
        with pytest.raises(BadInput):
            Subscriber(store, run)
    with pytest.raises(BadInput, match="anchor_every"):
        Publisher(store, RUN, anchor_every=0)


def test_a_run_that_went_back_is_an_error(store: Store) -> None:
    published(store, 1)
    old = store.read_pointer(pointer_key(RUN))
    assert old is not None
    subscriber = Subscriber(store, RUN)
    publisher = Publisher.resume(store, RUN)
    policy = weights()
    publisher.publish(2, policy)
    assert subscriber.newest() == 2
    overwrite(store, pointer_key(RUN), old)
    with pytest.raises(Corrupt, match="latest: it went back from version 2 to version 1"):
        subscriber.newest()


def test_newest_can_be_asked_while_a_fetch_is_at_work(store: Store) -> None:
    policy = weights()
    publisher = Publisher(store, RUN)
    publisher.publish_base(policy)
    subscriber = Subscriber(store, RUN)
    done = Event()

    def ask() -> list[int | None]:
        seen = [subscriber.newest()]
        while not done.wait(0.001):
            seen.append(subscriber.newest())
        return seen

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask) for _ in range(3)]
        try:
            for version in range(1, 16):
                step(policy, version)
                publisher.publish(version, policy)
                assert equal(subscriber.fetch(version), policy)
        finally:
            done.set()
        for answers in asked:
            seen = [version for version in answers.result(30) if version is not None]
            assert seen == sorted(seen)
