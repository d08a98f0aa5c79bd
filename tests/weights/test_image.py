"""Images: bits in memory or in a folder, and what the next process finds of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from farflung.core.errors import BadInput
from farflung.weights import FolderStore, StoreError, Subscriber
from farflung.weights.elements import ELEMENT_TYPES, digest
from farflung.weights.image import Folder, Image, Room
from farflung.weights.schema import Schema, TensorType
from tests.weights.parts import NORM, QUERY, RUN, MemoryStore, Policy, copy, equal, flip, publish, schema, walk

FEW = schema(a=("BF16", (2, 3)), b=("F4", (3,)), none=("F32", (0, 2)), c=("F32", ()))
FEW = Schema(FEW.tensors, FEW.pieces, {"head": "a"})


def filled(room: Room, version: int = 7, schema: Schema = FEW) -> Image:
    arrays = room.arrays(schema)
    for seed, array in enumerate(arrays.values()):
        array[...] = np.arange(len(array)) + seed
    image = Image(version, schema, arrays, [])
    image.hashes = [digest(image.piece(number)) for number in range(len(schema.pieces))]
    return image


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_an_image_is_tensors_over_its_arrays(where: str, tmp_path: Path) -> None:
    image = filled(Room() if where == "memory" else Folder(tmp_path / "new" / "folder"))
    tensors = image.tensors()
    assert set(tensors) == {"a", "b", "none", "c", "head"}
    assert tensors["a"].dtype == torch.bfloat16
    assert [tuple(tensors[name].shape) for name in ("a", "b", "none", "c")] == [(2, 3), (3,), (0, 2), ()]
    assert tensors["head"].data_ptr() == tensors["a"].data_ptr() == image.arrays["a"].ctypes.data
    tensors["a"][1, 2] = 3.0
    assert image.piece(0)[5] == 0x4040
    assert image.root == FEW.root(image.hashes)


def test_a_folder_keeps_an_image_for_the_next_process(tmp_path: Path) -> None:
    assert Folder(tmp_path).load() is None
    room = Folder(tmp_path)
    image = filled(room)
    room.save(image)
    room.close()
    left = Folder(tmp_path).load()
    assert left is not None
    assert (left.version, left.schema, left.hashes) == (7, FEW, image.hashes)
    assert left.torn == {0, 1, 2, 3}, "until somebody has looked"
    assert [digest(left.piece(number)) for number in range(4)] == image.hashes


def test_an_image_of_another_schema_takes_the_place_of_the_first(tmp_path: Path) -> None:
    room = Folder(tmp_path)
    room.save(filled(room))
    other = schema(z=("U8", (9,)))
    room.save(filled(room, 8, other))
    assert len(list(tmp_path.glob("bits-*"))) == 1
    room.close()
    left = Folder(tmp_path).load()
    assert left is not None
    assert (left.version, left.schema) == (8, other)


def test_bits_that_are_gone_or_short_are_torn_and_no_error(tmp_path: Path) -> None:
    room = Folder(tmp_path)
    image = filled(room)
    room.save(image)
    room.close()
    (bits,) = tmp_path.glob("bits-*")
    for spoil in (lambda: bits.write_bytes(bits.read_bytes()[:3]), bits.unlink, lambda: bits.write_bytes(bytes(9999))):
        spoil()
        left = Folder(tmp_path).load()
        assert left is not None
        assert digest(left.piece(0)) != image.hashes[0]


WRONG: list[Any] = [
    b"",
    b"[]",
    b"\xff\xff",
    b"[" * 9000,
    {"more": 1},
    {"version": -1},
    {"version": "7"},
    {"root": "0" * 64},
    {"root": None},
    {"schema": {}},
    {"schema": []},
    {"hashes": "00"},
    {"hashes": "zz"},
    {"hashes": 5},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_state_that_is_not_one_is_worth_nothing(wrong: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = Folder(tmp_path)
    room.save(filled(room))
    room.close()
    state = tmp_path / "state.json"
    data = json.loads(state.read_bytes())
    state.write_bytes(wrong if isinstance(wrong, bytes) else json.dumps(data | wrong).encode())
    room = Folder(tmp_path)
    assert room.load() is None
    assert f"{state}: not an image's state, so the weights are fetched anew" in caplog.text
    room.save(filled(room, 8))
    room.close()
    left = Folder(tmp_path).load()
    assert left is not None
    assert left.version == 8


def test_a_folder_is_one_subscribers_at_a_time(tmp_path: Path) -> None:
    """In this process and in another; nothing of the first one's bits changes."""
    store, history = FolderStore(tmp_path / "store"), walk(3)
    publish(store, history)
    folder = tmp_path / "image"
    first, second = (Subscriber(store, RUN, folder=folder) for _ in range(2))
    update = first.fetch(2)
    for _ in range(2):
        with pytest.raises(BadInput, match=r"another subscriber uses this folder\n.*a folder of its own"):
            second.fetch(0)
    program = (
        "import sys; from farflung.weights import FolderStore, Subscriber\n"
        "Subscriber(FolderStore(sys.argv[1]), sys.argv[2], folder=sys.argv[3]).fetch(0)"
    )
    argv = [sys.executable, "-c", program, str(store.root), RUN, str(folder)]
    other = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 1
    assert "another subscriber uses this folder" in other.stderr
    assert equal(update.tensors, history[2])
    first.close()
    assert first.version is None
    assert equal(second.fetch(0).tensors, history[0])
    second.close()
    assert equal(first.fetch(3).tensors, history[3])
    assert first.version == 3


