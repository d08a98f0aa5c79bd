"""The trainer's side: one writer per run, versions without gaps, bytes durable before the pointer names them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farflung.core.errors import BadInput
from farflung.weights import delta
from farflung.weights.bits import Snapshot
from farflung.weights.delta import Bits
from farflung.weights.manifest import (
    Manifest,
    Part,
    Ref,
    TensorEntry,
    check_run,
    encode_pointer,
    manifest_key,
    object_key,
    pointer_key,
    read_head,
    read_manifest,
)
from farflung.weights.store import Conflict, Missing, Store
from farflung.weights.subscriber import Held, Subscriber

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A published version: elements changed out of ``total``, bytes of its delta and of its full copy (0: it has none).

    ``repeated``: the store had this very version already. ``seconds``: the whole call.
    """

    version: int
    changed: int
    total: int
    bytes: int
    anchor_bytes: int
    seconds: float
    repeated: bool = False


class Publisher:
    """Publishes one run's weights (Hugging Face names; floating point, published as BF16). Not for several threads.

    Make the trainer's own state durable before it publishes: then a trainer that is killed at any moment has either
    published the version it resumes with, or can publish it again, bit for bit. A full copy is stored with version 0
    and every ``anchor_every`` versions, so that a joiner need not replay all.
    """

    def __init__(self, store: Store, run_id: str, *, anchor_every: int = 50) -> None:
        if anchor_every < 1:
            raise BadInput(f"anchor_every is {anchor_every}; at least 1 is needed")
        self._store = store
        self._run = check_run(run_id)
        self._anchor_every = anchor_every
        self._baseline: Held | None = None

    @staticmethod
    def resume(store: Store, run_id: str, *, anchor_every: int = 50) -> Publisher:
        """Goes on from the store's newest version, whatever the trainer remembers (``version`` is None if it has none)."""
        publisher = Publisher(store, run_id, anchor_every=anchor_every)
        subscriber = Subscriber(store, run_id)
        newest = subscriber.newest()
        if newest is not None:
            subscriber.fetch(newest)
            publisher._baseline = subscriber.held
        return publisher

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows to be published."""
        return None if self._baseline is None else self._baseline.ref.version

    def publish_base(self, weights: Mapping[str, Tensor]) -> Published:
        """Publish version 0, whole. The same weights again are fine; raises Conflict when version 0 has others."""
        began = time.monotonic()
        snapshot = Snapshot.of(weights)
        if self._baseline is not None:
            head: tuple[Ref, Manifest] | None = (self._baseline.ref, self._baseline.manifest)
        else:
            head = read_head(self._store, self._run)
        if head is None:
            return self._commit(0, snapshot, began)
        ref, manifest = head
        if ref.version > 0:
            mend = "Publisher.resume takes a run up where its store stands"
            raise Conflict(f"the run is at version {ref.version} already", where=f"run {self._run}", mend=mend)
        published = _repeat(manifest, snapshot, began)
        self._baseline = Held(ref, manifest, snapshot)
        return published

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> Published:
        """Publish the version after the last one; the last one again is fine if it has the same bytes.

        Raises BadInput for a version that skips or goes back and for tensors that appeared, vanished or changed shape,
        and Conflict when another publisher was there first. After any error the same call may be made again.
        """
        began = time.monotonic()
        if self._baseline is None:
            raise BadInput("nothing is published yet", where=f"run {self._run}", mend="publish_base or resume first")
        newest = self._baseline.ref.version
        if version not in (newest, newest + 1):
            what = f"version {version} cannot follow version {newest}"
            raise BadInput(what, where=f"run {self._run}", mend=f"publish version {newest + 1}")
        snapshot = Snapshot.of(weights)
        self._check_names(self._baseline.snapshot, snapshot)
        if version == newest:
            return _repeat(self._baseline.manifest, snapshot, began)
        return self._commit(version, snapshot, began)

    def prune(self, keep: int) -> int:
        """Remove old versions, oldest first, and return how many; the newest ``keep`` can still be fetched from nothing.

        What they need stays: all versions from the newest full copy that lies at or before them.
        """
        if self._baseline is None or keep < 1:
            raise BadInput(f"cannot keep {keep} versions of {self.version}", where=f"run {self._run}")
        chain = list(self._chain(self._baseline.ref, self._baseline.manifest))
        floor = max(
            (m.version for _, m in chain if m.anchor and m.version <= max(0, chain[0][0].version - keep + 1)), default=0
        )
        kept = {part for _, m in chain if m.version >= floor for part in (*m.delta, *m.anchor)}
        old = [(ref, m) for ref, m in reversed(chain) if ref.version < floor]
        for ref, manifest in old:
            for part in {*manifest.delta, *manifest.anchor} - kept:
                self._store.delete(object_key(self._run, part))
            self._store.delete(manifest_key(self._run, ref))
        return len(old)

    def _chain(self, ref: Ref, manifest: Manifest) -> Iterator[tuple[Ref, Manifest]]:
        """Every version that is left, newest first."""
        yield ref, manifest
        while manifest.parents:
            ref = manifest.parents[0]
            try:
                manifest = read_manifest(self._store, self._run, ref)
            except Missing:
                return
            yield ref, manifest

    def _commit(self, version: int, snapshot: Snapshot, began: float) -> Published:
        """Objects, then the manifest, then the pointer by compare-and-swap; only then is it the baseline."""
        base = self._baseline
        before = {} if base is None else base.snapshot.bits
        changed = dict.fromkeys(snapshot.bits, 0)
        parts: list[Part] = []
        if base is not None:
            touched = [name for name, value in snapshot.hashes.items() if base.snapshot.hashes[name] != value]
            parts = self._put(snapshot, touched, before, changed)
        anchor: list[Part] = []
        if version % self._anchor_every == 0:
            whole = dict.fromkeys(snapshot.bits, 0)
            anchor = self._put(snapshot, list(snapshot.bits), {}, whole)
            changed = changed if base is not None else whole
        old = {} if base is None else base.snapshot.hashes
        tensors = {
            name: TensorEntry(bits.shape, old.get(name), snapshot.hashes[name], changed[name])
            for name, bits in snapshot.bits.items()
        }
        manifest = Manifest(self._run, version, _parents(base), tensors, snapshot.tied, tuple(parts), tuple(anchor))
        raw = manifest.encode()
        ref = Ref(version, hashlib.sha256(raw).hexdigest())
        self._store.put(manifest_key(self._run, ref), raw)
        repeated = self._swap(base, ref)
        self._baseline = Held(ref, manifest, snapshot)
        return _published(manifest, began, repeated=repeated)

    def _put(
        self, snapshot: Snapshot, names: list[str], before: Mapping[str, Bits], changed: dict[str, int]
    ) -> list[Part]:
        """Write tensors as objects of some PART_BYTES of dense size each; notes in ``changed`` what changed."""
        parts: list[Part] = []
        for group in _groups(names, snapshot):
            raw, counts = delta.encode({name: snapshot.bits[name] for name in group}, before)
            changed |= counts
            part = Part(hashlib.sha256(raw).hexdigest(), len(raw))
            self._store.put(object_key(self._run, part), raw)
            parts.append(part)
        return parts

    def _swap(self, base: Held | None, ref: Ref) -> bool:
        """Move the pointer. True if it was there already: an earlier try of ours moved it and did not hear of it."""
        key = pointer_key(self._run)
        try:
            self._store.swap_pointer(key, None if base is None else encode_pointer(base.ref), encode_pointer(ref))
        except Conflict:
            if self._store.read_pointer(key) != encode_pointer(ref):
                head = read_head(self._store, self._run)
                state = "nothing" if head is None else f"version {head[0].version}"
                raise Conflict(
                    f"version {ref.version} was not published: another publisher moved the run to {state}",
                    where=f"run {self._run}",
                    mend="stop one of the two; Publisher.resume takes the run up where its store stands",
                ) from None
            return True
        return False

    def _check_names(self, old: Snapshot, new: Snapshot) -> None:
        where = f"run {self._run}"
        for word, names in (("new", set(new.bits) - set(old.bits)), ("missing", set(old.bits) - set(new.bits))):
            if names:
                raise BadInput(f"{word} tensors: {', '.join(sorted(names))}", where=where, mend="a run's tensors stay")
        for name, bits in new.bits.items():
            if bits.shape != old.bits[name].shape:
                raise BadInput(f"tensor {name} has shape {bits.shape}, not {old.bits[name].shape}", where=where)
        if new.tied != old.tied:
            raise BadInput(f"tied tensors are {dict(new.tied)}, not {dict(old.tied)}", where=where)


def _agrees(manifest: Manifest, snapshot: Snapshot) -> bool:
    """Whether the snapshot has the manifest's tensors, bit for bit."""
    there = {name: (entry.shape, entry.after) for name, entry in manifest.tensors.items()}
    here = {name: (bits.shape, snapshot.hashes[name]) for name, bits in snapshot.bits.items()}
    return there == here and manifest.tied == snapshot.tied


