"""The trainer's side: one writer per run, versions without gaps, bytes durable before the pointer names them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farflung.core.errors import BadInput
from farflung.formats.selection import Selection
from farflung.weights.elements import digest
from farflung.weights.encoding import Encoder, Job, Work
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
from farflung.weights.ranks import ALONE, Ranks, together
from farflung.weights.schema import Schema
from farflung.weights.store import Conflict, Missing, Store
from farflung.weights.streams import (
    NATIVE,
    Section,
    Shard,
    Snapshot,
    check_formats,
    layout,
    merge_layouts,
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
    """A version in one format: elements changed out of ``elements``, bytes of the delta, of the anchor (0: none) and of the
    delta in fewer bytes (0: none).

    ``bound``: the fewest bytes that the changes need, were their positions without structure (``planes.entropy_bytes``).
    """

    changed: int
    elements: int
    bytes: int
    anchor_bytes: int
    bound: float
    small_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """A published version by format. Seconds: to bring the weights into their formats; to compare, encode and store; in the
    store's calls, summed over threads.

    ``repeated``: the store had this very version already.
    """

    version: int
    streams: Mapping[str, PublishedStream]
    cast_seconds: float = 0.0
    encode_seconds: float = 0.0
    store_seconds: float = 0.0
    seconds: float = 0.0
    repeated: bool = False

    @staticmethod
    def of(data: Mapping[str, Any]) -> Published:
        """The way back from ``dataclasses.asdict``. Raises TypeError, KeyError, ValueError, AttributeError."""
        streams = {str(name): PublishedStream(**stream) for name, stream in data["streams"].items()}
        numbers = [value for stream in streams.values() for value in (stream.changed, stream.elements, stream.bytes)]
        if not streams or not all(type(number) is int for number in numbers):
            raise ValueError(f"streams are {str(data['streams'])[:200]}")
        return Published(**{**data, "streams": streams})


@dataclass(frozen=True, slots=True)
class _Base:
    """The last version: its sections, and per section the hashes of its pieces."""

    version: Version
    tied: Mapping[str, str]
    sections: Mapping[str, Section]
    hashes: Mapping[str, list[bytes]]


class Publisher:
    """Publishes one run's weights (Hugging Face names, floating point) as BF16 and in further formats. Not for several threads.

    Make the trainer's own state durable before it publishes: then a trainer that is killed at any moment has either
    published the version it resumes with, or can publish it again, bit for bit. Whole copies are stored with version 0
    and every ``anchor_every`` versions. ``formats``: see ``streams.FORMATS``; ``exclude``: glob patterns of matrices that
    are not quantised; ``key`` signs every manifest; ``small``: store deltas of BF16 tensors a second time, in fewer bytes
    that take longer to apply, for subscribers behind slow links. With ``ranks`` several processes publish together, each the tensors
    and shards that it holds; they make the same calls, and no weights travel between them.
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
        small: bool = False,
        threads: int = THREADS,
        ranks: Ranks = ALONE,
    ) -> None:
        if anchor_every < 1:
            raise BadInput(f"anchor_every is {anchor_every}; at least 1 is needed")
        if threads < 1:
            raise BadInput(f"threads is {threads}; at least 1 is needed", where="publisher")
        if isinstance(exclude, str):
            raise BadInput(f"exclude is the text {exclude!r}", where="publisher", mend="give a list of patterns")
        self.formats = check_formats(formats)
        self._store = store
        self._key = key
        self._seal = Seal(key)
        self._history = History(store, run_id, self._seal)
        self._run = self._history.run
        self._selection = Selection(tuple(exclude))
        self._anchor_every = anchor_every
        self._small = small
        self._threads = threads
        self._encoder = Encoder(threads)
        self._ranks = ranks
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
        if type(version) is not int or version < 0:
            raise BadInput(f"{version!r} is no version", where=f"run {self._run}", mend="versions are 0, 1, 2, ...")
        if self._base is None:
            self._meet(version)
        newest = -1 if self._base is None else self._base.version.number
        if version not in (newest, newest + 1):
            what = f"version {version} cannot follow {'nothing' if newest < 0 else f'version {newest}'}"
            mend = "resume takes a run up where its store stands" if newest < 0 else ""
            raise BadInput(what, where=f"run {self._run}", mend=mend or f"publish version {newest + 1}")
        snapshot = weights if isinstance(weights, Snapshot) else self.snapshot(weights)
        before = {} if self._base is None else self._base.sections
        made = sections(snapshot, self.formats, self._selection, before, self._ranks)
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
        schemas = {format: self._schema(made, format, tied) for format in self.formats}
        streams: dict[str, Stream] = {}
        done: dict[tuple[str, bool, bool], Work] = {}
        bounds: dict[str, float] = {}
        for format, schema in schemas.items():
            same = self._follows(format, schema)
            whole = not same or version % self._anchor_every == 0
            at, work = 0, []
            for name in stream_sections(format):
                # Sections begin with the shared one, so its pieces have the same numbers and its objects serve all formats.
                if (known := done.get((name, same, whole))) is None:
                    known = done[name, same, whole] = self._encode(made[name], name, schema, at, same, whole)
                work.append(known)
                at += len(known.hashes)
            root = schema.root([hash for one in work for hash in one.hashes])
            streams[format] = Stream(
                schema=name_part(schema.encode()),
                before=base.version.stream(format).root if same and base is not None else None,
                root=root,
                changed=sum(one.changed for one in work) if same else 0,
                elements=schema.elements,
                delta=tuple(part for one in work for part in one.parts) if same else (),
                anchor=tuple(part for one in work for part in one.anchor) if whole else (),
                small=tuple(part for one in work for part in one.small) if same else (),
            )
            bounds[format] = sum(one.bound for one in work)
        manifest = Manifest(self._run, version, self._ancestors(version), self._anchored(), streams)
        raw = self._seal.sign(manifest.encode())
        ref = Ref(version, hashlib.sha256(raw).hexdigest())
        repeated = together(self._ranks, lambda: self._reveal(ref, raw, schemas) if self._ranks.rank == 0 else False)[0]
        self._history.advance(Version(ref, manifest))
        self._base = _Base(Version(ref, manifest), tied, made, {name: work.hashes for (name, *_), work in done.items()})
        return self._published(bounds, began, cast, repeated=repeated)

    def _reveal(self, ref: Ref, raw: bytes, schemas: Mapping[str, Schema]) -> bool:
        """Make the version visible, its bytes first. True if it was already: see ``_swap``."""
        for schema in schemas.values():
            self._put(schema.encode())
        began = time.monotonic()
        self._store.put(manifest_key(self._run, ref), raw)
        repeated = self._swap(ref)
        self._stored += time.monotonic() - began
        return repeated

    def _schema(self, made: Mapping[str, Section], format: str, tied: Mapping[str, str]) -> Schema:
        """The stream's schema: section by section the pieces of every rank, in the order of ranks."""
        names = stream_sections(format)
        if self._ranks.size == 1:
            return schema_of([made[name] for name in names], tied)
        mine = [[layout(made[name]), dict(tied)] for name in names]
        return merge_layouts([json.loads(raw) for raw in self._ranks.gather(json.dumps(mine).encode())])

    def _follows(self, format: str, schema: Schema) -> bool:
        """Whether the last version has the format under the same schema, so that there can be a delta."""
        base = self._base
        if base is None or format not in base.version.manifest.streams:
            return False
        return base.version.manifest.streams[format].schema == name_part(schema.encode())

    def _encode(self, section: Section, name: str, schema: Schema, at: int, follows: bool, whole: bool) -> Work:
        """A section's objects; its pieces, every rank's, are those of the schema from number ``at`` on."""
        mine = len(section.pieces)
        counts = together(self._ranks, lambda: mine)
        first = at + sum(counts[: self._ranks.rank])
        numbers = range(first, first + mine)
        before, hashes = None, None
        if follows and self._base is not None:
            before = self._base.sections[name]
            hashes = self._base.hashes[name][first - at : first - at + mine]
        job = Job(section, before, hashes, schema, numbers, whole=whole, small=self._small)
        return Work.of(together(self._ranks, lambda: self._encoder.encode(job, self._put).data()))

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
            schema = self._schema(made, format, tied)
            odd = "its tensors"
            if self._follows(format, schema):
                hashes = [hash for name in stream_sections(format) for hash in self._hashes(made[name])]
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

    def _hashes(self, section: Section) -> list[bytes]:
        """Of a section's pieces, every rank's."""
        found = together(self._ranks, lambda: [digest(section.bits(piece)).hex() for piece in section.pieces])
        return [bytes.fromhex(hash) for one in found for hash in one]

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
                sum(part.nbytes for part in stream.small),
            )
            for name, stream in version.manifest.streams.items()
        }
        now = time.monotonic()
        return Published(version.number, streams, cast - began, now - cast, self._stored, now - began, repeated)
