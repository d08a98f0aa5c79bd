"""A run's versions as a reader finds them: the newest, any other by strides over ancestors, and the ways between two."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from farflung.core.errors import Corrupt
from farflung.weights.manifest import (
    Gone,
    Manifest,
    Part,
    Ref,
    Seal,
    Stream,
    decode_pointer,
    jump_key,
    pointer_key,
    read_jump,
    read_manifest,
)
from farflung.weights.store import Missing, Store, check_name

log = logging.getLogger(__name__)

CACHED = 512

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Version:
    """A manifest and its name."""

    ref: Ref
    manifest: Manifest

    @property
    def number(self) -> int:
        return self.ref.version

    def stream(self, format: str) -> Stream:
        """Raises Missing when the version was not published in this format."""
        if format not in self.manifest.streams:
            there = ", ".join(self.manifest.streams)
            where = f"run {self.manifest.run}, version {self.number}"
            raise Missing(f"it was not published as {format!r}", where=where, mend=f"published formats: {there}")
        return self.manifest.streams[format]


@dataclass(frozen=True, slots=True)
class Link:
    """Objects that lead from root ``before`` (version ``start``) to ``root`` (version ``stop``) under a schema; ``small``: the
    same in fewer bytes."""

    start: int
    stop: int
    before: str
    root: str
    schema: Part
    parts: tuple[Part, ...]
    small: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def jumps(self) -> bool:
        return self.stop - self.start > 1


class Detour:
    """A second try over single deltas in their plain form, where a jump or a delta in fewer bytes may be what is wrong.

    ``plain``: this is the second try. ``met``: what was wrong in the first.
    """

    def __init__(self, history: History) -> None:
        self.plain = False
        self.met: Corrupt | None = None
        self._history = history
        self._blamed = False

    def links(self, start: int, stop: Version, format: str) -> list[Link] | None:
        """As ``History.links``, in the second try without jumps."""
        return self._history.links(start, stop, format, jumps=not self.plain)

    @contextmanager
    def blaming(self, shortcut: bool) -> Iterator[None]:
        """What is corrupt in here may be a shortcut's fault."""
        try:
            yield
        except Corrupt:
            self._blamed |= shortcut
            raise

    def tried(self, work: Callable[[], Result]) -> Result:
        """Do it, and once more if a shortcut is to blame. What then is missing was wrong: that is what is raised."""
        try:
            return self._history.afresh(work)
        except Corrupt as error:
            if not self._blamed:
                raise
            self.plain, self.met = True, error
            log.warning("tried again over single deltas: %s", str(error))
        try:
            return self._history.afresh(work)
        except Missing:
            raise self.met from None


