"""The publisher: versions in order and forever, in every format, whatever happens between two writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.core.errors import BadInput
from farflung.weights import Conflict, FolderStore, Publisher, Subscriber
from farflung.weights.manifest import pointer_key
from farflung.weights.store import Store
from tests.weights.parts import (
    DOWN,
    EMBED,
    HEAD,
    KEY,
    NORM,
    QUERY,
    RUN,
    MemoryStore,
    Policy,
    copy,
    differing,
    equal,
    fetch,
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


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path) if request.param == "folder" else MemoryStore()


def kinds(writes: list[str]) -> str:
    """o, m, p for an object, a manifest, a pointer."""
    return "".join("p" if key == pointer_key(RUN) else key.split("/")[1][0] for key in writes)


def test_every_format_holds_what_quantise_gives_with_the_last_form(store: Store) -> None:
    history = walk(3, size=0.02)
    publisher = Publisher(store, RUN, formats=FORMATS, key=KEY)
    for number, policy in enumerate(history):
        assert set(publisher.publish(number, policy).streams) == set(FORMATS)
    for format in FORMATS:
        for number, expected in enumerate(streams(history, format)):
            found = Subscriber(store, RUN, format=format, key=KEY).fetch(number).tensors
            assert same(found, expected)
            assert found[HEAD].data_ptr() == found[EMBED].data_ptr()


def test_what_is_told_is_what_was_published() -> None:
    store, history = MemoryStore(), walk(1, size=1e-3)
    publisher = Publisher(store, RUN, formats=FORMATS)
    base, done = (publisher.publish(number, policy) for number, policy in enumerate(history))
    for format in FORMATS:
        old, new = streams(history, format)
        changes = {name: at for name, at in differing(old, new).items() if name != HEAD}
        first, second = base.streams[format], done.streams[format]
        stream = newest(store).stream(format)
        assert second.changed == stream.changed == sum(map(len, changes.values()))
        assert second.bytes == sum(part.nbytes for part in stream.delta)
        assert (second.anchor_bytes, first.changed, first.bytes) == (0, 0, 0)
        assert first.anchor_bytes == sum(part.nbytes for part in version(store, 0).stream(format).anchor)
        assert 0 < second.bound < second.bytes < first.anchor_bytes
        assert second.elements == first.elements > second.changed
    assert not done.repeated
    assert done.seconds >= done.cast_seconds > 0


def test_objects_come_before_the_manifest_and_the_manifest_before_the_pointer() -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN, formats=FORMATS, anchor_every=2)
    for number, policy in enumerate(walk(4)):
        store.writes.clear()
        publisher.publish(number, policy)
        assert kinds(store.writes) == "o" * (len(store.writes) - 2) + "mp"


def test_excluded_and_shared_tensors_are_stored_once_for_all_formats() -> None:
    store = MemoryStore()
    publish(store, walk(1), formats=FORMATS, exclude=("*.down_proj.*",))
    found = newest(store).manifest.streams
    deltas = [set(found[format].delta) for format in FORMATS]
    shared = set.intersection(*deltas)
    assert len(shared) == 1
    assert all(len(delta) == 2 for delta in deltas)
    for format in FORMATS:
        tensors = fetch(store, 1, format)
        assert tensors[DOWN].dtype == torch.bfloat16
        assert f"{DOWN}_scale" not in tensors
    anchors = [set(version(store, 0).stream(format).anchor) for format in FORMATS]
    assert len(set.intersection(*anchors)) == 1


def test_a_step_that_changes_nothing_costs_no_object() -> None:
    store = MemoryStore()
    publisher = publish(store, walk(1), formats=("bf16", "fp8"))
    store.writes.clear()
    done = publisher.publish(2, walk(1)[1])
    assert kinds(store.writes) == "oomp", "of the schemas, which are there"
    assert {(s.changed, s.bytes, s.bound) for s in done.streams.values()} == {(0, 0, 0.0)}
    assert newest(store).stream("bf16").root == version(store, 1).stream("bf16").root
    assert equal(fetch(store, 2), walk(1)[1])


def test_whole_copies_lie_beside_every_nth_version() -> None:
    store = MemoryStore()
    publish(store, walk(7), formats=("bf16", "mxfp4"), anchor_every=3)
    for number in range(8):
        found = version(store, number).manifest
        assert found.whole == all(s.anchor for s in found.streams.values()) == (number % 3 == 0)
        assert all((s.before is None) == (number == 0) for s in found.streams.values())
        assert (found.anchored and found.anchored.version) == (None if number == 0 else (number - 1) // 3 * 3)


def test_large_tensors_are_split_over_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.weights.schema.PIECE_BYTES", 1000)
    store, history = MemoryStore(), walk(2)
    publish(store, history, formats=("bf16", "nvfp4"))
    assert len(newest(store).stream("bf16").delta) == 10
    for format in ("bf16", "nvfp4"):
        for number, expected in enumerate(streams(history, format)):
            assert same(fetch(store, number, format), expected)


def test_every_pattern_of_sixteen_bits_arrives(store: Store) -> None:
    """Both zeros, subnormals, infinities and every NaN, whole and as changes."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    publisher = Publisher(store, RUN)
    for number, bits in enumerate((every, every.flip(0), torch.where(every % 9 == 0, every, every.flip(0)))):
        publisher.publish(number, {"w": bits.view(torch.bfloat16)})
        assert torch.equal(fetch(store, number)["w"].view(torch.int16), bits)


