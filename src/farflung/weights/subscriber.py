"""The sampler's side: find the newest version, fetch the cheapest way to it, verify every step, hand out the tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farflung.core.errors import Corrupt
from farflung.weights import delta
from farflung.weights.bits import Snapshot, digest
from farflung.weights.delta import Bits
from farflung.weights.manifest import (
    Manifest,
    Part,
    Ref,
    check_run,
    object_key,
    pointer_key,
    read_head,
    read_manifest,
    read_object,
)
from farflung.weights.store import Missing, Store

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """A verified version."""

    ref: Ref
    manifest: Manifest
    snapshot: Snapshot


class Subscriber:
    """Follows one run. Calls block for as long as the store does; ``newest`` may be asked while ``fetch`` is at work.

    What it holds is always one whole version whose hashes are those published; an error leaves it as it was.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run = check_run(run_id)
        self._head: tuple[Ref, Manifest] | None = None
        self._held: Held | None = None
        self._looking = threading.Lock()
        self._fetching = threading.Lock()

    @property
    def held(self) -> Held | None:
        """What the last successful ``fetch`` gave."""
        return self._held

    def newest(self) -> int | None:
        """The newest published version, None before the first. Raises Corrupt for a bad or rewound pointer."""
        head = self._look()
        return None if head is None else head[0].version

    def fetch(self, version: int) -> dict[str, Tensor]:
        """The BF16 tensors of a version by every name they were published under; treat them as read-only.

        From what it holds over the deltas after it, or from an anchor, whichever is fewer bytes. Raises Missing for a
        version that is not published or was pruned, and Corrupt naming object and tensor for bytes that do not verify.
        """
        with self._fetching:
            held = self._held
            if held is None or held.ref.version != version:
                held, steps = self._plan(*self._find(version))
                for ref, manifest in steps:
                    snapshot = self._restore(manifest) if held is None else self._advance(held, manifest)
                    held = Held(ref, manifest, snapshot)
                self._held = held
            assert held is not None
            return held.snapshot.tensors()

    def _look(self) -> tuple[Ref, Manifest] | None:
        """The newest version's manifest."""
        with self._looking:
            head = read_head(self._store, self._run, known=self._head)
            if self._head is not None and (head is None or head[0].version < self._head[0].version):
                now = "nothing" if head is None else f"version {head[0].version}"
                where = f"pointer {pointer_key(self._run)}"
                raise Corrupt(f"it went back from version {self._head[0].version} to {now}", where=where)
            self._head = head
            return head

    def _find(self, version: int) -> tuple[Ref, Manifest]:
        """A version's manifest, from the newest one back over parents, in strides from anchor to anchor."""
        head = self._look()
        if head is None or not 0 <= version <= head[0].version:
            state = "nothing is published yet" if head is None else f"the newest is {head[0].version}"
            raise Missing(f"version {version} does not exist; {state}", where=f"run {self._run}")
        ref, manifest = head
        while ref.version > version:
            ref = [parent for parent in manifest.parents if parent.version >= version][-1]
            manifest = self._manifest(ref, wanted=version)
        return ref, manifest

    def _manifest(self, ref: Ref, wanted: int) -> Manifest:
        try:
            return read_manifest(self._store, self._run, ref)
        except Missing:
            raise Missing(f"version {wanted} was pruned", where=f"run {self._run}") from None

    def _plan(self, ref: Ref, manifest: Manifest) -> tuple[Held | None, list[tuple[Ref, Manifest]]]:
        """The fewest bytes to a version: (what is held, deltas in order) or (None, an anchor and the deltas after it)."""
        wanted = ref.version
        best: list[tuple[Ref, Manifest]] = []
        best_bytes: int | None = None
        after: list[tuple[Ref, Manifest]] = []
        after_bytes = 0
        while best_bytes is None or after_bytes < best_bytes:
            if self._held is not None and self._held.ref == ref:
                return self._held, after
            whole = after_bytes + _bytes(manifest.anchor)
            if manifest.anchor and (best_bytes is None or whole < best_bytes):
                best, best_bytes = [(ref, manifest), *after], whole
            older_is_no_use = best and (self._held is None or ref.version <= self._held.ref.version)
            if older_is_no_use or not manifest.parents:
                break
            after = [(ref, manifest), *after]
            after_bytes += _bytes(manifest.delta)
            try:
                manifest = self._manifest(ref := manifest.parents[0], wanted)
            except Missing:
                if not best:
                    raise
                break
        return None, best

    def _restore(self, manifest: Manifest) -> Snapshot:
        """An anchor's tensors."""
        return self._apply(manifest, manifest.anchor, {})

    def _advance(self, base: Held, manifest: Manifest) -> Snapshot:
        """A delta's tensors. Raises Corrupt when ``base`` is not what the delta was made from."""
        objects = ", ".join(object_key(self._run, part) for part in manifest.delta[:3]) or "no object"
        where = f"delta to version {manifest.version} ({objects})"
        if set(base.snapshot.bits) != set(manifest.tensors):
            odd = sorted(set(base.snapshot.bits) ^ set(manifest.tensors))
            raise Corrupt(f"it is for other tensors: {', '.join(odd[:5])}", where=where)
        for name, entry in manifest.tensors.items():
            # Tensors that change are hashed as they are in memory; the others' hashes are known from their own check.
            touched = entry.before != entry.after
            now = digest(base.snapshot.bits[name]) if touched else base.snapshot.hashes[name]
            if now != entry.before or base.snapshot.bits[name].shape != entry.shape:
                raise Corrupt("the delta is for another base", where=f"{where}, tensor {name}")
        return self._apply(manifest, manifest.delta, base.snapshot.bits)

    def _apply(self, manifest: Manifest, parts: tuple[Part, ...], base: Mapping[str, Bits]) -> Snapshot:
        """``base`` with the parts' changes, every tensor that was written (or is new) checked against its hash."""
        bits = dict(base)
        shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
        source: dict[str, str] = {}
        for part in parts:
            where = f"object {object_key(self._run, part)}"
            try:
                raw = read_object(self._store, self._run, part)
            except Missing:
                raise Corrupt(f"version {manifest.version} needs it and it is not there", where=where) from None
            for name, tensor in delta.decode(raw, base, shapes, where=where).items():
                if name in source:
                    raise Corrupt(
                        f"another object of the version holds it too: {source[name]}", where=f"{where}, {name}"
                    )
                bits[name], source[name] = tensor, where
        for name, entry in manifest.tensors.items():
            place = f"{source.get(name, f'version {manifest.version}')}, tensor {name}"
            if name not in bits or (name not in source and entry.before != entry.after):
                raise Corrupt("no object holds it", where=place)
            if name in source and digest(bits[name]) != entry.after:
                raise Corrupt("it does not have the published hash", where=place)
        hashes = {name: entry.after for name, entry in manifest.tensors.items()}
        return Snapshot({name: bits[name] for name in manifest.tensors}, hashes, manifest.tied)


def _bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts)
