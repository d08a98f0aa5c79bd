"""What a version is: for each format its schema, its root hash and the objects that hold it; and how it is vouched for.

Keys of a run (objects and manifests are named by the SHA-256 of their bytes, so any cache of them is right):

    RUN/latest                       pointer: {"version", "manifest"}, moved last
    RUN/manifests/VVVVVVVV-SHA256    a Manifest, signed
    RUN/objects/SHA256               a schema, or a delta object (delta.py)
    RUN/jumps/FORMAT/VVVVVVVV-SPAN   a Jump to version V from V - SPAN, signed; written once, later, by a compactor
    RUN/leases/NAME                  what a live subscriber holds (retention.py)

The pointer names a manifest by hash and a manifest its ancestors, so the pointer vouches for every version of the run.
Manifests and jumps are JSON, a line break, and the HMAC-SHA256 of what precedes it under the run's key, or nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from farflung.core.errors import BadInput, Corrupt
from farflung.weights.store import Missing, Store, check_name
from farflung.weights.strict import count, items, loads, need, sha256, strict_object

FORMAT = 2
MAX_MANIFEST = 64 << 20
MAX_OBJECT = 256 << 20
"""What a schema or a delta object may take: four times the bits that one object stands for (``schema.PIECE_BYTES``)."""


_MANIFEST = re.compile(r"manifests/([0-9]{8,15})-([0-9a-f]{64})")
_JUMP = re.compile(r"jumps/([^/]+)/([0-9]{8,15})-([0-9]{1,15})")


class Gone(Corrupt):
    """An object that a manifest names is not there: it was lost, or pruned after the manifest was read."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A version's manifest, by version and SHA-256."""

    version: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """An object, by SHA-256 and length in bytes. ``first``: the lowest number of its pieces; objects come in rising order."""

    sha256: str
    nbytes: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """A version in one format. ``root`` is its hash (``Schema.root``), ``before`` that of the version before (None: none).

    ``delta``: objects that make it from there, which changed ``changed`` of its ``elements``. ``anchor``: objects that
    hold it whole, empty for most versions. ``small``: the same as ``delta`` in fewer bytes, which take longer to apply;
    empty where nobody asked for it.
    """

    schema: Part
    before: str | None
    root: str
    changed: int
    elements: int
    delta: tuple[Part, ...]
    anchor: tuple[Part, ...]
    small: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Version ``version`` of run ``run``, by format.

    ``ancestors``: version - 2^j for every j with 2^j dividing version, nearest first, so that any earlier version is a
    few strides away (the far ones are left out when they were pruned); ``anchored``: the newest version before this one with an anchor. Version 0 has neither.
    """

    run: str
    version: int
    ancestors: tuple[Ref, ...]
    anchored: Ref | None
    streams: Mapping[str, Stream]

    @property
    def whole(self) -> bool:
        """Whether it has anchors."""
        return any(stream.anchor for stream in self.streams.values())

    def encode(self) -> bytes:
        """The same manifest gives the same bytes."""
        data = {
            "format": FORMAT,
            "run": self.run,
            "version": self.version,
            "ancestors": [[ref.version, ref.sha256] for ref in self.ancestors],
            "anchored": None if self.anchored is None else [self.anchored.version, self.anchored.sha256],
            "streams": {name: _stream_data(stream) for name, stream in self.streams.items()},
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @staticmethod
    def decode(raw: bytes, where: str) -> Manifest:
        """Strict. Raises Corrupt."""
        try:
            data = loads(raw)
            strict_object(data, {"format", "run", "version", "ancestors", "anchored", "streams"}, FORMAT)
            version = count(data["version"])
            ancestors = tuple(_ref(item) for item in data["ancestors"])
            order = [ref.version for ref in ancestors]
            expected = strides(version)
            need(order == expected[: len(order)] and bool(order) == bool(expected), f"version {version} has {order}")
            anchored = None if data["anchored"] is None else _ref(data["anchored"])
            need((anchored is None) == (version == 0), f"version {version} has {anchored} as its anchored version")
            need(anchored is None or anchored.version < version, f"version {version} has {anchored} before it")
            streams = {check_name(name, "stream"): _stream(item, version) for name, item in items(data["streams"])}
            need(bool(streams), "it has no stream")
            need(isinstance(data["run"], str), f"run {data['run']!r}")
            return Manifest(data["run"], version, ancestors, anchored, streams)
        except (ValueError, KeyError, TypeError, RecursionError, BadInput) as error:
            raise Corrupt(f"not a manifest: {error}", where=where) from None


@dataclass(frozen=True, slots=True)
class Jump:
    """Version ``version`` in one format from version ``version - span``, over which its root went from ``before`` to ``root``."""

    run: str
    format: str
    version: int
    span: int
    before: str
    root: str
    changed: int
    delta: tuple[Part, ...]

    def encode(self) -> bytes:
        data = {
            "format": FORMAT,
            "run": self.run,
            "stream": self.format,
            "version": self.version,
            "span": self.span,
            "before": self.before,
            "root": self.root,
            "changed": self.changed,
            "delta": _parts_data(self.delta),
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @staticmethod
    def decode(raw: bytes, where: str) -> Jump:
        """Strict. Raises Corrupt."""
        try:
            data = loads(raw)
            fields = {"format", "run", "stream", "version", "span", "before", "root", "changed", "delta"}
            strict_object(data, fields, FORMAT)
            need(isinstance(data["run"], str) and isinstance(data["stream"], str), "run or stream is no text")
            return Jump(
                data["run"],
                data["stream"],
                count(data["version"]),
                count(data["span"]),
                sha256(data["before"]),
                sha256(data["root"]),
                count(data["changed"]),
                _parts(data["delta"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Corrupt(f"not a jump: {error}", where=where) from None


def derive_key(token: str) -> bytes:
    """The key that a run's token gives, so that trainer and samplers share it without a secret of its own."""
    return hmac.new(token.encode(), b"farflung weights", hashlib.sha256).digest()