def test_native_streams_hold_tensors_as_they_are(store: Store) -> None:
    policy: Policy = {
        "f": torch.tensor([float("nan"), -0.0, 1e-40, float("inf")]),
        "h": torch.randn(3, 5).half().T,
        "e": torch.randn(7).to(torch.float8_e4m3fn),
        QUERY: torch.randint(0, 256, (4, 8), dtype=torch.uint8),
        "none": torch.zeros(0, 3),
    }
    policy["tied"] = policy[QUERY]
    publisher = Publisher(store, RUN, formats=("native",))
    publisher.publish(0, policy)
    policy["f"].view(torch.int32)[0] += 1
    policy[QUERY][3] += 1
    publisher.publish(1, policy)
    resumed = Publisher(store, RUN, formats=("native",))
    assert resumed.resume() == 1
    assert resumed.publish(1, policy).repeated
    found = fetch(store, 1, "native")
    assert same(found, policy)
    assert found["tied"].data_ptr() == found[QUERY].data_ptr()


def test_a_snapshot_is_published_as_it_was_taken(store: Store) -> None:
    policy = weights()
    publisher = Publisher(store, RUN, formats=("bf16", "fp8"))
    taken, then = publisher.snapshot(policy), copy(policy)
    step(policy, 1)
    publisher.publish(0, taken)
    assert equal(fetch(store, 0), then)


def test_publishing_again_changes_nothing(store: Store) -> None:
    history = walk(1, size=0.05)
    first = publish(store, history, formats=FORMATS)
    keys = store.list(RUN)
    resumed = Publisher(store, RUN, formats=FORMATS)
    assert resumed.resume() == 1
    for publisher in (first, resumed):
        done = publisher.publish(1, history[1])
        assert done.repeated
        assert done.streams["fp8"].changed == newest(store).stream("fp8").changed
    publish(MemoryStore(), history[:1])
    assert store.list(RUN) == keys
    base = MemoryStore()
    publish(base, history[:1])
    assert Publisher(base, RUN).publish(0, history[0]).repeated


def test_a_version_never_changes(store: Store) -> None:
    policy = weights()
    publisher = publish(store, [policy], formats=("bf16", "fp8"))
    step(policy, 1)
    with pytest.raises(Conflict, match=rf"version 0 was published with other weights \(bf16, {EMBED}\)"):
        Publisher(store, RUN, formats=("bf16", "fp8")).publish(0, policy)
    publisher.publish(1, policy)
    policy[NORM][3] = 7
    with pytest.raises(Conflict, match=rf"version 1 was published with other weights \(bf16, {NORM}\)"):
        publisher.publish(1, policy)
    with pytest.raises(Conflict, match=r"with other weights \(bf16, its tensors\)"):
        publisher.publish(1, {name: tensor for name, tensor in policy.items() if name != NORM})


