"""Retention: leases by the store's clock, and prunings that take nothing that anybody needs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, FolderStore, Missing, Publisher, Subscriber
from farflung.weights.history import History
from farflung.weights.manifest import Seal, jump_key, manifest_key, object_key
from farflung.weights.retention import LIVE_SECONDS, ORPHAN_SECONDS, Removed, held, prune
from farflung.weights.verify import verify
from tests.weights.parts import (
    RUN,
    Crash,
    MemoryStore,
    copy,
    equal,
    newest,
    overwrite,
    publish,
    step,
    version,
    walk,
    weights,
)
from tests.weights.pruning import old_run, pruned


def test_the_newest_versions_can_still_be_joined_and_reached() -> None:
    store, history = old_run(formats=("bf16", "nvfp4"))
    follower = Subscriber(store, RUN)
    follower.fetch(1)
    remembers = History(store, RUN, Seal(None))
    assert prune(remembers, 99) == Removed(0, 0, 0, 0, 0)
    before = len(store.objects)
    done = pruned(store, 3)
    assert (done.floor, done.versions) == (6, 6)
    assert prune(remembers, 99).floor == 6, "the oldest that is left"
    assert before - len(store.objects) == done.versions + done.objects + 2 * len(
        ["0-2", "2-4", "4-6", "0-4", "4-8", "0-8"]
    )
    assert pruned(store, 3) == Removed(6, 0, 0, 0, 0)
    for number in range(6, 10):
        assert equal(Subscriber(store, RUN).fetch(number).tensors, history[number])
    for number in (0, 5):
        with pytest.raises(Missing, match=f"version {number} was pruned"):
            Subscriber(store, RUN).fetch(number)
    assert equal(follower.fetch(9).tensors, history[9])
    publisher = Publisher(store, RUN, anchor_every=3, formats=("bf16", "nvfp4"))
    publisher.resume()
    for number in range(10, 14):
        history.append(step(copy(history[-1]), number))
        publisher.publish(number, history[-1])
    assert equal(follower.fetch(13).tensors, history[13])
    with pytest.raises(BadInput, match="cannot keep 0 versions"):
        pruned(store, 0)
    assert pruned(MemoryStore(), 1) == Removed(0, 0, 0, 0, 0)


def test_a_run_goes_on_without_the_names_of_what_was_pruned() -> None:
    store, history = old_run(15)
    assert pruned(store, 1).floor == 15
    publisher = Publisher(store, RUN, anchor_every=3)
    publisher.resume()
    publisher.publish(16, weights(3))
    assert [ref.version for ref in newest(store).manifest.ancestors] == [15, 14, 12]
    subscriber = Subscriber(store, RUN)
    for number, policy in ((15, history[15]), (16, weights(3)), (15, history[15])):
        assert equal(subscriber.fetch(number).tensors, policy)
    with pytest.raises(Missing, match="version 14 was pruned"):
        subscriber.fetch(14)


def test_a_manifest_that_is_spoiled_far_below_goes_with_the_others() -> None:
    store, history = old_run()
    key = manifest_key(RUN, History(store, RUN, Seal(None)).find(1).ref)
    overwrite(store, key, b"spoiled")
    done = pruned(store, 3)
    assert (done.floor, done.versions) == (6, 6)
    assert key not in store.objects
    for number in range(6, 10):
        assert equal(Subscriber(store, RUN).fetch(number).tensors, history[number])


def test_a_spoiled_jump_goes_and_nothing_else_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    store, history = old_run()
    key = jump_key(RUN, "bf16", 8, 2)
    overwrite(store, key, b"spoiled")
    done = pruned(store, 3, dry_run=True)
    assert key in store.objects
    assert pruned(store, 3) == done
    assert key not in store.objects
    assert f"jump {key}: not a jump" in caplog.text
    follower = Subscriber(store, RUN)
    for number in (6, 8, 9):
        assert equal(follower.fetch(number).tensors, history[number])
    made = Compactor(store, RUN).step()
    assert [(one.version, one.span) for one in made] == [(8, 2)]


def test_files_of_the_file_system_are_no_keys(tmp_path: Path) -> None:
    """What NFS keeps of a deleted file that somebody still reads."""
    store, history = FolderStore(tmp_path), walk(3)
    publish(store, history)
    Subscriber(store, RUN, name="one").fetch(3)
    for folder in ("leases", "objects", "manifests"):
        (tmp_path / RUN / folder / ".nfs000000000001").write_bytes(b"")
    assert held(store, RUN) == {"one": 3}
    assert pruned(store, 1, live_seconds=-1.0).leases == 1
    assert (tmp_path / RUN / "objects" / ".nfs000000000001").exists()
    assert verify(History(store, RUN, Seal(None))).faults == ()


def test_ages_are_the_stores_and_no_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock is years off; the store's says that lease and orphan are young."""
    store, history = FolderStore(tmp_path), walk(4)
    publish(store, history, anchor_every=1)
    store.put(f"{RUN}/objects/{'0' * 64}", b"of a publisher that is at work")
    Subscriber(store, RUN, name="one").fetch(2)
    now = time.time()
    for wrong in (-1e8, 1e8):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: now + wrong)
        assert held(store, RUN) == {"one": 2}
        assert pruned(store, 1) == Removed(0, 0, 0, 0, 0), "versions are young, too"
    done = pruned(store, 1, live_seconds=-1, orphan_seconds=-1)
    assert (done.floor, done.versions, done.leases) == (4, 4, 1)
    assert not store.exists(f"{RUN}/objects/{'0' * 64}")
    assert equal(Subscriber(store, RUN).fetch(4).tensors, history[4])


