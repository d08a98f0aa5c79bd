"""A store in memory that can crash between any two writes, and ways to spoil what a store holds."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from farflung.core.errors import Corrupt
from farflung.weights import Conflict, FolderStore, Missing, Publisher
from farflung.weights.manifest import (
    MAX_MANIFEST,
    Manifest,
    Part,
    Ref,
    encode_pointer,
    manifest_key,
    object_key,
    pointer_key,
    read_head,
)
from farflung.weights.store import Store, check_key, check_pointer

RUN = "run-1"


class Crash(Exception):
    """The process died here."""


class MemoryStore:
    """A dictionary as a store. ``crash_in`` writes from now it raises Crash, before or after the write took effect."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pointers: dict[str, bytes] = {}
        self.crash_in: int | None = None
        self.crash_after = False
        self.writes = 0

    def put(self, key: str, data: bytes) -> None:
        self._crash(late=False)
        if self.objects.setdefault(check_key(key), bytes(data)) != data:
            raise Conflict("the object exists with other bytes", where=key)
        self._crash(late=True)

    def get(self, key: str, max_bytes: int) -> bytes:
        if check_key(key) not in self.objects:
            raise Missing("there is no such object", where=key)
        if len(self.objects[key]) > max_bytes:
            raise Corrupt(f"larger than {max_bytes} bytes", where=key)
        return self.objects[key]

    def exists(self, key: str) -> bool:
        return check_key(key) in self.objects or key in self.pointers

    def list(self, folder: str) -> list[str]:
        return sorted(key for key in {*self.objects, *self.pointers} if key.startswith(check_key(folder) + "/"))

    def delete(self, key: str) -> None:
        self._crash(late=False)
        self.objects.pop(check_key(key), None)
        self.pointers.pop(key, None)
        self._crash(late=True)

    def read_pointer(self, key: str) -> bytes | None:
        return self.pointers.get(check_key(key))

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
        self._crash(late=False)
        if self.pointers.get(check_pointer(key, value)) != expected:
            raise Conflict("the pointer has moved", where=key)
        self.pointers[key] = value
        self._crash(late=True)

    def write_note(self, key: str, data: bytes) -> None:
        self._crash(late=False)
        self.pointers[check_pointer(key, data)] = data
        self._crash(late=True)

    def ages(self, folder: str) -> dict[str, float]:
        """As if every key had just been written."""
        return dict.fromkeys(self.list(folder), 0.0)

    def _crash(self, *, late: bool) -> None:
        if late != self.crash_after:
            return
        self.writes += 1
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise Crash


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small policy in FP32 with a tied head, as a trainer holds it."""
    draw = torch.Generator().manual_seed(seed)
    named = {
        "embed.weight": torch.randn(40, 16, generator=draw),
        "layer.weight": torch.randn(32, 64, generator=draw) * 0.02,
        "norm.weight": torch.ones(16),
        "scale": torch.tensor(0.5),
    }
    return named | {"head.weight": named["embed.weight"]}


def step(policy: dict[str, torch.Tensor], seed: int, size: float = 1e-3) -> None:
    """Change the policy in place, as an optimiser does."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in policy.items():
        if name != "head.weight":
            tensor += size * torch.randn(tensor.shape, generator=draw) * tensor.abs()


def equal(found: dict[str, torch.Tensor], policy: dict[str, torch.Tensor]) -> bool:
    """Whether ``found`` is the BF16 form of the policy, bit for bit."""
    return set(found) == set(policy) and all(
        torch.equal(found[name].view(torch.int16), policy[name].bfloat16().view(torch.int16)) for name in policy
    )


def published(store: Store, versions: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Publish versions 0..versions and return the weights of each."""
    policy = weights()
    publisher = Publisher(store, RUN, **options)
    publisher.publish_base(policy)
    history = [copy(policy)]
    for version in range(1, versions + 1):
        step(policy, version)
        publisher.publish(version, policy)
        history.append(copy(policy))
    return history


def copy(policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its own memory, tied where the policy is."""
    return deepcopy(policy)


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Put other bytes where an object or a pointer lies, as a bad disk does."""
    if isinstance(store, FolderStore):
        (store.root / key).write_bytes(data)
    else:
        assert isinstance(store, MemoryStore)
        (store.pointers if key in store.pointers else store.objects)[key] = data


def raw(store: Store, key: str) -> bytes:
    found = store.read_pointer(key) if key == pointer_key(RUN) else store.get(key, MAX_MANIFEST)
    assert found is not None
    return found


def flip(data: bytes, at: int, mask: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def head(store: Store) -> tuple[Ref, Manifest]:
    found = read_head(store, RUN)
    assert found is not None
    return found


def forge(store: Store, **changes: Any) -> None:
    """Replace the newest manifest by one with other fields, rightly named, and let the pointer name it."""
    ref, manifest = head(store)
    data = json.loads(manifest.encode()) | changes
    forged = json.dumps(data).encode()
    other = Ref(ref.version, hashlib.sha256(forged).hexdigest())
    overwrite(store, manifest_key(RUN, other), forged)
    overwrite(store, pointer_key(RUN), encode_pointer(other))


def add_object(store: Store, data: bytes) -> list[Any]:
    """Store an object, rightly named; returns it as a manifest names it."""
    part = Part(hashlib.sha256(data).hexdigest(), len(data))
    store.put(object_key(RUN, part), data)
    return [part.sha256, part.bytes]


def bits(values: list[int], shape: tuple[int, ...] | None = None) -> np.ndarray[Any, np.dtype[np.uint16]]:
    array = np.array(values, np.uint16)
    return array if shape is None else array.reshape(shape)
