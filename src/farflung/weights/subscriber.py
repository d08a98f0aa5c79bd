"""The sampler's side: find the newest version, stage the cheapest way to it, verify, apply, hand out tensors and changes."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import delta, ranked
from farflung.weights.delta import Change, Object, Whole
from farflung.weights.elements import digest
from farflung.weights.history import Detour, History, Link, Version
from farflung.weights.image import Folder, Image, Room
from farflung.weights.manifest import Part, Seal, object_key, read_part
from farflung.weights.ranked import Ranked
from farflung.weights.retention import Lease
from farflung.weights.schema import Schema, groups
from farflung.weights.staging import MOST_CHANGED, Flat, Group, Staged, Told, by_tensor, changed_elements
from farflung.weights.store import Missing, Store
from farflung.weights.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 2
FETCHES = 8
"""Objects of changes fetched at a time; they are kept as they come."""


@dataclass(frozen=True, slots=True)
class Update:
    """A version, verified. ``tensors`` by every name they were published under, over memory that the next ``fetch`` changes.

    ``changed``: flat positions, rising, of the elements that differ from what this subscriber handed out before, by every name of
    tensors with any (of 4-bit codes, two in a byte); None when it handed out nothing, when more than a sixteenth may differ, and when tensors came whole. ``bytes``:
    what was fetched for it, in a try that failed as well. ``links``: deltas and jumps that led here. Seconds to stage (fetch and
    check, failed tries and all) and to apply (decode, apply and hash).
    """

    version: int
    tensors: Mapping[str, Tensor]
    changed: Mapping[str, Flat] | None
    bytes: int = 0
    links: int = 0
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0


class Subscriber:
    """Follows one run in one format. Calls block for as long as the store does; ``newest`` may be asked during ``fetch``.

    It hands out whole versions whose hashes are those published, and nothing else. An error while a version is fetched and
    checked leaves what is held; where a jump or a delta in fewer bytes is wrong, single plain deltas are taken; bits that turn out
    wrong while they are applied are fetched whole. Beside the weights, memory holds the objects as they came, and changes of a group of pieces (``PIECE_BYTES``)
    for each thread and link.

    ``folder``: keep the bits there, for the next process; one subscriber at a time. ``small``: take deltas in fewer bytes where
    there are such. ``name``: say in the store what is held, so that it is not pruned.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        format: str = "bf16",
        key: bytes | None = None,
        folder: Path | str | None = None,
        name: str | None = None,
        small: bool = False,
        threads: int = THREADS,
    ) -> None:
        if threads < 1:
            raise BadInput(f"threads is {threads}; at least 1 is needed", where="subscriber")
        self.format = format
        self._store = store
        self._history = History(store, run_id, Seal(key))
        self._room = Room() if folder is None else Folder(folder)
        self._lease = None if name is None else Lease(store, self._history.run, name)
        self._small = small
        self._workers = Workers(threads)
        self._image: Image | None = None
        self._handed: str | None = None
        self._fetched = self._links = 0
        self._detour = Detour(self._history)
        self._opened = False
        self._fetching = threading.Lock()

    @property
    def version(self) -> int | None:
        """The version that it holds, whole and verified."""
        return None if (image := self.image) is None else image.version

    @property
    def image(self) -> Image | None:
        """What it holds, whole and verified."""
        return None if self._image is None or self._image.torn else self._image

    def close(self) -> None:
        """Let go of what is held and, where there is one, of the folder; tensors handed out are another's from then on."""
        with self._fetching:
            self._image, self._opened = None, False
            self._room.close()

    def newest(self) -> int | None:
        """The newest published version, None before the first. Raises Corrupt for a bad or rewound pointer."""
        newest = self._history.newest()
        if self._lease is not None:
            self._lease.renew()
        return None if newest is None else newest.number

    def fetch(self, version: int) -> Update:
        """Bring what it holds to a version: forwards over deltas and jumps, backwards over their inverses, or from an anchor.

        Raises Missing for a version that is not published, not in this format, or was pruned, and Corrupt naming object
        and tensor for bytes that do not verify.
        """
        if type(version) is not int:
            raise BadInput(f"version {version!r:.100} is not an int", where="fetch")
        with self._fetching:
            if not self._opened:
                self._image, self._opened = self._room.load(), True
            self._detour, self._fetched = Detour(self._history), 0
            began = time.monotonic()
            return self._detour.tried(lambda: self._fetch(version, began))

    def _fetch(self, version: int, began: float) -> Update:
        self._links = 0
        wanted = self._history.find(version)
        root = wanted.stream(self.format).root
        image, staged = self._image, began
        if image is not None:
            # Left by another process, or by a fetch that failed: which are torn is known before anything is planned.
            image.torn = set(self._differing(image, image.torn))
        # What changed is told against what was handed out last, which a fetch that failed since may have moved on from.
        known = image is not None and not image.torn and image.root == self._handed
        told: Told | None = {} if known else None
        if image is None or image.root != root:
            change = None if image is None else self._change(image, wanted)
            if image is None or change is None:
                image, told, staged = self._join(wanted), None, time.monotonic()
            else:
                staged = time.monotonic()
                told = None if change.whole or change.changed > MOST_CHANGED * image.schema.elements else told
                self._apply(image, change, root, told, backwards=version < image.version)
        image.version = version
        if image.torn:
            self._repair(image, wanted)
            told = None
        changed = None if told is None else by_tensor(image.schema, told)
        self._room.save(image)
        self._handed = root
        if self._lease is not None:
            self._lease.hold(version)
        spent = staged - began, time.monotonic() - staged
        return Update(version, image.tensors(), changed, self._fetched, self._links, *spent)

    def _change(self, image: Image, wanted: Version) -> Staged | None:
        """What makes the image the wanted version; None where an anchor is the cheaper start, or the only one."""
        backwards = image.version > wanted.number
        links = None if backwards and image.torn else self._way(image, wanted, backwards=backwards)
        if links is None:
            return None
        staged = self._stage(links, image.schema, small=not backwards)
        # An object has hashes of what it leads to, and none of what it came from: only sound bits can be taken back.
        if backwards and (staged.whole or self._differing(image, staged.after)):
            return None
        return staged

    def _way(self, image: Image, wanted: Version, *, backwards: bool) -> Sequence[Link] | None:
        """Links between what is held and what is wanted."""
        try:
            upper = self._history.find(image.version) if backwards else wanted
        except Missing:
            return None  # it is of a run that the store knows no more, or was pruned
        if self.format not in upper.manifest.streams:
            return None  # it is of another run
        links = self._detour.links(min(image.version, wanted.number), upper, self.format)
        if not links or image.root != (links[-1].root if backwards else links[0].before):
            return None
        if backwards:
            return links
        anchored = self._history.anchored(wanted, self.format)
        if anchored is not None and anchored.number > image.version:
            rest = self._detour.links(anchored.number, wanted, self.format)
            whole = sum(part.nbytes for part in anchored.stream(self.format).anchor)
            if rest is not None and whole + sum(link.nbytes for link in rest) < sum(link.nbytes for link in links):
                return None
        return links

    def _anchored(self, wanted: Version) -> tuple[Version, Sequence[Link]]:
        """The anchor that a version is made from, and the way on from there."""
        anchored = self._history.anchored(wanted, self.format)
        links = None if anchored is None else self._detour.links(anchored.number, wanted, self.format)
        if anchored is None or links is None:
            raise Missing(f"version {wanted.number} was pruned", where=f"run {self._history.run}")
        return anchored, links

    def _join(self, wanted: Version) -> Image:
        """From an anchor, whole, and on over links. What is held stays until it is done, unless its room is needed."""
        anchored, links = self._anchored(wanted)
        if self._lease is not None:
            self._lease.hold(anchored.number)
        stream = anchored.stream(self.format)
        schema = self._schema(stream.schema)
        arrays = self._room.arrays(schema)
        if self._room.shared:
            self._image = None
        image = Image(anchored.number, schema, arrays, [b""] * len(schema.pieces))
        for change in self._decoded(stream.anchor, schema):
            if not isinstance(change.content, Whole):
                raise Corrupt("it holds a change, not the tensor", where=self._place(anchored, schema, change.piece))
            delta.apply(image.piece(change.piece), change.content, schema.pieces[change.piece].kind)
            image.hashes[change.piece] = change.after
        if missing := [number for number, hash in enumerate(image.hashes) if not hash]:
            raise Corrupt("no object holds it", where=self._place(anchored, schema, missing[0]))
        if image.root != stream.root:
            raise Corrupt("its tensors are not those published", where=f"{self.format} of version {anchored.number}")
        if odd := self._differing(image, range(len(schema.pieces))):
            raise Corrupt("it does not have the published hash", where=self._place(anchored, schema, odd[0]))
        if links:
            self._apply(image, self._stage(links, schema), wanted.stream(self.format).root, None)
        self._image = image
        return image

    def _stage(self, links: Sequence[Link], schema: Schema, *, small: bool = False) -> Staged:
        """The links' objects, fetched and their tables checked. ``small``: a single link may be had in fewer bytes."""
        self._links += len(links)
        small = small and self._small and not self._detour.plain and len(links) == 1 and bool(links[0].small)
        shortcut = small or any(link.jumps for link in links)
        parts = [link.small if small else link.parts for link in links]
        every = [(part, small or link.jumps) for link, each in zip(links, parts, strict=True) for part in each]
        self._fetched += sum(part.nbytes for part, _ in every)

        def read(item: tuple[Part, bool]) -> Object:
            with self._detour.blaming(item[1]):
                return self._object(item[0], schema, ranked=small)

        objects = iter(Workers(FETCHES).all(read, every))
        names = [f"{self.format} of version {link.stop}" for link in links]
        with self._detour.blaming(shortcut):
            staged = ((name, islice(objects, len(each))) for name, each in zip(names, parts, strict=True))
            return Staged(schema, staged, shortcut=shortcut)

    def _apply(self, image: Image, staged: Staged, root: str, told: Told | None, *, backwards: bool = False) -> None:
        """Apply changes in place; pieces that come out wrong are torn, and so are all of them for as long as it lasts.

        Forwards, the hashes are known and settled first: they must give the root. Backwards they are found.
        """
        with self._detour.blaming(staged.shortcut):
            hashes = list(image.hashes)
            for number, hash in staged.after.items():
                hashes[number] = hash
            if not backwards and image.schema.root(hashes) != root:
                raise Corrupt("the changes do not lead to the published weights", where=f"{self.format}, root {root}")
            sound = staged.after.keys() - image.torn
            image.torn |= staged.after.keys()

            def settle(group: Group) -> list[tuple[int, bytes, Flat | None]]:
                tells = told is not None
                return [self._settle(image, c, tells, backwards) for c in group.changes() if c.piece in sound]

            wrong = set[int]()
            for settled in self._workers.ahead(settle, staged.groups):
                for number, hash, elements in settled:
                    if backwards:
                        hashes[number] = hash
                    if told is not None and elements is not None and len(elements):
                        told[number] = elements
                    if hash != hashes[number]:
                        wrong.add(number)
            if backwards and image.schema.root(hashes) != root:
                what = "the changes do not lead back to the published weights"
                raise Corrupt(what, where=f"{self.format}, root {root}")
            image.hashes = hashes
            image.torn -= sound - wrong

    def _settle(self, image: Image, change: Change, tells: bool, backwards: bool) -> tuple[int, bytes, Flat | None]:
        """Change a piece; its hash then, and which elements changed."""
        piece, bits, content = image.schema.pieces[change.piece], image.piece(change.piece), change.content
        if isinstance(content, Ranked):
            place = f"{self.format} of version {image.version}, tensor {piece.tensor}"
            content = ranked.place(bits, content, place)
        elif backwards:
            content = delta.invert(content, piece.kind)
        delta.apply(bits, content, piece.kind)
        return change.piece, digest(bits), changed_elements(content, piece) if tells else None

    def _repair(self, image: Image, wanted: Version) -> None:
        """Torn pieces whose bits are those of the version after all stay; the others are made again, from the anchor."""
        if torn := set(self._differing(image, image.torn)):
            anchored, links = self._anchored(wanted)
            ways = [(anchored.stream(self.format).anchor, False), *((link.parts, link.jumps) for link in links)]
            for group in groups(image.schema):
                if odd := torn.intersection(group):
                    self._make_again(image, odd, ways, wanted)
        image.torn = set()

    def _make_again(
        self, image: Image, odd: Collection[int], ways: Sequence[tuple[Sequence[Part], bool]], wanted: Version
    ) -> None:
        """``ways``: objects one after the other, and whether they are a jump's."""
        fresh = {number: np.zeros_like(image.piece(number)) for number in odd}
        for parts, jumps in ways:
            with self._detour.blaming(jumps):
                for change in self._decoded(_holding(parts, odd), image.schema):
                    if change.piece in fresh:
                        delta.apply(fresh[change.piece], change.content, image.schema.pieces[change.piece].kind)
        with self._detour.blaming(any(jumps for _, jumps in ways)):
            for number, bits in fresh.items():
                if digest(bits) != image.hashes[number]:
                    where = self._place(wanted, image.schema, number)
                    raise Corrupt("it does not have the published hash", where=where)
                image.piece(number)[...] = bits

    def _differing(self, image: Image, pieces: Iterable[int]) -> list[int]:
        """Those whose bits do not have the hash that they should have."""
        pieces = list(pieces)
        found = self._workers.all(lambda number: digest(image.piece(number)), pieces)
        return [number for number, hash in zip(pieces, found, strict=True) if hash != image.hashes[number]]

    def _decoded(self, parts: Sequence[Part], schema: Schema) -> Iterator[Change]:
        """The changes of objects, which are fetched and decoded a few at a time."""
        self._fetched += sum(part.nbytes for part in parts)
        for changes in self._workers.ahead(lambda part: self._object(part, schema).changes(), parts):
            yield from changes

    def _object(self, part: Part, schema: Schema, *, ranked: bool = False) -> Object:
        raw = read_part(self._store, self._history.run, part)
        return delta.read(raw, schema, where=f"object {object_key(self._history.run, part)}", ranked=ranked)

    def _schema(self, part: Part) -> Schema:
        where = f"schema {object_key(self._history.run, part)}"
        self._fetched += part.nbytes
        return Schema.decode(read_part(self._store, self._history.run, part), where)

    def _place(self, version: Version, schema: Schema, piece: int) -> str:
        return f"{self.format} of version {version.number}, tensor {schema.pieces[piece].tensor}"


def _holding(parts: Sequence[Part], pieces: Iterable[int]) -> list[Part]:
    """Those objects, in rising order of what is in them, that may hold any of the pieces."""
    firsts = [part.first for part in parts]
    return [parts[i] for i in sorted({bisect_right(firsts, number) - 1 for number in pieces}) if i >= 0]
