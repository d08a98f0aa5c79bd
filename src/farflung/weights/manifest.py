"""What a version is: its tensors with their hashes, the objects that hold them, and the versions before it.

Keys of a run (objects and manifests are named by the SHA-256 of their bytes, so any cache of them is right):

    RUN/latest                       pointer: {"version", "manifest"}, moved last
    RUN/manifests/VVVVVVVV-SHA256    a Manifest as JSON
    RUN/objects/SHA256               a delta object (delta.py)

The pointer names a manifest by hash and a manifest its parents, so the pointer vouches for every version of the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farflung.core.errors import BadInput, Corrupt
from farflung.weights.store import Missing, Store, check_key

FORMAT = 1
MAX_MANIFEST = 256 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_XXH128 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Ref:
    """A version's manifest, by version and SHA-256."""

    version: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """An object, by SHA-256 and length in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its hash in the base version (None in version 0) and in this one, and how many elements changed."""

    shape: tuple[int, ...]
    before: str | None
    after: str
    changed: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Version ``version`` of run ``run``.

    ``parents``: version - 1, then the newest anchor before that unless it is one; empty for version 0. ``delta``: objects that make
    it from version - 1. ``anchor``: objects that hold it whole, empty for most versions.
    """

    run: str
    version: int
    parents: tuple[Ref, ...]
    tensors: Mapping[str, TensorEntry]
    tied: Mapping[str, str]
    delta: tuple[Part, ...]
    anchor: tuple[Part, ...]

    def encode(self) -> bytes:
        """The same manifest gives the same bytes."""
        data = {
            "format": FORMAT,
            "run": self.run,
            "version": self.version,
            "parents": [[ref.version, ref.sha256] for ref in self.parents],
            "tensors": {name: [list(e.shape), e.before, e.after, e.changed] for name, e in self.tensors.items()},
            "tied": dict(self.tied),
            "delta": [[part.sha256, part.bytes] for part in self.delta],
            "anchor": [[part.sha256, part.bytes] for part in self.anchor],
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @staticmethod
    def decode(raw: bytes, where: str) -> Manifest:
        """Strict: every field is there, none else, each of its type and range. Raises Corrupt."""
        try:
            return _parse(_loads(raw))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Corrupt(f"not a manifest: {error}", where=where) from None


def object_key(run: str, part: Part) -> str:
    return f"{run}/objects/{part.sha256}"


def manifest_key(run: str, ref: Ref) -> str:
    return f"{run}/manifests/{ref.version:08d}-{ref.sha256}"


def pointer_key(run: str) -> str:
    return f"{run}/latest"


def check_run(run: str) -> str:
    """Returns the run's id. Raises BadInput for one that is not a single key segment."""
    if "/" in run:
        raise BadInput(f"{run!r} is not a run's id", mend="a run's id has no '/'")
    return check_key(run)


def encode_pointer(ref: Ref) -> bytes:
    return json.dumps({"version": ref.version, "manifest": ref.sha256}, separators=(",", ":")).encode()


def decode_pointer(raw: bytes, where: str) -> Ref:
    """Raises Corrupt: a pointer that cannot be read is an error, never "nothing published yet"."""
    try:
        data = _loads(raw)
        _need(set(data) == {"version", "manifest"}, "its fields are not version and manifest")
        return _ref([data["version"], data["manifest"]])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"not a pointer: {error}", where=where) from None


def read_manifest(store: Store, run: str, ref: Ref) -> Manifest:
    """Fetch and verify a manifest. Raises Missing when it was pruned, Corrupt when it is not what ``ref`` names."""
    key = manifest_key(run, ref)
    raw = store.get(key, MAX_MANIFEST)
    if hashlib.sha256(raw).hexdigest() != ref.sha256:
        raise Corrupt("the manifest's bytes do not have the hash in its name", where=f"manifest {key}")
    manifest = Manifest.decode(raw, f"manifest {key}")
    if (manifest.run, manifest.version) != (run, ref.version):
        raise Corrupt(f"it describes version {manifest.version} of run {manifest.run!r}", where=f"manifest {key}")
    return manifest


