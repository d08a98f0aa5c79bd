"""The buffer as a state machine: whatever order things happen in, nothing finished is lost or used twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from builders import episode, recipe
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farflung.core.episode import DropCause
from farflung.core.errors import BadInput
from farflung.core.metrics import TokenStats, UpdateMetrics
from farflung.run.buffer import Buffer, Ticket
from farflung.run.ledger import Ledger
from farflung.weights.publisher import Published, PublishedStream

PUBLISHED = Published(1, {"bf16": PublishedStream(5, 100, 7, 0, 6.5)})

TASKS = ["t0", "t1", "t2"]


def finish(buffer: Buffer, ticket: Ticket, version: int = 0) -> bool:
    made = episode(ticket.group, ticket.index, ticket.task, version=version)
    return buffer.finish(made, made.encode())


def commit(ledger: Ledger, update: int) -> None:
    ledger.commit_update(UpdateMetrics(update, TokenStats()), PUBLISHED)


def test_room_is_bounded_and_every_pass_is_a_new_order(tmp_path: Path) -> None:
    buffer = Buffer(Ledger(tmp_path), recipe(groups=2, group_size=2, updates=10), TASKS)
    tickets = buffer.tickets("w", 100)
    assert len(tickets) == 8  # two batches of two groups of two
    assert sorted({t.task for t in tickets if t.group < 3}) == TASKS
    assert len({t.seed for t in tickets}) == 8
    assert buffer.tickets("w", 1) == []


def test_no_more_groups_are_sampled_than_updates_need(tmp_path: Path) -> None:
    buffer = Buffer(Ledger(tmp_path), recipe(groups=2, updates=1, buffer_batches=5), TASKS)
    assert len(buffer.tickets("w", 100)) == 4


def test_sync_samples_one_batch_with_the_newest_version_and_waits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    buffer = Buffer(ledger, recipe(groups=2, updates=3, sync=True), TASKS)
    for update in (1, 2):
        tickets = buffer.tickets("w", 100)
        assert len(tickets) == 4
        assert {t.min_version for t in tickets} == {update - 1}
        for ticket in tickets:
            finish(buffer, ticket, update - 1)
        assert buffer.tickets("w", 1) == []
        assert buffer.batch(update) is not None
        assert buffer.tickets("w", 1) == []
        commit(ledger, update)


def test_stale_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    buffer = Buffer(ledger, recipe(groups=1, updates=9, max_staleness=1, buffer_batches=4), TASKS)
    tickets = buffer.tickets("w", 8)
    for ticket in tickets[:2]:
        finish(buffer, ticket, version=0)
    assert buffer.batch(1) == [0]
    commit(ledger, 1)
    for ticket in tickets[2:4]:
        finish(buffer, ticket, version=1)
    assert buffer.batch(2) == [1]
    commit(ledger, 2)
    for ticket in tickets[4:6]:
        finish(buffer, ticket, version=0)  # two behind by now
    assert buffer.batch(3) is None
    assert ledger.drops() == {"stale": 2}


def test_failed_machinery_is_retried_then_dropped_and_a_lone_survivor_goes_too(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    buffer = Buffer(ledger, recipe(groups=1, group_size=2, retries=1), TASKS)
    first, second = buffer.tickets("w", 2)
    finish(buffer, first)
    buffer.fail(second.group, second.index, 0, DropCause.SANDBOX, "no start")
    again = buffer.tickets("w", 1)[0]
    assert (again.group, again.index, again.attempt) == (second.group, second.index, 1)
    assert again.seed != second.seed
    buffer.fail(again.group, again.index, 1, DropCause.SANDBOX, "no start")
    assert ledger.drops() == {"sandbox": 1, "group": 1}
    assert ledger.drops(final=False) == {"sandbox": 1}


def test_a_dead_workers_episodes_are_handed_out_again_with_the_same_seed(tmp_path: Path) -> None:
    buffer = Buffer(Ledger(tmp_path), recipe(), TASKS)
    before = buffer.tickets("dead", 3)
    assert buffer.release("dead") == 3
    after = buffer.tickets("alive", 3)
    assert {(t.group, t.index, t.seed) for t in before} == {(t.group, t.index, t.seed) for t in after}


def test_an_episode_of_another_task_is_refused(tmp_path: Path) -> None:
    buffer = Buffer(Ledger(tmp_path), recipe(), TASKS)
    ticket = buffer.tickets("w", 1)[0]
    wrong = episode(ticket.group, ticket.index, "other")
    with pytest.raises(BadInput, match="no episode"):
        buffer.finish(wrong, wrong.encode())


def test_no_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no training tasks"):
        Buffer(Ledger(tmp_path), recipe(), [])


class Machine(RuleBasedStateMachine):
    """Workers, a trainer and a coordinator that is killed at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.recipe = recipe(groups=2, group_size=3, updates=4)
        self.finished: set[tuple[int, int]] = set()
        self.trained: list[int] = []
        self.held: list[Ticket] = []
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(Path(self.folder.name))
        self.buffer = Buffer(self.ledger, self.recipe, TASKS)

    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        self.held += self.buffer.tickets("w", most)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.held:
            ticket = self.held[data.draw(st.integers(0, len(self.held) - 1))]
            recorded = finish(self.buffer, ticket)
            assert recorded == ((ticket.group, ticket.index) not in self.finished) or not recorded
            if recorded:
                self.finished.add((ticket.group, ticket.index))

    @rule(data=st.data())
    def break_down(self, data: st.DataObject) -> None:
        if self.held:
            ticket = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.buffer.fail(ticket.group, ticket.index, ticket.attempt, DropCause.SAMPLER, "gone")

    @rule()
    def train(self) -> None:
        update = self.ledger.last_update() + 1
        groups = self.buffer.batch(update)
        assert groups == self.buffer.batch(update)
        if groups is not None and update <= self.recipe.run.updates:
            self.trained += groups
            commit(self.ledger, update)

    @rule()
    def kill_coordinator(self) -> None:
        self.ledger.close()
        self.open()

    @invariant()
    def nothing_is_lost_or_used_twice(self) -> None:
        assert self.ledger.episode_count() == len(self.finished)
        assert len(self.trained) == len(set(self.trained))

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def test_the_trainer_may_be_one_update_ahead_of_its_report(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    buffer = Buffer(ledger, recipe(groups=1, updates=3, buffer_batches=3), TASKS)
    for ticket in buffer.tickets("w", 100):
        finish(buffer, ticket, 0)
    with pytest.raises(BadInput, match="cannot come after"):
        buffer.batch(2)
    assert buffer.batch(1) == [0]
    assert buffer.batch(2) == [1]
    with pytest.raises(BadInput, match="cannot come after"):
        buffer.batch(3)
    assert buffer.tickets("w", 100) == []
    commit(ledger, 1)
    assert buffer.batch(3) == [2]