def _repeat(manifest: Manifest, snapshot: Snapshot, began: float) -> Published:
    """The version is in the store: nothing is to be done if the snapshot is the same. Raises Conflict if it is not."""
    if _agrees(manifest, snapshot):
        return _published(manifest, began, repeated=True)
    differ = [n for n, e in manifest.tensors.items() if n not in snapshot.hashes or snapshot.hashes[n] != e.after]
    raise Conflict(
        f"version {manifest.version} was published with other weights (tensor {differ[0] if differ else 'names'})",
        where=f"run {manifest.run}",
        mend="a version never changes: was it another publisher, or a trainer resumed from an older state?",
    )


def _published(manifest: Manifest, began: float, *, repeated: bool) -> Published:
    return Published(
        version=manifest.version,
        changed=sum(entry.changed for entry in manifest.tensors.values()),
        total=sum(entry.size for entry in manifest.tensors.values()),
        bytes=sum(part.bytes for part in manifest.delta),
        anchor_bytes=sum(part.bytes for part in manifest.anchor),
        seconds=time.monotonic() - began,
        repeated=repeated,
    )


def _parents(base: Held | None) -> tuple[Ref, ...]:
    """The base, and unless that has one itself, the newest version before it with a full copy: strides for readers."""
    if base is None:
        return ()
    return (base.ref,) if base.manifest.anchor else (base.ref, base.manifest.parents[-1])


def _groups(names: list[str], snapshot: Snapshot) -> Iterator[list[str]]:
    """Names in order, in groups of at most PART_BYTES of bits (a larger tensor is a group of its own)."""
    group: list[str] = []
    size = 0
    for name in names:
        more = snapshot.bits[name].nbytes
        if group and size + more > PART_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    if group:
        yield group
