"""Around what is wrong with jumps and deltas in fewer bytes there is always a plain way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.core import frame
from farflung.core.errors import Corrupt
from farflung.weights import Compactor, FolderStore, Subscriber, delta
from farflung.weights.changes import Changes
from farflung.weights.manifest import Part, Seal, jump_key, manifest_key, object_key, read_jump
from farflung.weights.planes import compress
from farflung.weights.schema import Schema
from tests.weights.parts import (
    KEY,
    RUN,
    add_object,
    equal,
    flip,
    overwrite,
    publish,
    raw,
    schema_of,
    version,
    walk,
)
from tests.weights.two import Two


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def test_a_spoiled_jump_is_said_and_gone_around(store: FolderStore, caplog: pytest.LogCaptureFixture) -> None:
    history = walk(2, size=1e-3)
    publish(store, history, key=KEY)
    Compactor(store, RUN, key=KEY).step()
    two = Two(store, history, KEY)
    key = jump_key(RUN, "bf16", 2, 2)
    whole = raw(store, key)
    for at in range(0, len(whole), 31):
        overwrite(store, key, flip(whole, at))
        caplog.clear()
        two.agree(2, history[2])
        assert re.search(f"jump {key}: it (was signed with another key, or changed since|is not signed)", caplog.text)
        two = Two(store, history, KEY)
    overwrite(store, key, whole.partition(b"\n")[0])
    two.agree(2, history[2])
    assert f"jump {key}: it is not signed" in caplog.text
    two = Two(store, history, KEY)
    overwrite(store, key, whole)
    two.agree(2, history[2])


@pytest.mark.parametrize("how", ["spoiled", "gone"])
def test_a_jump_whose_objects_cannot_be_read_is_gone_around(
    store: FolderStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With single deltas gone as well nothing is left."""
    history = walk(4, size=1e-3)
    publish(store, history)
    two = Two(store, history)
    objects = {jump.span: [object_key(RUN, p) for p in jump.delta] for jump in Compactor(store, RUN).step()}

    def spoil(keys: list[str]) -> None:
        for key in keys:
            store.delete(key) if how == "gone" else overwrite(store, key, flip(raw(store, key), 99))

    for span in (4, 2):
        spoil(objects[span])
        caplog.clear()
        follower, joiner = two.subscribers()
        update = follower.fetch(4)
        assert equal(update.tensors, history[4])
        assert equal(joiner.fetch(4).tensors, history[4])
        assert update.links == 4
        assert f"tried again over single deltas: object {objects[4][0]}" in caplog.text
    spoil([object_key(RUN, part) for part in version(store, 3).stream("bf16").delta])
    two.refuse(4, f"object {RUN}/objects/")


def test_a_delta_in_fewer_bytes_that_cannot_be_read_is_gone_around(store: FolderStore) -> None:
    before = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    history = [{"w": before}, {"w": before * 1.0005}]
    publish(store, history, small=True)
    assert not set(version(store, 1).stream("bf16").small) & set(version(store, 1).stream("bf16").delta)
    for part in version(store, 1).stream("bf16").small:
        store.delete(object_key(RUN, part))
    subscriber = Subscriber(store, RUN, small=True)
    subscriber.fetch(0)
    assert equal(subscriber.fetch(1).tensors, history[1])


def test_what_is_wrong_with_plain_objects_is_found_at_the_first_try(tmp_path: Path) -> None:
    """Jumps lie on the way, and are not to blame."""

    class Counted(FolderStore):
        reads = 0

        def get(self, key: str, max_bytes: int) -> bytes:
            self.reads += "/objects/" in key
            return super().get(key, max_bytes)

    store, history = Counted(tmp_path), walk(8, size=1e-3)
    publish(store, history)
    Compactor(store, RUN).step()
    plain = object_key(RUN, version(store, 7).stream("bf16").delta[0])
    overwrite(store, plain, flip(raw(store, plain), 99))
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    store.reads = 0
    with pytest.raises(Corrupt, match=plain):
        subscriber.fetch(7)
    assert store.reads <= 2 + 2, "two jumps of an object each, and the delta"
    whole = version(store, 0).stream("bf16").anchor
    anchor = object_key(RUN, whole[-1])
    overwrite(store, anchor, flip(raw(store, anchor), 99))
    store.reads = 0
    with pytest.raises(Corrupt, match=anchor):
        Subscriber(store, RUN).fetch(8)
    assert store.reads <= 1 + len(whole), "the schema, and the whole copy once"


def test_where_no_way_is_left_what_was_wrong_is_said(store: FolderStore) -> None:
    """Not that the version was pruned: two manifests are lost, and the jump over them is spoiled."""
    history = walk(8, size=1e-3)
    publish(store, history)
    jumps = Compactor(store, RUN).step()
    (spoiled,) = (object_key(RUN, part) for jump in jumps if jump.span == 8 for part in jump.delta)
    overwrite(store, spoiled, flip(raw(store, spoiled), 99))
    subscriber = Subscriber(store, RUN)
    subscriber.fetch(0)
    gone = [manifest_key(RUN, version(store, number).ref) for number in (4, 7)]
    for key in gone:
        store.delete(key)
    with pytest.raises(Corrupt, match=spoiled):
        Subscriber(store, RUN).fetch(8)


def wrong_step(raw: bytes, schema: Schema) -> bytes:
    changes = delta.decode(raw, schema, where="jump")
    first = changes[0].content
    assert isinstance(first, Changes)
    steps = np.where(first.steps == 1, np.uint16(2), np.uint16(1))
    return delta.encode([replace(changes[0], content=Changes(first.positions, steps)), *changes[1:]], schema).raw


def short_plane(raw: bytes, schema: Schema) -> bytes:
    data, arrays = frame.decode(raw)
    return frame.encode(data, arrays | {"control": compress(np.zeros(3, np.uint8))})


def wrong_hash(raw: bytes, schema: Schema) -> bytes:
    data, arrays = frame.decode(raw)
    return frame.encode(data, arrays | {"hashes": arrays["hashes"] ^ np.uint8(1)})


@pytest.mark.parametrize("spoil", [wrong_step, short_plane, wrong_hash])
def test_a_wrong_jump_that_is_rightly_signed_is_gone_around(
    store: FolderStore, spoil: Callable[[bytes, Schema], bytes]
) -> None:
    """Some of it may have been applied by then."""
    history = walk(4, size=1e-3)
    publish(store, history, key=KEY)
    Compactor(store, RUN, key=KEY).step()
    seal, schema = Seal(KEY), schema_of(store)
    jump = read_jump(store, RUN, "bf16", 4, 4, seal)
    assert jump is not None
    parts = [Part(*add_object(store, spoil(raw(store, object_key(RUN, part)), schema))) for part in jump.delta]
    wrong = replace(jump, delta=tuple(parts))
    overwrite(store, jump_key(RUN, "bf16", 4, 4), seal.sign(wrong.encode()))
    two = Two(store, history, KEY)
    two.agree(4, history[4])
    follower, _ = two.subscribers()
    assert equal(follower.fetch(4).tensors, history[4])
    assert equal(follower.fetch(0).tensors, history[0])
