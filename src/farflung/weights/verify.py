"""Whether a run's store holds what was published: every object read, every way walked, every fault named with its mend.

Each format is walked upwards over single deltas, from the first version that is stored whole. On the way each anchor is
held against what the deltas led to, and each jump is taken back and must lead to the root that it says it starts from.
Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import delta
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import digest
from farflung.weights.findings import BRING_BACK, NEXT_ANCHOR, Fault, Findings, Pruned
from farflung.weights.history import History, Version
from farflung.weights.image import Image, Room
from farflung.weights.manifest import (
    Jump,
    Ref,
    Stream,
    encode_pointer,
    jump_key,
    manifest_key,
    object_key,
    pointer_key,
    read_jump,
)
from farflung.weights.pointer import moved_back
from farflung.weights.retention import decode_lease, object_keys
from farflung.weights.schema import Schema
from farflung.weights.store import Missing

Progress = Callable[[int, int, str], None]
"""Called with the steps that are done, the steps that there are, and what the next one is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was looked at, and what is wrong with it. ``nbytes`` of objects were read.

    ``orphans``: keys that nothing names, of a publisher that died or is at work; None when they were not looked for.
    """

    versions: int
    jumps: int
    objects: int
    nbytes: int
    faults: tuple[Fault, ...]
    orphans: tuple[str, ...] | None


def verify(
    history: History, *, last: int | None = None, orphans: bool = True, progress: Progress | None = None
) -> Verdict:
    """Look at all versions that the pointer leads to, or at the newest ``last`` and what they need.

    Orphans are looked for in whole runs alone, and only where ``orphans`` says so: a mirror cannot list.
    Raises StoreError when the store cannot be read, and BadInput for a ``last`` below 1.
    """
    if last is not None and last < 1:
        raise BadInput(f"the last {last} versions are none", where="verify", mend="at least 1")
    # The keys come first: what is published from now on is in none of them.
    keys = history.store.list(history.run) if orphans else []
    history.forget()  # what was pruned since it was read
    findings = Findings(history)
    walk = _Walk(history, progress or (lambda done, total, what: None), findings)
    walk.find(last, keys)
    walk.formats()
    walk.leases([key for key in keys if key.startswith(f"{history.run}/leases/")])
    strays = walk.strays(keys) if orphans and last is None and findings.complete else None
    read = findings.read
    return Verdict(len(walk.versions), walk.jumps, len(read), sum(read.values()), tuple(findings.faults), strays)


@dataclass
class _Walk:
    """``named``: manifests by the versions they hold; ``known``: keys that something names; ``moved``: the pointer was."""

    history: History
    progress: Progress
    findings: Findings
    lowest: int = 0
    versions: dict[int, Version] = field(default_factory=dict)
    named: dict[int, Ref] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    jumps: int = 0
    moved: bool = False

    def find(self, last: int | None, keys: Sequence[str]) -> None:
        """The versions, newest first, and below the lowest wanted one those down to where every format is whole."""
        try:
            newest = self.history.newest()
        except Corrupt as error:
            if error.where.startswith("pointer"):
                right = moved_back(self.history, keys, None)
                self.findings.fault(error, "bring it back from a copy" if right is None else _write_pointer(right))
            else:
                self.findings.fault(error, BRING_BACK)
            self.findings.complete = False
            return
        self._pointer(keys, newest)
        if newest is None:
            return
        self.lowest = 0 if last is None else max(0, newest.number - last + 1)
        missing: list[int] = []
        wanted = set(newest.manifest.streams)
        self.named[newest.number] = newest.ref
        for number in range(newest.number, -1, -1):
            if number < self.lowest and not wanted:
                break
            if (ref := self.named.get(number)) is None:
                continue
            try:
                version = self.history.read(ref)
            except Missing:
                missing.append(number)
                continue
            except Corrupt as error:
                self.findings.fault(error, BRING_BACK)
                self.findings.complete = False
                continue
            self.versions[number] = version
            self.known.update(object_keys(self.history.run, version))
            for earlier in (*version.manifest.ancestors, version.manifest.anchored):
                if earlier is not None:
                    self.named.setdefault(earlier.version, earlier)
            if number <= self.lowest:
                wanted -= {name for name, stream in version.manifest.streams.items() if stream.anchor}
        floor = min(self.versions)
        below = [number for number in missing if number < floor]
        for number in missing:
            if number not in below:
                self._lost(number, "it is not there, though versions that need it are", BRING_BACK)
        if below and self._there(floor) and any(self._cut_off(format) for format in newest.manifest.streams):
            what = "it is not there, so nothing leads to what follows it: it was lost, or a pruning is at work or was cut off"
            self._lost(below[0], what, f"farflung weights gc ends a pruning that was cut off; else {BRING_BACK}")

    def _lost(self, number: int, what: str, mend: str) -> None:
        self.findings.note(Fault(f"manifest {manifest_key(self.history.run, self.named[number])}", what, mend))
        self.findings.complete = False

    def _cut_off(self, format: str) -> bool:
        """Whether its oldest version is not whole: a pruning leaves one that is, so what was below it is lost."""
        oldest = min(n for n, version in self.versions.items() if format in version.manifest.streams)
        return not self.versions[oldest].manifest.streams[format].anchor

    def _pointer(self, keys: Sequence[str], newest: Version | None) -> None:
        """Whether it was moved, as far as these keys can tell."""
        right = moved_back(self.history, keys, None if newest is None else newest.ref)
        if right is None:
            return
        number = -1 if newest is None else newest.number
        what = (
            f"it names {'nothing' if newest is None else f'version {number}'}, but {'another ' * (right.number == number)}"
            f"version {right.number} is there as well, manifest {manifest_key(self.history.run, right.ref)}, and what is "
            "there shows that the pointer stood elsewhere: it was moved back, or copied before the rest"
        )
        self.findings.note(Fault(f"pointer {pointer_key(self.history.run)}", what, _write_pointer(right)))
        self.findings.complete = False
        self.moved = True

    def formats(self) -> None:
        names = list(dict.fromkeys(name for version in self.versions.values() for name in version.manifest.streams))
        numbers = sorted(self.versions)
        for i, name in enumerate(names):
            self._format(name, numbers, i * len(numbers), len(names) * len(numbers))

    def leases(self, keys: Sequence[str]) -> None:
        self.known.update(keys)
        for key in keys:
            try:
                raw = self.history.store.read_pointer(key)
                if raw is not None:
                    decode_lease(raw, f"lease {key}")
            except Corrupt as error:
                self.findings.fault(error, error.mend)

    def strays(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Those that nothing names."""
        run = self.history.run
        known = self.known | {manifest_key(run, ref) for ref in self.named.values()} | {pointer_key(run)}
        return tuple(key for key in keys if key not in known and self.history.store.exists(key))

    def _format(self, format: str, numbers: Sequence[int], done: int, total: int) -> None:
        image: Image | None = None
        skipped: list[int] = []
        lasts = format in self.versions[numbers[-1]].manifest.streams
        begun = False
        for step, number in enumerate(numbers):
            self.progress(done + step, total, f"{format}, version {number}")
            version = self.versions[number]
            stream = version.manifest.streams.get(format)
            if stream is None or number - 1 not in self.versions:
                image = None
            if stream is None:
                continue
            begun = begun or bool(stream.anchor) or (lasts and number >= self.lowest)
            try:
                image = self._version(image, version, format, stream)
            except Pruned:
                image = None
                continue
            if image is None and begun:
                skipped.append(number)
        if skipped := [number for number in skipped if self._there(number)]:
            what = f"not checked: version{'s' if len(skipped) > 1 else ''} {_ranges(skipped)}, to which nothing sound leads"
            mend = "mend what is named above, or bring the whole copy before them back"
            self.findings.note(Fault(f"{format} of run {self.history.run}", what, mend))

    def _there(self, number: int) -> bool:
        """Whether the version was not pruned meanwhile."""
        return self.history.store.exists(manifest_key(self.history.run, self.named[number]))

    def _version(self, image: Image | None, version: Version, format: str, stream: Stream) -> Image | None:
        """The image of this version; None where neither its delta nor its whole copy gives it."""
        schema = self.findings.schema(stream.schema, manifest_key(self.history.run, version.ref))
        if schema is None:
            self.findings.complete = False
            return None
        image = self._follow(image, version, format, stream, schema)
        if stream.anchor:
            image = self._anchor(image, version, format, stream, schema)
        # Below a pointer that was moved they may be those of other versions of the same numbers.
        for ref in () if self.moved else version.manifest.ancestors[1:]:
            self._jump(image, version, ref.version, format, stream, schema)
        return image

    def _follow(
        self, image: Image | None, version: Version, format: str, stream: Stream, schema: Schema
    ) -> Image | None:
        """The image of the version before, brought to this one; None where that does not go."""
        where = f"{format} of version {version.number}"
        if stream.before is None:
            return None
        if image is not None and (image.root != stream.before or image.schema != schema):
            what = f"its delta starts at other weights than version {version.number - 1}"
            self.findings.note(Fault(where, what, NEXT_ANCHOR))
            image = None
        if image is not None:
            self._small(image, version, stream, schema)
        sound = image is not None
        for part, changes in self.findings.decoded(stream.delta, schema, manifest_key(self.history.run, version.ref)):
            sound = sound and changes is not None
            if image is not None and changes is not None:
                sound &= self._apply(image, changes, f"object {object_key(self.history.run, part)}")
        if not sound or image is None:
            return None
        if image.root != stream.root:
            self.findings.note(Fault(where, "its delta leads to other weights than those published", NEXT_ANCHOR))
            return None
        return image

    def _small(self, image: Image, version: Version, stream: Stream, schema: Schema) -> None:
        """Hold the deltas in fewer bytes against the bits that they are told of."""
        owner = manifest_key(self.history.run, version.ref)
        for part, changes in self.findings.decoded(stream.small, schema, owner, ranked=True):
            for change in changes or ():
                where = f"object {object_key(self.history.run, part)}, tensor {schema.pieces[change.piece].tensor}"
                bits = image.piece(change.piece).copy()
                try:
                    delta.apply(bits, change.content, schema.pieces[change.piece].kind)
                except Corrupt as error:
                    self.findings.note(Fault(where, error.what, NEXT_ANCHOR))
                    continue
                if digest(bits) != change.after:
                    self.findings.note(Fault(where, "its changes do not give the hash that it states", NEXT_ANCHOR))

    def _apply(self, image: Image, changes: Sequence[Change], where: str) -> bool:
        sound = True
        for change in changes:
            piece, bits = image.schema.pieces[change.piece], image.piece(change.piece)
            delta.apply(bits, change.content, piece.kind)
            image.hashes[change.piece] = change.after
            if digest(bits) != change.after:
                what = "its changes do not give the hash that it states"
                self.findings.note(Fault(f"{where}, tensor {piece.tensor}", what, NEXT_ANCHOR))
                sound = False
        return sound

    def _anchor(
        self, image: Image | None, version: Version, format: str, stream: Stream, schema: Schema
    ) -> Image | None:
        """Hold the whole copy against the image, or make the image of it."""
        where = f"whole copy of {format} of version {version.number}"
        fresh = None
        if image is None:
            fresh = Image(version.number, schema, Room().arrays(schema), [b""] * len(schema.pieces))
        missing, sound = set(range(len(schema.pieces))), True
        for part, changes in self.findings.decoded(stream.anchor, schema, manifest_key(self.history.run, version.ref)):
            sound &= changes is not None
            for change in changes or []:
                place = f"object {object_key(self.history.run, part)}, tensor {schema.pieces[change.piece].tensor}"
                missing.discard(change.piece)
                if not isinstance(change.content, Whole) or digest(change.content.bits) != change.after:
                    self.findings.note(Fault(place, "its bits do not have the hash that it states", NEXT_ANCHOR))
                    sound = False
                elif image is not None and image.hashes[change.piece] != change.after:
                    what = f"it differs from what the delta of version {version.number} leads to"
                    self.findings.note(Fault(place, what, NEXT_ANCHOR))
                    sound = False
                elif fresh is not None:
                    fresh.piece(change.piece)[...] = change.content.bits
                    fresh.hashes[change.piece] = change.after
        if sound and missing:
            what = f"no object holds tensor {schema.pieces[min(missing)].tensor}"
            self.findings.note(Fault(where, what, NEXT_ANCHOR))
            sound = False
        if sound and fresh is not None and fresh.root != stream.root:
            self.findings.note(Fault(where, "it holds other weights than those published", NEXT_ANCHOR))
            sound = False
        return image if image is not None else fresh if sound else None

    def _jump(
        self, image: Image | None, version: Version, start: int, format: str, stream: Stream, schema: Schema
    ) -> None:
        span, run = version.number - start, self.history.run
        key = jump_key(run, format, version.number, span)
        self.known.add(key)
        try:
            jump = read_jump(self.history.store, run, format, version.number, span, self.history.seal)
        except Corrupt as error:
            self.findings.fault(error, _make_again(key))
            self.findings.complete = False
            return
        if jump is None:
            return
        self.jumps += 1
        self.known |= {object_key(run, part) for part in jump.delta}
        first = self.versions.get(start)
        before = first.manifest.streams.get(format) if first is not None else None
        if jump.root != stream.root or (before is not None and jump.before != before.root):
            what = f"it leads between other weights than those of versions {start} and {version.number}"
            self.findings.note(Fault(f"jump {key}", what, _make_again(key)))
            return
        changes: list[Change] = []
        for _, found in self.findings.decoded(jump.delta, schema, key, _make_again(key)):
            if found is None:
                image = None
            elif image is not None:
                changes += found
        if image is not None and not _leads_back(image, jump, changes):
            what = f"it does not lead from version {start} to version {version.number}"
            self.findings.note(Fault(f"jump {key}", what, _make_again(key)))


def _leads_back(image: Image, jump: Jump, changes: Sequence[Change]) -> bool:
    """Whether the image's bits, taken back by the jump, give the root that it starts from."""
    hashes = list(image.hashes)
    for change in changes:
        kind = image.schema.pieces[change.piece].kind
        if isinstance(change.content, Whole) or change.after != image.hashes[change.piece]:
            return False
        bits = image.piece(change.piece).copy()
        delta.apply(bits, delta.invert(change.content, kind), kind)
        hashes[change.piece] = digest(bits)
    return image.schema.root(hashes) == jump.before


def _write_pointer(version: Version) -> str:
    return f"write {encode_pointer(version.ref).decode()} to it, and verify again"


def _make_again(key: str) -> str:
    return f"remove {key} and the objects of it that are named here; farflung weights compact makes them again"


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers with runs of them as A-B."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
