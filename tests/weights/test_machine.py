"""A state machine: a publisher that crashes between any two writes, a store that decays, two subscribers, pruning.

Whatever happens, a subscriber holds nothing or one published version, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from farflung.core.errors import Corrupt
from farflung.weights import Conflict, Missing, Publisher, Subscriber
from farflung.weights.manifest import pointer_key
from tests.weights.parts import RUN, Crash, MemoryStore, copy, equal, flip, overwrite, step, weights

crashes = st.none() | st.integers(0, 6)


class Versions(RuleBasedStateMachine):
    subscribers = Bundle("subscribers")

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.truth: list[dict[str, torch.Tensor]] = []
        self.pruned = 0
        self.publisher = Publisher(self.store, RUN, anchor_every=3)
        self.all = [Subscriber(self.store, RUN) for _ in range(2)]

    @initialize(target=subscribers)
    def two(self) -> Any:
        return self.all[0]

    @initialize(target=subscribers)
    def and_one_more(self) -> Any:
        return self.all[1]

    def attempt(self, policy: dict[str, torch.Tensor], crash_in: int | None, late: bool) -> None:
        """Publish the next version. The pointer, and nothing else, decides whether that has happened."""
        version = len(self.truth)
        self.store.crash_in, self.store.crash_after = crash_in, late
        try:
            if version == 0:
                self.publisher.publish_base(policy)
            else:
                self.publisher.publish(version, policy)
        except Crash:
            if Subscriber(self.store, RUN).newest() == version:
                self.truth.append(copy(policy))
            if late:  # the process is gone; otherwise the store failed and the publisher lives on
                self.publisher = Publisher.resume(self.store, RUN, anchor_every=3)
        else:
            self.truth.append(copy(policy))
        finally:
            self.store.crash_in = None

    @rule(seed=st.integers(0, 99), size=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]), crash_in=crashes, late=st.booleans())
    def publish(self, seed: int, size: float, crash_in: int | None, late: bool) -> None:
        policy = copy(self.truth[-1]) if self.truth else weights(seed)
        step(policy, seed, size)
        self.attempt(policy, crash_in, late)

    @precondition(lambda self: self.truth)
    @rule()
    def publish_the_same_version_again(self) -> None:
        self.publisher = Publisher.resume(self.store, RUN, anchor_every=3)
        version = len(self.truth) - 1
        assert self.publisher.version == version
        writes = self.store.writes
        assert self.publisher.publish(version, self.truth[-1]).repeated
        assert self.store.writes == writes

    @precondition(lambda self: len(self.truth) > 1)
    @rule(keep=st.integers(1, 4), crash_in=crashes)
    def prune(self, keep: int, crash_in: int | None) -> None:
        self.publisher = Publisher.resume(self.store, RUN, anchor_every=3)
        self.pruned = max(self.pruned, (len(self.truth) - keep) // 3 * 3)
        self.store.crash_in = crash_in
        try:
            self.publisher.prune(keep)
        except Crash:
            pass
        finally:
            self.store.crash_in = None

    @precondition(lambda self: self.truth)
    @rule(subscriber=subscribers)
    def follow(self, subscriber: Subscriber) -> None:
        newest = subscriber.newest()
        assert newest == len(self.truth) - 1
        assert equal(subscriber.fetch(newest), self.truth[newest])

    @precondition(lambda self: self.truth)
    @rule(subscriber=subscribers, data=st.data())
    def fetch_any(self, subscriber: Subscriber, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.truth)))
        try:
            found = subscriber.fetch(version)
        except Missing:
            assert version == len(self.truth) or version < self.pruned
        except Corrupt:  # pruning was cut short: its object is gone, its manifest not yet
            assert version < self.pruned
        else:
            assert equal(found, self.truth[version])

    @precondition(lambda self: self.truth)
    @rule(subscriber=subscribers, data=st.data())
    def decay(self, subscriber: Subscriber, data: st.DataObject) -> None:
        """One byte of the store is wrong for a while: an error, or the right weights (they needed no such byte)."""
        key = data.draw(st.sampled_from(self.store.list(RUN)))
        whole = self.store.pointers[key] if key == pointer_key(RUN) else self.store.objects[key]
        at = data.draw(st.integers(0, len(whole) - 1))
        overwrite(self.store, key, flip(whole, at, data.draw(st.integers(1, 255))))
        held = subscriber.held
        try:
            found = subscriber.fetch(len(self.truth) - 1)
        except Corrupt:
            assert subscriber.held is held
        else:
            assert equal(found, self.truth[-1])
        overwrite(self.store, key, whole)

    @precondition(lambda self: self.truth)
    @rule(seed=st.integers(100, 199))
    def a_second_publisher(self, seed: int) -> None:
        """It takes the run up, publishes, and leaves the first with a clear error and nothing written over."""
        second = Publisher.resume(self.store, RUN, anchor_every=3)
        first = Publisher.resume(self.store, RUN, anchor_every=3)
        mine, theirs = copy(self.truth[-1]), copy(self.truth[-1])
        step(mine, seed)
        step(theirs, seed + 1000)
        version = len(self.truth)
        second.publish(version, theirs)
        self.truth.append(theirs)
        with pytest.raises(Conflict, match="another publisher"):
            first.publish(version, mine)
        self.publisher = second

    @invariant()
    def what_is_held_was_published(self) -> None:
        for subscriber in self.all:
            if subscriber.held is not None:
                held = subscriber.held
                assert equal(held.snapshot.tensors(), self.truth[held.ref.version])

    @invariant()
    def a_joiner_can_fetch_the_newest(self) -> None:
        if self.truth:
            assert equal(Subscriber(self.store, RUN).fetch(len(self.truth) - 1), self.truth[-1])


Versions.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestVersions = Versions.TestCase