def is_signed(raw: bytes) -> bool:
    """Whether a manifest or a jump, as it is stored, carries a signature; whose it is stays open."""
    return b"\n" in raw


class Seal:
    """Signs and checks with the run's key; without a key nothing is signed, and signatures are not looked at."""

    def __init__(self, key: bytes | None) -> None:
        if key is not None and not key:
            raise BadInput("the run's key is empty", mend="give a secret, or no key at all")
        if key is not None and not (isinstance(key, bytes) and key):
            raise BadInput(f"the key is a {type(key).__name__}", where="key", mend="give bytes: derive_key(token)")
        self._key = key

    def sign(self, body: bytes) -> bytes:
        return body if self._key is None else body + b"\n" + self._mac(body)

    def open(self, raw: bytes, where: str) -> bytes:
        """The body. Raises Corrupt when there is a key and the signature is missing or another's."""
        body, _, mac = raw.partition(b"\n")
        if self._key is not None and not hmac.compare_digest(mac, self._mac(body)):
            what = "it is not signed" if not mac else "it was signed with another key, or changed since"
            raise Corrupt(what, where=where, mend="publisher and subscribers need the same key")
        return body

    def _mac(self, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.new(self._key, b"farflung weights\n" + body, hashlib.sha256).hexdigest().encode()


def strides(version: int) -> list[int]:
    """version - 2^j for every j with 2^j dividing version, nearest first."""
    return [version - (1 << j) for j in range(version.bit_length()) if version % (1 << j) == 0 and version]


def object_key(run: str, part: Part) -> str:
    return f"{run}/objects/{part.sha256}"


def manifest_key(run: str, ref: Ref) -> str:
    return f"{run}/manifests/{ref.version:08d}-{ref.sha256}"


def jump_key(run: str, format: str, version: int, span: int) -> str:
    return f"{run}/jumps/{format}/{version:08d}-{span}"


def manifest_ref(run: str, key: str) -> Ref | None:
    """What a key is the manifest of; None for a key of something else."""
    found = _MANIFEST.fullmatch(key.removeprefix(f"{run}/"))
    return None if found is None else Ref(int(found[1]), found[2])


def jump_of(run: str, key: str) -> tuple[str, int, int] | None:
    """Format, version and span of a jump's key; None for a key of something else."""
    found = _JUMP.fullmatch(key.removeprefix(f"{run}/"))
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def pointer_key(run: str) -> str:
    return f"{run}/latest"


def encode_pointer(ref: Ref) -> bytes:
    return json.dumps({"version": ref.version, "manifest": ref.sha256}, separators=(",", ":")).encode()


def decode_pointer(raw: bytes, where: str) -> Ref:
    """Raises Corrupt: a pointer that cannot be read is an error, never "nothing published yet"."""
    try:
        data = loads(raw)
        need(set(data) == {"version", "manifest"}, "its fields are not version and manifest")
        ref = _ref([data["version"], data["manifest"]])
        need(encode_pointer(ref) == raw, "it is spelt otherwise than pointers are")  # it is swapped by its bytes
        return ref
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"not a pointer: {error}", where=where) from None