def test_orphans_go_when_they_are_old_and_not_before() -> None:
    """Objects and a manifest of a publisher that died, and jump objects of a compactor that died."""
    store, history = old_run()
    publisher = Publisher(store, RUN, anchor_every=3, threads=1)
    publisher.resume()
    reachable = set(store.objects)
    store.crash_in = 4
    with pytest.raises(Crash):
        publisher.publish(10, step(copy(history[9]), 10))
    store.crash_in = None
    orphans = {key for key in set(store.objects) - reachable if "/objects/" in key}
    assert len(orphans) == 2
    assert pruned(store, 99).objects == 0
    store.now += ORPHAN_SECONDS
    assert pruned(store, 99).objects == 0
    store.now += 1
    assert pruned(store, 99).objects == 2
    assert not orphans & set(store.objects)
    assert reachable <= set(store.objects)
    publisher.publish(10, weights(5))
    assert equal(Subscriber(store, RUN).fetch(10).tensors, weights(5))


@pytest.mark.parametrize("when", ["before its manifest", "once it is known what may go"])
def test_a_publisher_that_repeats_what_a_dead_one_left_keeps_its_objects(when: str) -> None:
    """They are old, and a pruning runs while the publisher is at work."""
    store, history = old_run()
    policy = step(copy(history[9]), 10)
    publisher = Publisher(store, RUN, anchor_every=3, threads=1)
    publisher.resume()
    store.crash_in = 4
    with pytest.raises(Crash):
        publisher.publish(10, policy)
    store.crash_in = None
    store.now += ORPHAN_SECONDS + 1
    again = Publisher(store, RUN, anchor_every=3, threads=1)
    again.resume()
    put, ages = store.put, store.ages
    met: list[str] = []

    def prunes(key: str, data: bytes) -> None:
        if key.startswith(f"{RUN}/manifests/"):
            met.append(key)
            assert pruned(store, 99).objects == 0
        put(key, data)

    def publishes(folder: str) -> dict[str, float]:
        if folder == f"{RUN}/objects":
            met.append(folder)
            again.publish(10, policy)
        return ages(folder)

    if when == "before its manifest":
        store.put = prunes  # type: ignore[method-assign]
        again.publish(10, policy)
    else:
        store.ages = publishes  # type: ignore[method-assign]
        assert pruned(store, 99).objects == 0
    assert len(met) == 1
    assert equal(Subscriber(store, RUN).fetch(10).tensors, policy)


def test_what_removed_versions_named_goes_unless_it_was_put_again() -> None:
    """Put again by a publisher at work, whose version nobody can see yet."""
    store, _ = old_run()
    known = History(store, RUN, Seal(None))
    again, *_ = known.find(2).stream("bf16").delta
    gone = known.find(1).stream("bf16").delta
    store.put(object_key(RUN, again), store.objects[object_key(RUN, again)])
    store.now += LIVE_SECONDS + 1
    pruned(store, 1)
    assert store.exists(object_key(RUN, again))
    assert not any(store.exists(object_key(RUN, part)) for part in gone)
    store.now += ORPHAN_SECONDS
    assert pruned(store, 1).objects == 1
    assert not store.exists(object_key(RUN, again))