@pytest.mark.parametrize("size", [psutil.virtual_memory().total // 2 + 1, 1 << 47], ids=["some", "much"])
def test_more_than_the_machine_has_is_refused_and_nothing_is_taken(size: int, tmp_path: Path) -> None:
    half = TensorType(ELEMENT_TYPES["U8"], (size,))
    claim = Schema({"a": half, "b": half}, (), {})
    for room in (Room(), Folder(tmp_path)):
        with pytest.raises(StoreError, match=f"the weights take {2 * size} bytes, more than this machine's memory"):
            room.arrays(claim)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write: Not a directory"):
        Folder(tmp_path / "file" / "folder").arrays(FEW)


def follow(store: Path, folder: Path, ready: Connection) -> None:
    """In a process of its own: from version to version for as long as it lives."""
    subscriber = Subscriber(FolderStore(store), RUN, folder=folder)
    subscriber.fetch(0)
    ready.send("it holds version 0")
    while True:
        for number in (3, 1, 4, 2, 0):
            subscriber.fetch(number)


def test_a_process_that_is_killed_at_any_moment_leaves_an_image_that_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.weights.schema.PIECE_BYTES", 16_384)
    history: list[Policy] = [{"w": torch.zeros(512, 512), NORM: torch.ones(100)}]
    for number in range(4):
        history.append(copy(history[-1]))
        history[-1]["w"][number::7, ::3] += 1
    publish(FolderStore(tmp_path / "store"), history, anchor_every=3)
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(6):
        here, there = context.Pipe()
        child = context.Process(target=follow, args=(tmp_path / "store", tmp_path / "image", there), daemon=True)
        child.start()
        try:
            assert here.poll(60), "the subscriber's process is at work"
            time.sleep(draw.random() * 0.1)
        finally:
            child.kill()
            child.join(30)
        subscriber = Subscriber(FolderStore(tmp_path / "store"), RUN, folder=tmp_path / "image")
        for number in (draw.randrange(5), 2):
            assert equal(subscriber.fetch(number).tensors, history[number])
        subscriber.close()


@pytest.mark.parametrize("spoil", ["bits", "no bits", "state", "no state", "other run"])
def test_a_spoiled_folder_is_mended(spoil: str, tmp_path: Path) -> None:
    store, history, folder = MemoryStore(), walk(3, size=1e-3), tmp_path / "image"
    publish(store, history)
    Subscriber(store, RUN, folder=folder).fetch(1)
    (kept,) = folder.glob("bits-*")
    if spoil == "bits":
        kept.write_bytes(flip(flip(kept.read_bytes(), 0), kept.stat().st_size - 1))
    elif spoil == "no bits":
        kept.unlink()
    elif spoil == "no state":
        (folder / "state.json").unlink()
    elif spoil == "other run":
        shutil.rmtree(folder)
        publish(other := MemoryStore(), walk(1, seed=4))
        Subscriber(other, RUN, folder=folder).fetch(1)
    else:
        (folder / "state.json").write_bytes(b'{"version": 1')
    for number in (2, 3):
        assert equal(Subscriber(store, RUN, folder=folder).fetch(number).tensors, history[number])


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_clear_error_and_more_room_mends_it(tmp_path: Path) -> None:
    store = MemoryStore()
    history = [{QUERY: torch.full((300, 500), float(number))} for number in range(4)]
    publish(store, history)
    with small_disk(tmp_path / "disk", "256k") as disk:
        subscriber = Subscriber(store, RUN, folder=disk / "image")
        with pytest.raises(StoreError, match=r"no space for 300032 bytes of weights\n.*free some space"):
            subscriber.fetch(0)
        assert (subscriber.version, subscriber.image) == (None, None)
        subprocess.run(["mount", "-o", "remount,size=400k", str(disk)], check=True)
        assert equal(subscriber.fetch(0).tensors, history[0])
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        with pytest.raises(StoreError, match="cannot write: No space left on device"):
            subscriber.fetch(1)
        (disk / "filler").unlink()
        assert equal(subscriber.fetch(2).tensors, history[2])
        subscriber.close()
        assert equal(Subscriber(store, RUN, folder=disk / "image").fetch(3).tensors, history[3])