def name_part(raw: bytes) -> Part:
    return Part(hashlib.sha256(raw).hexdigest(), len(raw))


def read_part(store: Store, run: str, part: Part) -> bytes:
    """Fetch and verify an object. Raises Gone, and Corrupt naming it when its bytes are not those it is named by."""
    key = object_key(run, part)
    try:
        raw = store.get(key, part.nbytes)
    except Missing:
        raise Gone("a version needs it and it is not there", where=f"object {key}") from None
    if len(raw) != part.nbytes:
        raise Corrupt(f"it has {len(raw)} of its {part.nbytes} bytes", where=f"object {key}")
    if hashlib.sha256(raw).hexdigest() != part.sha256:
        raise Corrupt("its bytes do not have the hash in its name", where=f"object {key}")
    return raw


def read_manifest(store: Store, run: str, ref: Ref, seal: Seal) -> Manifest:
    """Fetch and verify a manifest. Raises Missing when it was pruned, Corrupt when it is not what ``ref`` names."""
    where = f"manifest {manifest_key(run, ref)}"
    raw = store.get(manifest_key(run, ref), MAX_MANIFEST)
    if hashlib.sha256(raw).hexdigest() != ref.sha256:
        raise Corrupt("the manifest's bytes do not have the hash in its name", where=where)
    manifest = Manifest.decode(seal.open(raw, where), where)
    if (manifest.run, manifest.version) != (run, ref.version):
        raise Corrupt(f"it describes version {manifest.version} of run {manifest.run!r}", where=where)
    return manifest


def read_jump(store: Store, run: str, format: str, version: int, span: int, seal: Seal) -> Jump | None:
    """A jump, None when nobody has made it. Raises Corrupt."""
    key = jump_key(run, format, version, span)
    try:
        raw = store.get(key, MAX_MANIFEST)
    except Missing:
        return None
    jump = Jump.decode(seal.open(raw, f"jump {key}"), f"jump {key}")
    if (jump.run, jump.format, jump.version, jump.span) != (run, format, version, span):
        raise Corrupt(f"it describes {jump.format} {jump.version}-{jump.span} of run {jump.run!r}", where=f"jump {key}")
    return jump


def _stream_data(stream: Stream) -> dict[str, Any]:
    return {
        "schema": [stream.schema.sha256, stream.schema.nbytes],
        "before": stream.before,
        "root": stream.root,
        "changed": stream.changed,
        "elements": stream.elements,
        "delta": _parts_data(stream.delta),
        "anchor": _parts_data(stream.anchor),
        "small": _parts_data(stream.small),
    }


def _stream(item: Any, version: int) -> Stream:
    need(isinstance(item, dict), "a stream is not an object")
    fields = {"schema", "before", "root", "changed", "elements", "delta", "anchor", "small"}
    need(set(item) == fields, f"a stream's fields are {sorted(item)}")
    before = None if item["before"] is None else sha256(item["before"])
    delta, anchor = _parts(item["delta"]), _parts(item["anchor"])
    need(before is not None or (bool(anchor) and not delta), "a stream without a version before it is not whole")
    need(bool(version) or before is None, "version 0 has a version before it")
    need(count(item["changed"]) <= count(item["elements"]), f"{item['changed']} of {item['elements']} changed")
    schema, small = _part(item["schema"]), _parts(item["small"])
    return Stream(schema, before, sha256(item["root"]), item["changed"], item["elements"], delta, anchor, small)


def _parts_data(parts: tuple[Part, ...]) -> list[list[Any]]:
    return [[part.sha256, part.nbytes, part.first] for part in parts]


def _parts(value: Any) -> tuple[Part, ...]:
    need(isinstance(value, list), "objects are not a list")
    parts: list[Part] = []
    for name, size, first in value:
        parts.append(replace(_part([name, size]), first=count(first)))
    need(parts == sorted(parts, key=lambda part: part.first), "objects are not in the order of their pieces")
    return tuple(parts)


def _part(item: Any) -> Part:
    name, size = item
    need(count(size) <= MAX_OBJECT, f"an object of {size} bytes; at most {MAX_OBJECT}")
    return Part(sha256(name), size)


def _ref(item: Any) -> Ref:
    version, name = item
    return Ref(count(version), sha256(name))
