"""A state machine: a publisher, a compactor and a pruning that die between any two writes, a store that decays, time that
passes, and subscribers to several formats, in memory and in folders, that die while they apply and start again.

Whatever happens, a subscriber is handed what was published or nothing, and a joiner can always fetch the newest version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farflung.core.errors import Corrupt
from farflung.formats.weights import Quantised
from farflung.weights import Compactor, Conflict, Missing, Publisher, Subscriber, delta
from farflung.weights.history import History
from farflung.weights.manifest import Seal
from farflung.weights.retention import LIVE_SECONDS, held, prune
from tests.weights.parts import (
    KEY,
    RUN,
    Crash,
    MemoryStore,
    Policy,
    copy,
    flip,
    in_format,
    same,
    step,
    weights,
)

FORMATS = ("bf16", "fp8", "nvfp4")
SIZES = [0.0, 1e-4, 1e-3, 0.1]
FOLLOWERS: list[tuple[str, str | None, bool]] = [
    ("bf16", "named", False),
    ("fp8", "kept", True),
    ("nvfp4", None, False),
    ("nvfp4", None, True),
]
"""Their formats, names, and whether they keep their bits in a folder."""

crashes = st.none() | st.integers(0, 12)
who = st.sampled_from(range(len(FOLLOWERS)))


class Versions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.folder = tempfile.TemporaryDirectory()
        self.policies: list[Policy] = []
        self.truth: dict[str, list[Policy]] = {format: [] for format in FORMATS}
        self.forms: dict[str, dict[str, Quantised]] = {}
        self.kept = 0
        self.steps = 0
        self.publisher = self.new_publisher()
        self.compactor = self.new_compactor()
        self.followers = [self.new_follower(i) for i in range(len(FOLLOWERS))]

    def teardown(self) -> None:
        self.folder.cleanup()

    def new_publisher(self) -> Publisher:
        return Publisher(self.store, RUN, formats=FORMATS, anchor_every=3, key=KEY, threads=1)

    def new_compactor(self) -> Compactor:
        return Compactor(self.store, RUN, key=KEY, levels=3)

    def new_follower(self, index: int) -> Subscriber:
        format, name, kept = FOLLOWERS[index]
        folder = Path(self.folder.name, str(index)) if kept else None
        return Subscriber(self.store, RUN, format=format, key=KEY, name=name, folder=folder, threads=1)

    @property
    def newest(self) -> int:
        return len(self.policies) - 1

    def published(self, policy: Policy) -> None:
        self.policies.append(copy(policy))
        for format in FORMATS:
            tensors, self.forms[format] = in_format(policy, format, self.forms.get(format))
            self.truth[format].append(tensors)

    def check(self, index: int, number: int) -> None:
        """It is handed the version, or is told that it was pruned."""
        follower, format = self.followers[index], FOLLOWERS[index][0]
        try:
            update = follower.fetch(number)
        except Missing:
            assert number < self.kept or number > self.newest
        else:
            assert same(update.tensors, self.truth[format][number])

    @contextmanager
    def dying(self, crash_in: int | None, late: bool) -> Iterator[list[bool]]:
        """After so many writes the process is gone; the list says afterwards whether it came to that."""
        died: list[bool] = []
        self.store.crash_in, self.store.crash_after = crash_in, late
        try:
            yield died
        except Crash:
            died.append(True)
        finally:
            self.store.crash_in = None

    @initialize(seed=st.integers(0, 9))
    def first(self, seed: int) -> None:
        self.publisher.publish(0, weights(seed))
        self.published(weights(seed))

    @rule(
        what=st.sampled_from(["step", "step", "step", "back", "tensors"]),
        seed=st.integers(0, 99),
        size=st.sampled_from(SIZES),
        crash_in=crashes,
        late=st.booleans(),
    )
    def publish(self, what: str, seed: int, size: float, crash_in: int | None, late: bool) -> None:
        """The next version. The pointer, and nothing else, decides whether it is."""
        policy = copy(self.policies[max(0, self.newest - 1) if what == "back" else -1])
        if what == "tensors":
            policy["extra"] = torch.ones(policy["extra"].numel() % 3 + 1 if "extra" in policy else 1)
        step(policy, seed, size if what == "step" else 0)
        number = len(self.policies)
        with self.dying(crash_in, late) as died:
            self.publisher.publish(number, policy)
        if Subscriber(self.store, RUN, key=KEY).newest() == number:
            self.published(policy)
        else:
            assert died
        if died and late:  # the process is gone; otherwise the store failed and the publisher lives on
            self.publisher = self.new_publisher()
            assert self.publisher.resume() == self.newest

    @rule(resumed=st.booleans())
    def publish_again(self, resumed: bool) -> None:
        if resumed or self.publisher.version != self.newest:
            self.publisher = self.new_publisher()
            self.publisher.resume()
        before = dict(self.store.objects)
        assert self.publisher.publish(self.newest, self.policies[-1]).repeated
        assert self.store.objects == before

    @rule(seed=st.integers(100, 199))
    def two_publishers(self, seed: int) -> None:
        """One wins, and the other gets a clear error and writes nothing over."""
        first, second = self.new_publisher(), self.new_publisher()
        first.resume()
        second.resume()
        mine, theirs = step(copy(self.policies[-1]), seed), step(copy(self.policies[-1]), seed + 1000)
        second.publish(len(self.policies), theirs)
        self.published(theirs)
        try:
            first.publish(self.newest, mine)
        except Conflict:
            self.publisher = second
        else:
            raise AssertionError("both of them published")

    @rule(crash_in=crashes, late=st.booleans())
    def compact(self, crash_in: int | None, late: bool) -> None:
        with self.dying(crash_in, late) as died:
            self.compactor.step()
        if died and late:
            self.compactor = self.new_compactor()

    @rule(keep=st.integers(1, 4), crash_in=crashes, late=st.booleans())
    def prune(self, keep: int, crash_in: int | None, late: bool) -> None:
        needed = [max(0, self.newest - keep + 1), *held(self.store, RUN).values()]
        with self.dying(crash_in, late):
            done = prune(History(self.store, RUN, Seal(KEY)), keep)
            assert done.floor <= max(self.kept, min(needed))
        self.kept = max(self.kept, min(needed))

    @rule(seconds=st.sampled_from([1.0, LIVE_SECONDS / 2, 2 * LIVE_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.store.now += seconds

    @rule(index=who)
    def follow(self, index: int) -> None:
        assert self.followers[index].newest() == self.newest
        self.check(index, self.newest)

    @rule(index=who, back=st.integers(-1, 6))
    def fetch_any(self, index: int, back: int) -> None:
        self.check(index, max(0, self.newest - back))

    @rule(index=who, damage=st.integers(0, 4000), how=st.sampled_from(["restart", "damage"]))
    def start_again(self, index: int, damage: int, how: str) -> None:
        """In memory it holds nothing; in a folder it holds what it held, of which a bit may have changed meanwhile."""
        self.followers[index].close()
        self.followers[index] = self.new_follower(index)
        if FOLLOWERS[index][2] and how == "damage":
            for bits in Path(self.folder.name, str(index)).glob("bits-*"):
                data = bits.read_bytes()
                bits.write_bytes(flip(data, damage % len(data)))

    @rule(index=who, pieces=st.integers(0, 4), back=st.integers(0, 3), restarts=st.booleans())
    def die_while_it_applies(self, index: int, pieces: int, back: int, restarts: bool) -> None:
        right, left = delta.apply, [pieces]

        def apply(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            right(*arguments)

        with patch("farflung.weights.delta.apply", apply):
            try:
                self.check(index, max(0, self.newest - back))
            except Crash:
                restarts = restarts or FOLLOWERS[index][1] is not None
        if restarts:
            self.followers[index].close()
        self.followers[index] = self.new_follower(index)

    @rule(index=who, back=st.integers(0, 2), data=st.data())
    def decay(self, index: int, back: int, data: st.DataObject) -> None:
        """One byte of the store is wrong for a while: an error, or the right weights, as they needed no such byte."""
        key = data.draw(st.sampled_from([key for key in self.store.list(RUN) if "/leases/" not in key]))
        place = self.store.pointers if key in self.store.pointers else self.store.objects
        whole = place[key]
        place[key] = flip(whole, data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255)))
        try:
            self.check(index, max(0, self.newest - back))
        except Corrupt:
            pass
        finally:
            place[key] = whole

    @invariant()
    def what_is_held_was_published(self) -> None:
        for (format, _, _), follower in zip(FOLLOWERS, self.followers, strict=True):
            if (image := follower.image) is not None:
                assert same(image.tensors(), self.truth[format][image.version])

    @precondition(lambda self: self.policies)
    @invariant()
    def a_joiner_can_fetch_the_newest(self) -> None:
        self.steps += 1
        format = FORMATS[self.steps % len(FORMATS)]
        joiner = Subscriber(self.store, RUN, format=format, key=KEY, threads=1)
        assert same(joiner.fetch(self.newest).tensors, self.truth[format][-1])


Versions.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestVersions = Versions.TestCase
