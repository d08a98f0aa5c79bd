"""A small policy and what each format makes of it, a store that dies between any two writes, and ways to spoil one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from farflung.core.errors import Corrupt
from farflung.core.sampling import WeightFormat
from farflung.formats.checkpoint import to_tensors
from farflung.formats.selection import Selection
from farflung.formats.weights import Quantised, quantise
from farflung.weights import Conflict, FolderStore, Missing, Publisher, Subscriber
from farflung.weights.elements import ELEMENT_TYPES, Bits
from farflung.weights.history import History, Version
from farflung.weights.manifest import (
    MAX_OBJECT,
    Part,
    Ref,
    Seal,
    encode_pointer,
    manifest_key,
    name_part,
    object_key,
    pointer_key,
)
from farflung.weights.schema import Schema, TensorType, cut
from farflung.weights.store import Store, check_key, check_pointer

RUN = "run-1"
KEY = b"the run's key"
EMBED = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Policy = dict[str, Tensor]


class Crash(Exception):
    """The process died here."""


class MemoryStore:
    """A dictionary as a store, with a clock that stands until ``now`` is moved.

    ``crash_in`` writes from now Crash is raised, before or after the write took effect, and by every later write too
    until ``crash_in`` is set again: a dead process writes nothing.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pointers: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        self.now = 0.0
        self.crash_in: int | None = None
        self.crash_after = False
        self.writes: list[str] = []
        self.reads: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        self._crash(late=False)
        if self.objects.setdefault(check_key(key), bytes(data)) != data:
            raise Conflict("the object exists with other bytes", where=key)
        self._wrote(key)

    def get(self, key: str, max_bytes: int) -> bytes:
        self.reads.append(key)
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
        self.written.pop(key, None)
        self._crash(late=True)

    def read_pointer(self, key: str) -> bytes | None:
        return self.pointers.get(check_key(key))

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
        self._crash(late=False)
        if self.pointers.get(check_pointer(key, value)) != expected:
            raise Conflict("the pointer has moved", where=key)
        self.pointers[key] = value
        self._wrote(key)

    def write_note(self, key: str, data: bytes) -> None:
        self._crash(late=False)
        self.pointers[check_pointer(key, data)] = data
        self._wrote(key)

    def ages(self, folder: str) -> dict[str, float]:
        return {key: self.now - self.written[key] for key in self.list(folder)}

    def _wrote(self, key: str) -> None:
        self.writes.append(key)
        self.written[key] = self.now
        self._crash(late=True)

    def _crash(self, *, late: bool) -> None:
        if late != self.crash_after or self.crash_in is None:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.crash_in = 0
            raise Crash


def weights(seed: int = 0) -> Policy:
    """A small policy in FP32 with a tied head, as a trainer holds it. No matrix fills its formats' last blocks."""
    draw = torch.Generator().manual_seed(seed)
    policy = {
        EMBED: torch.randn(40, 16, generator=draw),
        QUERY: torch.randn(24, 40, generator=draw) * 0.02,
        DOWN: torch.randn(20, 130, generator=draw) * 0.02,
        NORM: torch.ones(16),
        "scale": torch.tensor(0.5),
    }
    return policy | {HEAD: policy[EMBED]}


def step(policy: Policy, seed: int, size: float = 3e-3) -> Policy:
    """Change the policy in place, as an optimiser does; 3e-3 changes about every second element in BF16."""
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in policy.items():
        if name != HEAD:
            tensor += size * torch.randn(tensor.shape, generator=draw) * tensor.abs()
    return policy


def copy(policy: Policy) -> Policy:
    """Its own memory, tied where the policy is."""
    return deepcopy(policy)


def walk(versions: int, size: float = 3e-3, seed: int = 0) -> list[Policy]:
    """The policy of versions 0 to ``versions``, each a step from the one before."""
    history = [weights(seed)]
    for version in range(1, versions + 1):
        history.append(step(copy(history[-1]), 1000 * seed + version, size))
    return history


def in_format(
    policy: Policy, format: str, last: Mapping[str, Quantised] | None = None, exclude: Sequence[str] = ()
) -> tuple[Policy, dict[str, Quantised]]:
    """What a subscriber to the format must hold, and the form of every matrix in it. ``last``: those one version before."""
    forms: dict[str, Quantised] = {}
    held: Policy = {}
    for name, tensor in policy.items():
        if Selection(tuple(exclude)).takes(name) and tensor.ndim == 2:
            like = None if last is None else last.get(name)
            if like is not None and (like.rows, like.columns) != tensor.shape:
                like = None
            forms[name] = quantise(tensor.bfloat16(), cast(WeightFormat, format), like=like)
            held |= to_tensors(name, forms[name])
        else:
            held[name] = tensor.bfloat16()
    return held, forms


