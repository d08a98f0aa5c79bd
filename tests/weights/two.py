"""Two subscribers before a store that somebody spoiled."""

from __future__ import annotations

import pytest

from farflung.core.errors import Corrupt
from farflung.weights import FolderStore, Subscriber
from tests.weights.parts import (
    RUN,
    Policy,
    equal,
    publish,
)


class Two:
    """A subscriber that holds version 0 and one that holds nothing, made anew for every spoiled store."""

    def __init__(self, store: FolderStore, history: list[Policy], key: bytes | None = None) -> None:
        self.store, self.history, self.key = store, history, key
        self.clean = FolderStore(store.root.with_name("clean"))
        publish(self.clean, history[:1], key=key)

    def subscribers(self) -> tuple[Subscriber, Subscriber]:
        seen = FolderStore(self.clean.root)
        follower = Subscriber(seen, RUN, key=self.key)
        follower.fetch(0)
        seen.root = self.store.root
        return follower, Subscriber(self.store, RUN, key=self.key)

    def refuse(self, number: int, match: str, error: type[Exception] = Corrupt) -> None:
        """Neither is handed the version, and what is held stays."""
        follower, joiner = self.subscribers()
        for subscriber in (follower, joiner):
            with pytest.raises(error, match=match):
                subscriber.fetch(number)
        assert (joiner.version, joiner.image) == (None, None)
        assert follower.version == 0
        assert follower.image is not None
        assert equal(follower.image.tensors(), self.history[0])

    def agree(self, number: int, policy: Policy) -> None:
        for subscriber in self.subscribers():
            assert equal(subscriber.fetch(number).tensors, policy)