def test_versions_neither_skip_nor_go_back(store: Store) -> None:
    with pytest.raises(BadInput, match=r"run run-1: version 1 cannot follow nothing\n.*resume"):
        Publisher(store, RUN).publish(1, weights())
    publisher = publish(store, walk(2))
    for odd in (-1, "3", None):
        with pytest.raises(BadInput, match=f"{odd!r} is no version"):
            publisher.publish(odd, weights())  # type: ignore[arg-type]
    for number in (0, 1, 4, 9):
        with pytest.raises(BadInput, match=rf"version {number} cannot follow version 2\n.*publish version 3"):
            publisher.publish(number, weights())
    for number in (0, 2, 3):
        with pytest.raises(Conflict, match=r"the run is at version 2 already\n.*resume"):
            Publisher(store, RUN).publish(number, weights())
    with pytest.raises(BadInput, match="anchor_every is 0"):
        Publisher(store, RUN, anchor_every=0)


CHANGES: dict[str, Any] = {
    "a matrix": lambda policy: {QUERY: torch.randn(48, 40)},
    "a vector": lambda policy: {NORM: torch.ones(17)},
    "a new tensor": lambda policy: {"model.new.weight": torch.ones(3)},
    "an untied head": lambda policy: {HEAD: policy[EMBED].clone()},
    "another type of matrix": lambda policy: {QUERY: torch.randn(40)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_make_a_version_whole(change: str) -> None:
    """And the next one is a delta again; a subscriber follows over it, and back, from an anchor."""
    store, history = MemoryStore(), walk(1)
    history += [history[1] | CHANGES[change](history[1])]
    history += [step(copy(history[2]), 5)]
    publish(store, history, formats=("bf16", "nvfp4"), anchor_every=100)
    for format in ("bf16", "nvfp4"):
        follower = Subscriber(store, RUN, format=format)
        for number, expected in enumerate(streams(history, format)):
            stream = version(store, number).stream(format)
            assert (stream.before is None) == bool(stream.anchor) == (number in (0, 2))
            assert same(follower.fetch(number).tensors, expected)
            assert same(fetch(store, number, format), expected)
        assert same(follower.fetch(1).tensors, streams(history, format)[1])


@pytest.mark.parametrize(
    ("format", "suffix"), [("nvfp4", "_scale"), ("nvfp4", "_scale_2"), ("mxfp4", "_scale"), ("fp8", "_scale_inv")]
)
def test_a_name_that_a_format_needs_is_refused_before_anything_is_written(
    store: Store, format: str, suffix: str
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    policy = {name: torch.randn(64, 64), name + suffix: torch.ones(3)}
    with pytest.raises(BadInput, match=f"tensor {name}{suffix}: {format} has a tensor of this name"):
        Publisher(store, RUN, formats=("bf16", format)).publish(0, policy)
    assert store.list(RUN) == []
    publisher = Publisher(store, RUN)
    publisher.publish(0, policy)
    again = Publisher(store, RUN)
    again.resume()
    assert again.publish(0, policy).repeated


def test_odd_arguments_are_refused(store: Store) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(BadInput, match="exclude is the text"):
        Publisher(store, RUN, exclude="model.*")
    with pytest.raises(BadInput, match="the key is a str"):
        Publisher(store, RUN, key="secret")  # type: ignore[arg-type]
    publisher = Publisher(store, RUN, formats=("bf16", "nvfp4"))
    for odd, said in (
        (iter([]), r"not names with tensors\n.*state_dict"),
        ({"w": None}, "tensor w: it is a"),
        ({"w": torch.ones(2, device="meta")}, "tensor w: it is on the meta device"),
        ({"w": torch.ones(2, dtype=torch.int64)}, r"tensor w: it has type torch.int64.*\n.*native"),
    ):
        with pytest.raises(BadInput, match=said):
            publisher.publish(0, odd)  # type: ignore[arg-type]
    assert store.list(RUN) == []
    publisher.publish(
        0, {name: torch.ones(64, 0), f"{name[:-7]}2.weight": torch.ones(0, 64), "scale": torch.tensor(2.0)}
    )
    found = Subscriber(store, RUN, format="nvfp4").fetch(0).tensors
    assert [tuple(tensor.shape) for tensor in found.values()] == [(64, 0), (0, 64), ()]


def test_tensors_that_only_look_the_same_are_not_tied(store: Store) -> None:
    values = torch.complex(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]))
    Publisher(store, RUN, formats=("native",)).publish(0, {"a": values.imag, "b": values.conj().imag})
    found = Subscriber(store, RUN, format="native").fetch(0).tensors
    assert found["a"].tolist() == [1.0, 2.0, 3.0]
    assert found["b"].tolist() == [-1.0, -2.0, -3.0]