def streams(history: Iterable[Policy], format: str) -> list[Policy]:
    """What a subscriber to the format must hold at every version."""
    found: list[Policy] = []
    last: dict[str, Quantised] | None = None
    for policy in history:
        held, last = in_format(policy, format, last)
        found.append(held)
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether names, types, shapes and all bits are the same."""
    return set(found) == set(expected) and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and raw_bytes(found[name]) == raw_bytes(tensor)
        for name, tensor in expected.items()
    )


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(found: Mapping[str, Tensor], policy: Policy) -> bool:
    """Whether ``found`` is the BF16 form of the policy, bit for bit."""
    return same(found, {name: tensor.bfloat16() for name, tensor in policy.items()})


def publish(store: Store, history: Sequence[Policy], **options: Any) -> Publisher:
    """Publish every version, and return the publisher."""
    publisher = Publisher(store, RUN, **options)
    for version, policy in enumerate(history):
        publisher.publish(version, policy)
    return publisher


def fetch(store: Store, number: int, format: str = "bf16") -> dict[str, Tensor]:
    return dict(Subscriber(store, RUN, format=format).fetch(number).tensors)


def newest(store: Store, key: bytes | None = None) -> Version:
    version = History(store, RUN, Seal(key)).newest()
    assert version is not None
    return version


def version(store: Store, number: int) -> Version:
    return History(store, RUN, Seal(None)).find(number)


def schema_of(store: Store, format: str = "bf16") -> Schema:
    part = newest(store).stream(format).schema
    return Schema.decode(store.get(object_key(RUN, part), MAX_OBJECT), "schema")


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Put other bytes where an object or a pointer lies, as a bad disk does."""
    if isinstance(store, FolderStore):
        (store.root / key).write_bytes(data)
    else:
        assert isinstance(store, MemoryStore)
        (store.pointers if key in store.pointers else store.objects)[key] = data
        store.written.setdefault(key, store.now)


def raw(store: Store, key: str) -> bytes:
    found = store.read_pointer(key) if key == pointer_key(RUN) else store.get(key, MAX_OBJECT)
    assert found is not None
    return found


def flip(data: bytes, at: int, mask: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def forge(store: Store, format: str = "bf16", key: bytes | None = None, **changes: Any) -> None:
    """Replace the newest manifest by one with other fields in a stream, rightly named, signed and pointed to."""
    found = newest(store)
    data = json.loads(found.manifest.encode())
    data["streams"][format] |= changes
    forge_manifest(store, found.number, Seal(key).sign(json.dumps(data).encode()))


def forge_manifest(store: Store, number: int, body: bytes) -> None:
    other = Ref(number, hashlib.sha256(body).hexdigest())
    overwrite(store, manifest_key(RUN, other), body)
    overwrite(store, pointer_key(RUN), encode_pointer(other))


def add_object(store: Store, data: bytes) -> list[Any]:
    """Store an object, rightly named; returns it as a manifest names it."""
    part = name_part(data)
    store.put(object_key(RUN, part), data)
    return listed(part)


def listed(part: Part) -> list[Any]:
    return [part.sha256, part.nbytes, 0]


def schema(**tensors: tuple[str, tuple[int, ...]]) -> Schema:
    """A schema of tensors given as an element type's name and a shape."""
    types = {name: TensorType(ELEMENT_TYPES[kind], shape) for name, (kind, shape) in tensors.items()}
    return Schema(types, tuple(piece for name, type in types.items() for piece in cut(name, type)), {})


def random_bits(kind: str, items: int, seed: int = 0) -> Bits:
    """Bits of every pattern."""
    dtype = ELEMENT_TYPES[kind].dtype
    draw = np.random.default_rng(seed)
    return draw.integers(0, np.iinfo(dtype).max, items, dtype, endpoint=True).astype(dtype)


def differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """By name, the flat positions of elements that differ, one looked at after the other."""
    found: dict[str, list[int]] = {}
    for name in after:
        pairs = zip(elements(name, before[name]), elements(name, after[name]), strict=True)
        if at := [i for i, (old, new) in enumerate(pairs) if old != new]:
            found[name] = at
    return found


def elements(name: str, tensor: Tensor) -> list[Any]:
    """Each element's bits; a byte of packed codes holds two, low one first."""
    data, width = raw_bytes(tensor), tensor.element_size()
    if tensor.dtype == torch.uint8 and not name.endswith("_scale"):
        return [code for byte in data for code in (byte & 15, byte >> 4)]
    return [data[at : at + width] for at in range(0, len(data), width)]
