"""The sampler's side: find the newest version, stage the cheapest way to it, verify, apply, hand out tensors and changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from farflung.core.errors import Corrupt
from farflung.weights import delta
from farflung.weights.changes import Changes, Positions
from farflung.weights.delta import Change, Dense, Whole
from farflung.weights.elements import ElementType, digest
from farflung.weights.history import History, Link, Version
from farflung.weights.image import Folder, Image, Room
from farflung.weights.manifest import Part, Seal, object_key, read_part
from farflung.weights.retention import Lease
from farflung.weights.schema import Schema
from farflung.weights.store import Missing, Store

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 2

Contents = dict[int, list[Changes | Dense | Whole]]


@dataclass(frozen=True, slots=True)
class Update:
    """A version, verified. ``tensors`` by every name they were published under, over memory that the next ``fetch`` changes.

    ``changed``: flat positions, rising, of the elements that differ from the version before in this subscriber's hands, for
    tensors with any; None when most is new. ``bytes``: what was fetched for it. Seconds to stage (fetch and decode) and
    to apply (and hash).
    """

    version: int
    tensors: Mapping[str, Tensor]
    changed: Mapping[str, Positions] | None
    bytes: int = 0
    links: int = 0
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0


class Subscriber:
    """Follows one run in one format. Calls block for as long as the store does; ``newest`` may be asked during ``fetch``.

    It hands out whole versions whose hashes are those published, and nothing else. An error while a version is fetched
    and checked leaves what is held; bits that turn out wrong while they are applied are fetched whole.
    ``folder``: keep the bits there, for the next process. ``name``: say in the store what is held, so that it is not pruned.
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
        threads: int = THREADS,
    ) -> None:
        self.format = format
        self._store = store
        self._history = History(store, run_id, Seal(key))
        self._room = Room() if folder is None else Folder(folder)
        self._lease = None if name is None else Lease(store, self._history.run, name)
        self._threads = threads
        self._image: Image | None = None
        self._version: int | None = None
        self._torn: set[int] = set()
        self._fetched = self._links = 0
        self._opened = folder is None
        self._fetching = threading.Lock()

    @property
    def version(self) -> int | None:
        """The version that it holds, whole and verified."""
        return None if self._torn else self._version

    @property
    def image(self) -> Image | None:
        """What it holds, whole and verified."""
        return None if self._torn else self._image

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
        with self._fetching:
            began, self._fetched, self._links = time.monotonic(), 0, 0
            self._open()
            wanted = self._history.find(version)
            root = wanted.stream(self.format).root
            image, staged = self._image, began
            changed: dict[str, Positions] | None = None if self._torn else {}
            if image is None or image.root != root:
                way = None if image is None else self._way(image, wanted)
                if image is None or way is None:
                    image = self._image = self._join(wanted)
                    changed, staged = None, time.monotonic()
                else:
                    links, backwards = way
                    work = self._stage(links, image.schema)
                    staged = time.monotonic()
                    changed = self._advance(image, work, root, backwards=backwards)
                self._version = version
            if self._torn:
                self._repair(image, wanted)
                changed = None
            self._version = version
            self._room.save(version, image)
            if self._lease is not None:
                self._lease.hold(version)
            spent = staged - began, time.monotonic() - staged
            return Update(version, image.tensors(), changed, self._fetched, self._links, *spent)

    def _open(self) -> None:
        """What an earlier process left, its pieces hashed: which are torn is known before anything is planned."""
        if self._opened:
            return
        if (left := self._room.load()) is not None:
            self._version, _, image = left
            self._torn = set(self._differing(image, range(len(image.schema.pieces))))
            self._image = image
        self._opened = True

    def _way(self, image: Image, wanted: Version) -> tuple[Sequence[Link], bool] | None:
        """Links from what is held, and whether they are gone backwards; None where an anchor is the cheaper start."""
        held = self._version
        if held is None:
            return None
        backwards = held > wanted.number
        upper = self._history.find(held) if backwards else wanted
        links = self._history.links(min(held, wanted.number), upper, self.format)
        if links is None or (links and image.root != (links[-1].root if backwards else links[0].before)):
            return None
        if backwards:
            return links, True
        anchored = self._history.anchored(wanted, self.format)
        if anchored is not None and anchored.number > held:
            rest = self._history.links(anchored.number, wanted, self.format)
            whole = sum(part.nbytes for part in anchored.stream(self.format).anchor)
            if rest is not None and whole + sum(link.nbytes for link in rest) < sum(link.nbytes for link in links):
                return None
        return links, False

    def _join(self, wanted: Version) -> Image:
        """From an anchor, whole, and on over links. What is held stays until it is done, unless its room is needed."""
        anchored = self._history.anchored(wanted, self.format)
        links = None if anchored is None else self._history.links(anchored.number, wanted, self.format)
        if anchored is None or links is None:
            raise Missing(f"version {wanted.number} was pruned", where=f"run {self._history.run}")
        if self._lease is not None:
            self._lease.hold(anchored.number)
        stream = anchored.stream(self.format)
        schema = self._schema(stream.schema)
        image = Image.empty(schema, self._room)
        if self._room.shared:
            self._image, self._torn = None, set()
        missing = set(range(len(schema.pieces)))
        for change in self._decoded(stream.anchor, schema):
            if not isinstance(change.content, Whole):
                raise Corrupt("it holds a change, not the tensor", where=self._place(wanted, schema, change.piece))
            delta.apply(image.piece(change.piece), change.content, schema.pieces[change.piece].kind)
            image.hashes[change.piece] = change.after
            missing.discard(change.piece)
        if missing:
            raise Corrupt("no object holds it", where=self._place(anchored, schema, min(missing)))
        if image.root != stream.root:
            raise Corrupt("its tensors are not those published", where=f"{self.format} of version {anchored.number}")
        if odd := self._differing(image, range(len(schema.pieces))):
            raise Corrupt("it does not have the published hash", where=self._place(anchored, schema, odd[0]))
        if links:
            self._advance(image, self._stage(links, schema), wanted.stream(self.format).root)
        return image

    def _stage(self, links: Sequence[Link], schema: Schema) -> list[list[Change]]:
        """Every link's changes, fetched, decoded and checked as far as that goes without the bits they are for."""
        work: list[list[Change]] = []
        self._links += len(links)
        for link in links:
            changes = list(self._decoded(link.parts, schema))
            if len({change.piece for change in changes}) < len(changes):
                raise Corrupt("two objects hold the same piece", where=f"{self.format} of version {link.stop}")
            work.append(changes)
        return work

    def _advance(
        self, image: Image, work: Sequence[Sequence[Change]], root: str, *, backwards: bool = False
    ) -> dict[str, Positions] | None:
        """Apply changes in place. Forwards, the hashes of every piece are settled first: they must give the root.

        Pieces whose bits are not as they should be afterwards are torn.
        """
        contents: Contents = {}
        hashes = list(image.hashes)
        for change in (change for changes in work for change in changes):
            contents.setdefault(change.piece, []).append(change.content)
            hashes[change.piece] = change.after
        if not backwards and image.schema.root(hashes) != root:
            raise Corrupt("the changes do not lead to the published weights", where=f"{self.format}, root {root}")
        torn = self._torn
        self._torn = torn | set(contents)

        def settle(number: int) -> bool:
            kind, bits = image.schema.pieces[number].kind, image.piece(number)
            steps = contents[number]
            for content in _inverses(steps, kind) if backwards else steps:
                delta.apply(bits, content, kind)
            found = digest(bits)
            if backwards:
                hashes[number] = found
            return found == hashes[number]

        pieces = [number for number in contents if number not in torn]
        with ThreadPoolExecutor(self._threads) as pool:
            right = dict(zip(pieces, pool.map(settle, pieces), strict=True))
        image.hashes = hashes
        self._torn = torn | {number for number in pieces if not right[number]}
        if image.root != root:
            raise Corrupt("the changes do not lead back to the published weights", where=f"{self.format}, root {root}")
        return _positions(image.schema, contents)

    def _repair(self, image: Image, wanted: Version) -> None:
        """Torn pieces whose bits are right after all stay; the others are made again, from the anchor."""
        odd = self._differing(image, sorted(self._torn))
        if odd:
            anchored = self._history.anchored(wanted, self.format)
            links = None if anchored is None else self._history.links(anchored.number, wanted, self.format)
            place = self._place(wanted, image.schema, odd[0])
            if anchored is None or links is None:
                raise Missing("it is damaged here, and the version it came from was pruned", where=place)
            fresh = {number: np.zeros_like(image.piece(number)) for number in odd}
            for parts in (anchored.stream(self.format).anchor, *(link.parts for link in links)):
                for change in self._decoded(parts, image.schema):
                    if change.piece in fresh:
                        delta.apply(fresh[change.piece], change.content, image.schema.pieces[change.piece].kind)
            for number, bits in fresh.items():
                if digest(bits) != image.hashes[number]:
                    raise Corrupt(
                        "it does not have the published hash", where=self._place(wanted, image.schema, number)
                    )
                image.piece(number)[...] = bits
        self._torn = set()

    def _differing(self, image: Image, pieces: Iterable[int]) -> list[int]:
        """Those whose bits do not have the hash that they should have."""
        pieces = list(pieces)
        with ThreadPoolExecutor(self._threads) as pool:
            found = pool.map(lambda number: digest(image.piece(number)), pieces)
            return [number for number, hash in zip(pieces, found, strict=True) if hash != image.hashes[number]]

    def _decoded(self, parts: Sequence[Part], schema: Schema) -> Iterator[Change]:
        """The changes of objects, which are fetched and decoded a few at a time."""

        def read(part: Part) -> list[Change]:
            where = f"object {object_key(self._history.run, part)}"
            try:
                raw = read_part(self._store, self._history.run, part)
            except Missing:
                raise Corrupt("a version needs it and it is not there", where=where) from None
            return delta.decode(raw, schema, where=where)

        with ThreadPoolExecutor(self._threads) as pool:
            for at in range(0, len(parts), self._threads):
                batch = parts[at : at + self._threads]
                self._fetched += sum(part.nbytes for part in batch)
                for changes in pool.map(read, batch):
                    yield from changes

    def _schema(self, part: Part) -> Schema:
        where = f"schema {object_key(self._history.run, part)}"
        self._fetched += part.nbytes
        return Schema.decode(read_part(self._store, self._history.run, part), where)

    def _place(self, version: Version, schema: Schema, piece: int) -> str:
        return f"{self.format} of version {version.number}, tensor {schema.pieces[piece].tensor}"


def _inverses(contents: Sequence[Changes | Dense | Whole], kind: ElementType) -> list[Changes | Dense | Whole]:
    """What takes them back, last first."""
    return [delta.invert(content, kind) for content in reversed(contents)]


def _positions(schema: Schema, contents: Contents) -> dict[str, Positions] | None:
    """Which elements of each tensor changed; None where some came whole or most of them changed."""
    found: dict[str, list[Positions]] = {}
    for number in sorted(contents):
        piece = schema.pieces[number]
        positions = [c.positions for c in contents[number] if isinstance(c, Changes)]
        if len(positions) < len(contents[number]):
            return None
        joined = positions[0] if len(positions) == 1 else np.unique(np.concatenate(positions))
        found.setdefault(piece.tensor, []).append(joined + piece.start)
    return {tensor: np.concatenate(parts) for tensor, parts in found.items()}
