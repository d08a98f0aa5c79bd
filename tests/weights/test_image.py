"""Images: bits in memory or in a folder, and what the next process finds of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from farflung.core.errors import Corrupt
from farflung.weights import StoreError
from farflung.weights.elements import ELEMENT_TYPES, digest
from farflung.weights.image import Folder, Image, Room
from farflung.weights.schema import Schema, TensorType
from tests.weights.parts import schema

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
    left = Folder(tmp_path).load()
    assert left is not None
    assert (left.version, left.schema) == (8, other)


def test_bits_that_are_gone_or_short_are_torn_and_no_error(tmp_path: Path) -> None:
    room = Folder(tmp_path)
    image = filled(room)
    room.save(image)
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
def test_a_state_that_is_not_one_is_corrupt(wrong: Any, tmp_path: Path) -> None:
    room = Folder(tmp_path)
    room.save(filled(room))
    state = tmp_path / "state.json"
    data = json.loads(state.read_bytes())
    state.write_bytes(wrong if isinstance(wrong, bytes) else json.dumps(data | wrong).encode())
    with pytest.raises(Corrupt, match=r"state\.json: not an image's state: .*(\n.*)*remove the folder"):
        Folder(tmp_path).load()


def test_more_memory_than_the_machine_has_is_refused() -> None:
    half = psutil.virtual_memory().total // 2 + 1
    claim = schema(a=("U8", (half,)), b=("U8", (half,)))
    with pytest.raises(StoreError, match=f"the weights take {2 * half} bytes, more than this machine's memory"):
        Room().arrays(claim)


def test_more_disk_than_there_is_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    for size in (free + (1 << 30), 1 << 47):
        claim = Schema({"a": TensorType(ELEMENT_TYPES["U8"], (size,))}, (), {})
        with pytest.raises(StoreError, match=f"no space for {size} bytes of weights"):
            Folder(tmp_path).arrays(claim)
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) == 0, "and nothing of it is taken"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write: Not a directory"):
        Folder(tmp_path / "file" / "folder").arrays(FEW)
