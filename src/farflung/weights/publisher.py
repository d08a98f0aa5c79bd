"""The trainer's side: one writer per run, versions without gaps, bytes durable before the pointer names them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farflung.core.errors import BadInput
from farflung.formats.selection import Selection
from farflung.weights import delta
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import digest
from farflung.weights.history import History, Version
from farflung.weights.manifest import (
    Manifest,
    Part,
    Ref,
    Seal,
    Stream,
    encode_pointer,
    manifest_key,
    name_part,
    object_key,
    pointer_key,
    strides,
)
from farflung.weights.schema import Schema, groups
from farflung.weights.store import Conflict, Missing, Store
from farflung.weights.streams import (
    NATIVE,
    Section,
    Shard,
    Snapshot,
    check_formats,
    schema_of,
    sections,
    split,
    stream_sections,
)
from farflung.weights.subscriber import THREADS, Subscriber

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """A version in one format: elements changed out of ``elements``, bytes of the delta and of the anchor (0: none).

    ``bound``: the fewest bytes that the changes need, were their positions without structure (``planes.entropy_bytes``).
    """

    changed: int
    elements: int
    bytes: int
    anchor_bytes: int
    bound: float


@dataclass(frozen=True, slots=True)
class Published:
    """A published version by format. Seconds: to bring the weights into their formats, to compare and encode, to store.

    ``repeated``: the store had this very version already.
    """

    version: int
    streams: Mapping[str, PublishedStream]
    cast_seconds: float = 0.0
    encode_seconds: float = 0.0
    store_seconds: float = 0.0
    seconds: float = 0.0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class _Base:
    """The last version: its sections, and per section the hashes of its pieces."""

    version: Version
    tied: Mapping[str, str]
    sections: Mapping[str, Section]
    hashes: Mapping[str, list[bytes]]


@dataclass
class _Work:
    """What a section came to: hashes of all its pieces, objects, and what changed."""

    hashes: list[bytes]
    parts: list[Part] = field(default_factory=list)
    anchor: list[Part] = field(default_factory=list)
    changed: int = 0
    bound: float = 0.0


class Publisher:
    """Publishes one run's weights (Hugging Face names, floating point) as BF16 and in further formats. Not for several threads.

    Make the trainer's own state durable before it publishes: then a trainer that is killed at any moment has either
    published the version it resumes with, or can publish it again, bit for bit. Whole copies are stored with version 0
    and every ``anchor_every`` versions. ``formats``: see ``streams.FORMATS``; ``exclude``: glob patterns of matrices that
    are not quantised; ``key`` signs every manifest.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        formats: Sequence[str] = ("bf16",),
        exclude: Sequence[str] = (),
        anchor_every: int = 50,
        key: bytes | None = None,
        threads: int = THREADS,
    ) -> None:
        if anchor_every < 1:
            raise BadInput(f"anchor_every is {anchor_every}; at least 1 is needed")
        self.formats = check_formats(formats)
        self._store = store
        self._key = key
        self._seal = Seal(key)
        self._history = History(store, run_id, self._seal)
        self._run = self._history.run
        self._selection = Selection(tuple(exclude))
        self._anchor_every = anchor_every
        self._threads = threads
        self._base: _Base | None = None
        self._stored = 0.0

    def resume(self) -> int | None:
        """Go on from the store's newest version, whatever the trainer remembers, and return it; None if there is none."""
        newest = self._history.newest()
        if newest is None:
            return None
        found: dict[str, Section] = {}
        hashes: dict[str, list[bytes]] = {}
        tied: Mapping[str, str] = {}
        for format in self.formats:
            if format not in newest.manifest.streams:
                continue  # it is new, and will be published whole
            subscriber = Subscriber(self._store, self._run, format=format, key=self._key, threads=self._threads)
            subscriber.fetch(newest.number)
            assert subscriber.image is not None
            schema, tied = subscriber.image.schema, subscriber.image.schema.tied
            known = dict(zip(schema.pieces, subscriber.image.hashes, strict=True))
            for name, section in split(subscriber.image, format, self._selection).items():
                found.setdefault(name, section)
                hashes.setdefault(name, [known[piece] for piece in section.pieces])
        self._base = _Base(newest, tied, found, hashes)
        return newest.number

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows to be published."""
        return None if self._base is None else self._base.version.number

    def snapshot(self, weights: Mapping[str, Tensor | Shard]) -> Snapshot:
        """A copy of the weights to publish later, while training goes on."""
        native = NATIVE in self.formats
        return Snapshot.of(weights, native=native, selection=None if native else self._selection)

    def publish(self, version: int, weights: Mapping[str, Tensor | Shard] | Snapshot) -> Published:
        """Publish the version after the last one; the last one again is fine if it has the same bytes.

        Raises BadInput for a version that skips or goes back, and Conflict when another publisher was there first. After
        any error the same call may be made again. Tensors that appeared, vanished or changed shape make the version whole.
        """
        began = time.monotonic()
        if self._base is None:
            self._meet(version)
        newest = -1 if self._base is None else self._base.version.number
        if version not in (newest, newest + 1):
            what = f"version {version} cannot follow {'nothing' if newest < 0 else f'version {newest}'}"
            mend = "resume takes a run up where its store stands" if newest < 0 else ""
            raise BadInput(what, where=f"run {self._run}", mend=mend or f"publish version {newest + 1}")
        snapshot = weights if isinstance(weights, Snapshot) else self.snapshot(weights)
        before = {} if self._base is None else self._base.sections
        made = sections(snapshot, self.formats, self._selection, before)
        cast = time.monotonic()
        if version == newest:
            return self._repeat(made, snapshot.tied, began, cast)
        return self._commit(version, made, snapshot.tied, began, cast)

    def _meet(self, version: int) -> None:
        """A publisher that has seen nothing may begin a run, or publish its version 0 again."""
        newest = self._history.newest()
        if newest is None:
            return
        if newest.number or version:
            mend = "Publisher.resume takes a run up where its store stands"
            raise Conflict(f"the run is at version {newest.number} already", where=f"run {self._run}", mend=mend)
        self.resume()

    def _commit(
        self, version: int, made: Mapping[str, Section], tied: Mapping[str, str], began: float, cast: float
    ) -> Published:
        """Objects, then the manifest, then the pointer by compare-and-swap; only then is it the baseline."""
        base, self._stored = self._base, 0.0
        streams: dict[str, Stream] = {}
        done: dict[tuple[str, bool, bool], _Work] = {}
        bounds: dict[str, float] = {}
        for format in self.formats:
            names = stream_sections(format)
            schema = schema_of([made[name] for name in names], tied)
            same = self._follows(format, schema)
            whole = not same or version % self._anchor_every == 0
            at, work = 0, []
            for name in names:
                # Sections begin with the shared one, so its pieces have the same numbers and its objects serve all formats.
                if (known := done.get((name, same, whole))) is None:
                    known = done[name, same, whole] = self._encode(made[name], name, schema, at, same, whole)
                work.append(known)
                at += len(made[name].pieces)
            root = schema.root([hash for one in work for hash in one.hashes])
            streams[format] = Stream(
                schema=self._put(schema.encode()),
                before=base.version.stream(format).root if same and base is not None else None,
                root=root,
                changed=sum(one.changed for one in work) if same else 0,
                elements=sum(piece.size for piece in schema.pieces),
                delta=tuple(part for one in work for part in one.parts) if same else (),
                anchor=tuple(part for one in work for part in one.anchor) if whole else (),
            )
            bounds[format] = sum(one.bound for one in work)
        manifest = Manifest(self._run, version, self._ancestors(version), self._anchored(), streams)
        raw = self._seal.sign(manifest.encode())
        ref = Ref(version, hashlib.sha256(raw).hexdigest())
        encoded = time.monotonic()
        self._store.put(manifest_key(self._run, ref), raw)
        repeated = self._swap(ref)
        self._stored += time.monotonic() - encoded
        self._history.know(Version(ref, manifest))
        self._base = _Base(Version(ref, manifest), tied, made, {name: work.hashes for (name, *_), work in done.items()})
        return self._published(bounds, began, cast, repeated=repeated)

    def _follows(self, format: str, schema: Schema) -> bool:
        """Whether the last version has the format under the same schema, so that there can be a delta."""
        base = self._base
        if base is None or format not in base.version.manifest.streams:
            return False
        return base.version.manifest.streams[format].schema == name_part(schema.encode())

    def _encode(self, section: Section, name: str, schema: Schema, at: int, follows: bool, whole: bool) -> _Work:
        """A section's objects; its pieces are those of the schema from number ``at`` on."""
        base, numbers = self._base, range(at, at + len(section.pieces))
        before, hashes = None, [b""] * len(numbers)
        if follows and base is not None:
            before, hashes = base.sections[name], list(base.hashes[name])
        work = _Work(hashes)
        with ThreadPoolExecutor(self._threads) as pool:
            jobs = [(group, schema, section, before) for group in groups(schema, numbers)]
            if before is not None:
                for changes, part, changed, bound in pool.map(lambda job: self._delta(*job), jobs):
                    for change in changes:
                        work.hashes[change.piece - at] = change.after
                    if part is not None:
                        work.parts.append(part)
                    work.changed += changed
                    work.bound += bound
            else:
                pieces = (schema.pieces[number] for number in numbers)
                work.hashes = list(pool.map(lambda piece: digest(section.bits(piece)), pieces))
            if whole:
                known = {number: work.hashes[number - at] for number in numbers}
                work.anchor = list(pool.map(lambda job: self._whole(job[0], schema, section, known), jobs))
        return work

    def _delta(
        self, group: Sequence[int], schema: Schema, section: Section, before: Section
    ) -> tuple[list[Change], Part | None, int, float]:
        """Compare some pieces with the last version's and store what changed as one object."""
        changes: list[Change] = []
        for number in group:
            piece = schema.pieces[number]
            change = delta.compare(number, piece, before.bits(piece), section.bits(piece))
            if change is not None:
                changes.append(change)
        if not changes:
            return [], None, 0, 0.0
        encoded = delta.encode(changes, schema)
        return changes, self._put(encoded.raw), encoded.changed, encoded.bound

    def _whole(self, group: Sequence[int], schema: Schema, section: Section, hashes: Mapping[int, bytes]) -> Part:
        changes = [Change(n, hashes[n], Whole(section.bits(schema.pieces[n]))) for n in group]
        return self._put(delta.encode(changes, schema).raw)

    def _put(self, raw: bytes) -> Part:
        began = time.monotonic()
        part = name_part(raw)
        self._store.put(object_key(self._run, part), raw)
        self._stored += time.monotonic() - began
        return part

    def _ancestors(self, version: int) -> tuple[Ref, ...]:
        """By strides, without those whose name was pruned away."""
        base = self._base
        if base is None:
            return ()
        found = [base.version.ref]
        for number in strides(version)[1:]:
            try:
                found.append(self._history.ref(number, base.version))
            except Missing:
                break
        return tuple(found)

    def _anchored(self) -> Ref | None:
        base = self._base
        if base is None:
            return None
        return base.version.ref if base.version.manifest.whole else base.version.manifest.anchored

    def _swap(self, ref: Ref) -> bool:
        """Move the pointer. True if it was there already: an earlier try of ours moved it and did not hear of it."""
        key, base = pointer_key(self._run), self._base
        try:
            expected = None if base is None else encode_pointer(base.version.ref)
            self._store.swap_pointer(key, expected, encode_pointer(ref))
        except Conflict:
            if self._store.read_pointer(key) == encode_pointer(ref):
                return True
            newest = self._history.newest()
            state = "nothing" if newest is None else f"version {newest.number}"
            raise Conflict(
                f"version {ref.version} was not published: another publisher moved the run to {state}",
                where=f"run {self._run}",
                mend="stop one of the two; Publisher.resume takes the run up where its store stands",
            ) from None
        return False

    def _repeat(self, made: Mapping[str, Section], tied: Mapping[str, str], began: float, cast: float) -> Published:
        """The version is in the store: nothing is to be done if these are the same weights. Raises Conflict if not."""
        assert self._base is not None
        version = self._base.version
        for format in self.formats:
            parts = [made[name] for name in stream_sections(format)]
            schema = schema_of(parts, tied)
            odd = "its tensors"
            if self._follows(format, schema):
                hashes = [digest(part.bits(piece)) for part in parts for piece in part.pieces]
                if schema.root(hashes) == version.manifest.streams[format].root:
                    continue
                known = [hash for name in stream_sections(format) for hash in self._base.hashes[name]]
                odd = next(p.tensor for p, a, b in zip(schema.pieces, hashes, known, strict=True) if a != b)
            raise Conflict(
                f"version {version.number} was published with other weights ({format}, {odd})",
                where=f"run {self._run}",
                mend="a version never changes: was it another publisher, or a trainer resumed from an older state?",
            )
        return self._published({}, began, cast, repeated=True)

    def _published(self, bounds: Mapping[str, float], began: float, cast: float, *, repeated: bool) -> Published:
        assert self._base is not None
        version = self._base.version
        streams = {
            name: PublishedStream(
                stream.changed,
                stream.elements,
                sum(part.nbytes for part in stream.delta),
                sum(part.nbytes for part in stream.anchor),
                bounds.get(name, 0.0),
            )
            for name, stream in version.manifest.streams.items()
        }
        now = time.monotonic()
        return Published(
            version.number, streams, cast - began, now - cast - self._stored, self._stored, now - began, repeated
        )