class History:
    """Reads one run. Safe for several threads."""

    def __init__(self, store: Store, run: str, seal: Seal) -> None:
        self.store = store
        self.run = check_name(run, "run")
        self.seal = seal
        self._newest: Version | None = None
        self._known: OrderedDict[Ref, Version] = OrderedDict()
        self._looking = threading.Lock()
        self._caching = threading.Lock()

    def newest(self) -> Version | None:
        """What the pointer names, None before the first version.

        Raises Corrupt for a pointer that cannot be read, names no manifest, or went back.
        """
        with self._looking:
            raw = self.store.read_pointer(pointer_key(self.run))
            where = f"pointer {pointer_key(self.run)}"
            known = self._newest
            if raw is None:
                if known is not None:
                    raise Corrupt(f"it went back from version {known.number} to nothing", where=where)
                return None
            ref = decode_pointer(raw, where)
            if known is not None and ref != known.ref and ref.version <= known.number:
                what = (
                    f"it went back from version {known.number} to {'another ' * (ref.version == known.number)}version"
                )
                raise Corrupt(f"{what} {ref.version}", where=where)
            if known is None or ref != known.ref:
                try:
                    self._newest = self.read(ref)
                except Missing:
                    what = f"it names version {ref.version}, whose manifest is not there"
                    raise Corrupt(what, where=where) from None
            return self._newest

    def read(self, ref: Ref) -> Version:
        """A version by its name. Raises Missing, Corrupt."""
        with self._caching:
            if (known := self._known.get(ref)) is not None:
                self._known.move_to_end(ref)
                return known
        version = Version(ref, read_manifest(self.store, self.run, ref, self.seal))
        self.know(version)
        return version

    def advance(self, version: Version) -> None:
        """This process made the version the newest: from now on no older one is."""
        self.know(version)
        with self._looking:
            if self._newest is None or self._newest.number < version.number:
                self._newest = version

    def know(self, version: Version) -> None:
        """Keep a version, so that it is not read from the store."""
        with self._caching:
            self._known[version.ref] = version
            while len(self._known) > CACHED:
                self._known.popitem(last=False)

    def afresh(self, work: Callable[[], Result]) -> Result:
        """Do it, and once more if an object was gone: versions that are known here may have been pruned since."""
        try:
            return work()
        except Gone:
            self.forget()
            return work()

    def forget(self) -> None:
        """Read versions from the store again, as far as they are still there."""
        with self._caching:
            self._known.clear()

    def find(self, number: int) -> Version:
        """A version by its number. Raises Missing when it is not published yet or was pruned."""
        newest = self.newest()
        if newest is None or not 0 <= number <= newest.number:
            state = "nothing is published yet" if newest is None else f"the newest is {newest.number}"
            raise Missing(f"version {number} does not exist; {state}", where=f"run {self.run}")
        return self.earlier(number, newest)

    def earlier(self, number: int, newest: Version) -> Version:
        """A version by its number and one that is not before it. Raises Missing when it was pruned."""
        try:
            return newest if newest.number == number else self.read(self.ref(number, newest))
        except Missing:
            raise Missing(f"version {number} was pruned", where=f"run {self.run}") from None

    def back(self, version: Version) -> Iterator[Version]:
        """This version and every one before it that is left, newest first. Raises Corrupt."""
        yield version
        while version.manifest.ancestors:
            try:
                version = self.read(version.manifest.ancestors[0])
            except Missing:
                return
            yield version

    def ref(self, number: int, version: Version) -> Ref:
        """The name of an earlier version. Raises Missing when what leads to it was pruned."""
        while True:
            steps = [*version.manifest.ancestors, version.manifest.anchored]
            nearest = min((r for r in steps if r is not None and r.version >= number), key=lambda ref: ref.version)
            if nearest.version == number:
                return nearest
            version = self.read(nearest)

    def anchored(self, version: Version, format: str) -> Version | None:
        """The newest version up to this one that is stored whole in the format, None if that was pruned."""
        while not version.stream(format).anchor:
            ref = version.manifest.anchored
            if ref is None:
                return None
            try:
                version = self.read(ref)
            except Missing:
                return None
            if format not in version.manifest.streams:
                return None
        return version

    def links(self, start: int, stop: Version, format: str, *, jumps: bool = True) -> list[Link] | None:
        """The way from version ``start`` up to ``stop``, over the widest jumps there are; None when there is none left.

        A jump that does not read or does not fit its versions is said and passed over.
        Raises Corrupt when a single delta does not fit.
        """
        links: list[Link] = []
        while stop.number > start:
            if stop.stream(format).before is None:
                return None
            found = (self._jump(start, stop, format) if jumps else None) or self._step(stop, format)
            if found is None:
                return None
            link, stop = found
            links.append(link)
        return links[::-1]

    def _jump(self, start: int, stop: Version, format: str) -> tuple[Link, Version] | None:
        """The widest jump to a version that goes not below ``start``, and the version that it starts from."""
        here = stop.stream(format)
        for ref in stop.manifest.ancestors[:0:-1]:
            if ref.version < start:
                continue
            span = stop.number - ref.version
            where = f"jump {jump_key(self.run, format, stop.number, span)}"
            try:
                jump = read_jump(self.store, self.run, format, stop.number, span, self.seal)
                if jump is None:
                    continue
                if jump.root != here.root:
                    raise Corrupt("it leads to other weights than its version's", where=where)
                first = self.read(ref)
                before = first.manifest.streams.get(format)
                if before is not None and before.root != jump.before:
                    raise Corrupt(f"it starts at other weights than those of version {ref.version}", where=where)
            except Missing:
                continue
            except Corrupt as error:
                log.warning("passed over, for a way that is longer: %s", str(error))
                continue
            if before is not None:
                return Link(ref.version, stop.number, jump.before, jump.root, here.schema, jump.delta), first
        return None

    def _step(self, stop: Version, format: str) -> tuple[Link, Version] | None:
        """A version's own delta, and the version before it; None when that was pruned or lacks the format."""
        here, ref = stop.stream(format), stop.manifest.ancestors[0]
        try:
            first = self.read(ref)
        except Missing:
            return None
        before = first.manifest.streams.get(format)
        if here.before is None or before is None:
            return None
        if before.root != here.before:
            where = f"run {self.run}, {format}"
            raise Corrupt(f"the way to version {stop.number} starts at another version {ref.version}", where=where)
        return Link(ref.version, stop.number, here.before, here.root, here.schema, here.delta, here.small), first
