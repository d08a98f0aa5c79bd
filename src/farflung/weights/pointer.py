"""Whether a run's pointer stands where it should: versions that were published are named by what came after them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from farflung.core.errors import Corrupt
from farflung.weights.history import History, Version
from farflung.weights.manifest import Jump, Ref, jump_of, manifest_ref, read_jump
from farflung.weights.store import Missing


def moved_back(history: History, keys: Iterable[str], pointer: Ref | None) -> Version | None:
    """The version that the pointer should name, where these keys show that it was moved; None where they do not.

    ``keys`` were listed before the pointer was read; ``pointer`` is None where it is missing or cannot be read. A manifest
    above it may be a publisher's who died, or is at work. But a manifest names the versions before it, and a jump leads to
    one, only after the pointer has stood there. Of several manifests of one version, as publishers at odds leave them, the
    one counts that was published.
    """
    keys = list(keys)
    least = -1 if pointer is None else pointer.version
    versions = _versions(history, keys, least)
    named = {ref for version in versions for ref in _before(version)}
    led = _led_to(versions, _jumps(history, keys, least))
    published = named | {refs[0] for refs in led.values() if len(refs) == 1}
    if not any(number > least for number in led) and not any(_beyond(ref, pointer) for ref in published):
        return None
    others = [version for version in versions if version.ref != pointer]
    for number in sorted({version.number for version in others}, reverse=True):
        same = [version for version in others if version.number == number]
        if len(same) > 1 or number == least:
            same = [version for version in same if version.ref in published]
        if len(same) == 1:
            return same[0]
    return max(others, key=lambda version: version.number)


def _beyond(ref: Ref, pointer: Ref | None) -> bool:
    """Whether a pointer that has stood at ``ref`` cannot rightly stand at ``pointer``."""
    return pointer is None or ref.version > pointer.version or (ref.version == pointer.version and ref != pointer)


def _before(version: Version) -> list[Ref]:
    return [ref for ref in (*version.manifest.ancestors, version.manifest.anchored) if ref is not None]


def _versions(history: History, keys: Sequence[str], least: int) -> list[Version]:
    """Those from ``least`` on that can be read."""
    found = []
    for key in keys:
        ref = manifest_ref(history.run, key)
        if ref is not None and ref.version >= least:
            try:
                found.append(history.read(ref))
            except (Missing, Corrupt):
                continue
    return found


def _jumps(history: History, keys: Sequence[str], least: int) -> Mapping[int, list[Jump]]:
    """Those to versions from ``least`` on that can be read, by version."""
    found: dict[int, list[Jump]] = defaultdict(list)
    for key in keys:
        named = jump_of(history.run, key)
        if named is not None and named[1] >= least:
            try:
                jump = read_jump(history.store, history.run, *named, history.seal)
            except Corrupt:
                continue
            if jump is not None:
                found[jump.version].append(jump)
    return found


def _led_to(versions: Sequence[Version], jumps: Mapping[int, Sequence[Jump]]) -> dict[int, list[Ref]]:
    """By number, the versions to which all its jumps lead; no entry where there is none."""
    led: dict[int, list[Ref]] = defaultdict(list)
    for version in versions:
        streams, leading = version.manifest.streams, jumps.get(version.number, ())
        if leading and all(j.format in streams and streams[j.format].root == j.root for j in leading):
            led[version.number].append(version.ref)
    return led