def read_head(store: Store, run: str, known: tuple[Ref, Manifest] | None = None) -> tuple[Ref, Manifest] | None:
    """The newest version, None before the first; ``known`` is not read again while the pointer names it.

    Raises Corrupt for a pointer that names no readable manifest.
    """
    raw = store.read_pointer(pointer_key(run))
    if raw is None:
        return None
    ref = decode_pointer(raw, f"pointer {pointer_key(run)}")
    if known is not None and known[0] == ref:
        return known
    try:
        return ref, read_manifest(store, run, ref)
    except Missing:
        where = f"pointer {pointer_key(run)}"
        raise Corrupt(f"it names version {ref.version}, whose manifest is not there", where=where) from None


def read_object(store: Store, run: str, part: Part) -> bytes:
    """Fetch and verify an object. Raises Corrupt naming it when its bytes are not those it is named by."""
    key = object_key(run, part)
    raw = store.get(key, part.bytes)
    if len(raw) != part.bytes:
        raise Corrupt(f"it has {len(raw)} of its {part.bytes} bytes", where=f"object {key}")
    if hashlib.sha256(raw).hexdigest() != part.sha256:
        raise Corrupt("its bytes do not have the hash in its name", where=f"object {key}")
    return raw


def _parse(data: dict[str, Any]) -> Manifest:
    _need(data.get("format") == FORMAT, f"format {data.get('format')!r}, not {FORMAT}")
    fields = {"format", "run", "version", "parents", "tensors", "tied", "delta", "anchor"}
    _need(set(data) == fields, f"its fields are {sorted(data)}")
    version = _count(data["version"])
    for field in ("tensors", "tied"):
        _need(isinstance(data[field], dict), f"{field} is not an object")
    tensors = {name: _tensor(name, item, version) for name, item in data["tensors"].items()}
    tied = dict(data["tied"])
    for name, owner in tied.items():
        _need(isinstance(owner, str) and owner in tensors and name not in tensors, f"{name!r} is tied to {owner!r}")
    parents = tuple(_ref(item) for item in data["parents"])
    order = [ref.version for ref in parents]
    _need(order[:1] == ([version - 1] if version else []), f"version {version} has parents {order}")
    _need(order == sorted(set(order), reverse=True), f"version {version} has parents {order}")
    delta, anchor = (tuple(_part(item) for item in data[field]) for field in ("delta", "anchor"))
    _need(bool(version) or (bool(anchor) and not delta), "version 0 is not a full copy")
    run = data["run"]
    _need(isinstance(run, str), f"run {run!r}")
    return Manifest(run, version, parents, tensors, tied, delta, anchor)


def _tensor(name: str, item: Any, version: int) -> TensorEntry:
    shape, before, after, changed = item
    entry = TensorEntry(tuple(_count(n) for n in shape), before, after, _count(changed))
    _need(len(entry.shape) <= 32 and entry.size < 1 << 48, f"tensor {name!r} has shape {shape}")
    _need(_XXH128.fullmatch(after) is not None, f"tensor {name!r} has hash {after!r}")
    known = before is None if version == 0 else isinstance(before, str) and bool(_XXH128.fullmatch(before))
    _need(known, f"tensor {name!r} of version {version} has base hash {before!r}")
    _need(entry.changed <= entry.size, f"tensor {name!r} has {changed} changes in {entry.size} elements")
    return entry


def _ref(item: Any) -> Ref:
    version, sha256 = item
    _need(_SHA256.fullmatch(sha256) is not None, f"{sha256!r} is not a SHA-256")
    return Ref(_count(version), sha256)


def _part(item: Any) -> Part:
    sha256, size = item
    _need(_SHA256.fullmatch(sha256) is not None, f"{sha256!r} is not a SHA-256")
    return Part(sha256, _count(size))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{str(value)[:100]!r} is not a count")
    return value


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _loads(raw: bytes) -> dict[str, Any]:
    """A JSON object without repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        _need(len(keys) == len(pairs), "a key comes twice")
        return keys

    data = json.loads(raw, object_pairs_hook=unique)
    _need(isinstance(data, dict), "it is not an object")
    return data  # type: ignore[no-any-return]