def test_objects_that_old_and_new_versions_share_stay() -> None:
    """The weights go there and back, so that versions have the very same objects."""
    store, one, two = MemoryStore(), weights(1), weights(2)
    publish(store, [two if number % 2 else one for number in range(9)], anchor_every=2)
    store.now += 10 * LIVE_SECONDS
    assert pruned(store, 2).floor == 6
    for number in (6, 7, 8):
        assert equal(Subscriber(store, RUN).fetch(number).tensors, two if number % 2 else one)


def test_all_that_is_kept_is_what_some_version_names() -> None:
    store, _ = old_run()
    pruned(store, 1)
    version = newest(store)
    stream = version.stream("bf16")
    assert {key for key in store.objects if "/objects/" in key} == {
        object_key(RUN, part) for part in (stream.schema, *stream.anchor, *stream.delta)
    }
    assert len([key for key in store.objects if "/manifests/" in key]) == 1
    assert not any("/jumps/" in key for key in store.objects)


@pytest.mark.parametrize("late", [False, True])
def test_a_pruning_that_stops_at_any_write_leaves_the_rest_whole(late: bool) -> None:
    store, history = old_run(7)
    whole = MemoryStore()
    whole.objects, whole.pointers, whole.written = dict(store.objects), dict(store.pointers), dict(store.written)
    whole.now = store.now
    pruned(whole, 1)
    deletions = len(store.objects) - len(whole.objects)
    start = dict(store.objects)
    for crash_in in range(deletions):
        store.objects, store.written = dict(start), dict.fromkeys(start, 0.0) | {f"{RUN}/latest": 0.0}
        follower = Subscriber(store, RUN)
        follower.fetch(2)
        store.crash_in, store.crash_after = crash_in, late
        with pytest.raises(Crash):
            pruned(store, 1)
        store.crash_in = None
        assert equal(follower.fetch(7).tensors, history[7])
        for number in (6, 7):
            assert equal(Subscriber(store, RUN).fetch(number).tensors, history[number])
        for number in range(6):
            try:
                assert equal(Subscriber(store, RUN).fetch(number).tensors, history[number])
            except Missing:
                continue
        pruned(store, 1)
        assert store.objects == whole.objects
    assert crash_in > 20


def test_a_format_that_is_new_keeps_what_the_others_are_joined_from() -> None:
    """The newest format has its first anchor at 5, the other its last one at 3: neither is a place to join both from."""
    store, history = MemoryStore(), walk(8)
    publish(store, history[:5], anchor_every=3)
    publisher = Publisher(store, RUN, formats=("bf16", "fp8"), anchor_every=7)
    publisher.resume()
    for number in (5, 6):
        publisher.publish(number, history[number])
    store.now += 10 * LIVE_SECONDS
    assert pruned(store, 1).floor == 0
    assert equal(Subscriber(store, RUN).fetch(6).tensors, history[6])
    publisher.publish(7, history[7])
    assert pruned(store, 1).floor == 7
    assert equal(Subscriber(store, RUN).fetch(7).tensors, history[7])


def test_what_is_not_ours_is_left_alone() -> None:
    store, _ = old_run()
    foreign = [f"{RUN}/jumps/x-y", f"{RUN}/jumps/bf16/note-1", f"{RUN}/jumps/bf16/00000002", f"{RUN}/manifests/old"]
    foreign += [f"{RUN}/notes/a", f"{RUN}/manifests/00000001-{'g' * 64}", "run-2/objects/a"]
    for key in foreign:
        overwrite(store, key, b"mine")
        store.written[key] = 0
    assert pruned(store, 1).floor == 9
    assert all(key in store.objects for key in foreign)


def test_nothing_goes_where_a_version_between_others_is_lost() -> None:
    """It may be all that leads to the whole copy that the newest version starts from."""
    store, history = MemoryStore(), walk(8)
    publish(store, history, anchor_every=100)
    store.now += 2 * ORPHAN_SECONDS
    lost = manifest_key(RUN, version(store, 5).ref)
    kept = store.objects.pop(lost)
    before = set(store.objects)
    with pytest.raises(Corrupt, match="the version before version 6 is not there, but 5 older ones are"):
        pruned(store, 100)
    assert set(store.objects) == before
    store.objects[lost] = kept
    assert pruned(store, 100).versions == 0
    assert equal(Subscriber(store, RUN).fetch(8).tensors, history[8])
