"""What may be removed: nothing that a live subscriber or a joiner needs, on any machine, whatever its clock says.

A subscriber with a name writes the version that it holds to ``RUN/leases/NAME`` and writes it again every minute. How old
a lease is, the store's own clock says.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farflung.core.errors import BadInput, Corrupt
from farflung.weights.history import History, Version
from farflung.weights.manifest import Ref, jump_of, manifest_ref, object_key, pointer_key, read_jump
from farflung.weights.pointer import moved_back
from farflung.weights.store import Missing, Store, StoreError, check_name
from farflung.weights.strict import count, loads, need

log = logging.getLogger(__name__)

_LEASE = re.compile(r"leases/([^/]+)")

RENEW_SECONDS = 60.0
LIVE_SECONDS = 600.0
"""How long a lease that nobody renews still counts."""
ORPHAN_SECONDS = 6 * 3600.0
"""How old an object must be that nothing names: longer than a publisher needs from its first object to its manifest."""


class Lease:
    """One subscriber's word about what it holds. For the thread that fetches and the one that looks.

    It is advice: where it cannot be written (a store to read from alone, no network) that is counted in ``failures``, said
    once for each kind of trouble, and tried again a minute later; nothing else fails for it.
    """

    def __init__(self, store: Store, run: str, name: str) -> None:
        self._store = store
        self._key = f"{run}/leases/{check_name(name, 'subscriber')}"
        self._wanted: int | None = None
        self._version: int | None = None
        self._tried = 0.0
        self._failing = False
        self._said: set[type[Exception]] = set()
        self.failures = 0

    def hold(self, version: int) -> None:
        self._wanted = version
        if version != self._version and not self._failing:
            self._write(version)
        else:
            self.renew()

    def renew(self) -> None:
        version = self._wanted
        if version is not None and time.monotonic() - self._tried > RENEW_SECONDS:
            self._write(version)

    def _write(self, version: int) -> None:
        self._tried = time.monotonic()
        try:
            self._store.write_note(self._key, json.dumps({"version": version}).encode())
        except (StoreError, BadInput) as error:
            self.failures += 1
            self._failing = True
            if type(error) not in self._said:
                log.warning("what is held cannot be told to the store, so it may be pruned: %s", str(error))
            self._said.add(type(error))
        else:
            self._version, self._failing = version, False


@dataclass(frozen=True, slots=True)
class Removed:
    """How many keys of each kind a pruning took away; ``floor`` is the oldest version that is left."""

    floor: int
    versions: int
    jumps: int
    objects: int
    leases: int


def held(store: Store, run: str, live_seconds: float = LIVE_SECONDS) -> dict[str, int]:
    """Versions by the names of live subscribers. One whose lease cannot be read may hold anything, so it counts as 0."""
    found: dict[str, int] = {}
    for key, age in store.ages(f"{run}/leases").items():
        if age > live_seconds:
            continue
        try:
            raw = store.read_pointer(key)
            version = None if raw is None else decode_lease(raw, f"lease {key}")
        except Corrupt as error:
            log.warning("nothing is removed for as long as this may be a live subscriber's: %s", str(error))
            version = 0
        if version is not None:
            found[key.rsplit("/", 1)[1]] = version
    return found


def decode_lease(raw: bytes, where: str) -> int:
    """The version that is held. Raises Corrupt."""
    try:
        data = loads(raw)
        need(set(data) == {"version"}, f"its fields are {sorted(data)}")
        return count(data["version"])
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not a lease: {error}", where=where, mend="remove it") from None


def prune(
    history: History,
    keep: int,
    *,
    live_seconds: float = LIVE_SECONDS,
    orphan_seconds: float = ORPHAN_SECONDS,
    dry_run: bool = False,
) -> Removed:
    """Remove old versions; the newest ``keep``, and all that live subscribers hold, can still be reached and joined.

    So can versions younger than ``live_seconds``, for readers without a lease. Everything from the newest version at or below
    those that is stored whole in all its formats stays. Manifests go before their objects, oldest first, so that a pruning
    that is cut off leaves nothing half readable. Objects of what was removed go once they are older than ``live_seconds``,
    unless they were put again since. Those that nothing names, of a publisher that died or is at work, go once they are
    older than ``orphan_seconds``. ``dry_run``: only say what would go. Raises Corrupt, and removes nothing, where a version
    between others is lost or the pointer went back.
    """
    if keep < 1:
        raise BadInput(f"cannot keep {keep} versions", where=f"run {history.run}", mend="keep at least 1")
    store, run = history.store, history.run
    # What is there is listed before it is read what is needed: whatever comes to be needed later is not in the list.
    names = store.ages(run)
    live = held(store, run, live_seconds)
    history.forget()
    newest = history.newest()
    if (right := moved_back(history, names, None if newest is None else newest.ref)) is not None:
        what = f"it was moved: version {right.number} is there, which it does not lead to; nothing is removed"
        raise Corrupt(
            what, where=f"pointer {pointer_key(run)}", mend="farflung weights verify says what to write to it"
        )
    if newest is None:
        return Removed(0, 0, 0, 0, 0)
    manifests = {key: ref for key in names if (ref := manifest_ref(run, key)) is not None}
    young = [ref.version for key, ref in manifests.items() if names[key] <= live_seconds]
    lowest = min([max(0, newest.number - keep + 1), *live.values(), *young])
    floor, kept = newest.number, set[str]()
    for version in history.back(newest):
        floor = version.number
        kept |= set(object_keys(run, version))
        if floor <= lowest and _joins_all(version, newest):
            break
    else:
        lost = [key for key, ref in manifests.items() if ref.version < floor and store.exists(key)]
        if lost:  # what the newest version starts from may be among them
            what = (
                f"the version before version {floor} is not there, but {len(lost)} older ones are: nothing is removed"
            )
            raise Corrupt(what, where=f"run {run}", mend="farflung weights verify names what to bring back")
    gone = Counter[str]()
    let_go: dict[str, float] = {}

    def remove(key: str, kind: str) -> None:
        gone[kind] += 1
        if not dry_run:
            store.delete(key)

    def release(key: str, objects: Iterable[str]) -> None:
        """What is about to be removed names these objects."""
        for one in objects:
            let_go[one] = min(names[key], let_go.get(one, names[key]))

    for key in sorted(names):
        name = key.removeprefix(f"{run}/")
        if (ref := manifests.get(key)) is not None and ref.version < floor:
            release(key, _version_objects(history, ref))
            remove(key, "versions")
        elif (jump := jump_of(run, key)) is not None:
            format, number, span = jump
            objects = _jump_objects(history, format, number, span)
            if objects is None or number - span < floor:
                release(key, objects or ())
                remove(key, "jumps")
            else:
                kept |= objects
        elif (found := _LEASE.fullmatch(name)) and found[1] not in live and names[key] > live_seconds:
            remove(key, "leases")
    prefix = f"{run}/objects/"
    doomed = [
        key
        for key, age in names.items()
        # An object that is younger than what named it was put again, by a publisher that may be about to name it.
        if key.startswith(prefix)
        and key not in kept
        and age > (live_seconds if age >= let_go.get(key, float("inf")) else orphan_seconds)
    ]
    now = store.ages(f"{run}/objects") if doomed else {}
    for key in doomed:
        if now.get(key, -1.0) >= names[key]:
            remove(key, "objects")
    return Removed(floor, gone["versions"], gone["jumps"], gone["objects"], gone["leases"])


def _joins_all(version: Version, newest: Version) -> bool:
    """Whether every format of the newest version can be joined from this one."""
    streams = version.manifest.streams
    return all(format in streams and streams[format].anchor for format in newest.manifest.streams)


def object_keys(run: str, version: Version) -> Iterator[str]:
    """The keys of all objects that a version names."""
    for stream in version.manifest.streams.values():
        for part in (stream.schema, *stream.delta, *stream.anchor, *stream.small):
            yield object_key(run, part)


def _version_objects(history: History, ref: Ref) -> set[str]:
    """Of a version that goes; none where it cannot be read, so that they go as what nothing names."""
    try:
        return set(object_keys(history.run, history.read(ref)))
    except (Missing, Corrupt):
        return set()


def _jump_objects(history: History, format: str, number: int, span: int) -> set[str] | None:
    """None for a jump that nobody can read: it helps no one, and a compactor makes it again."""
    try:
        jump = read_jump(history.store, history.run, format, number, span, history.seal)
    except Corrupt as error:
        log.warning("%s", str(error))
        return None
    return set() if jump is None else {object_key(history.run, part) for part in jump.delta}
