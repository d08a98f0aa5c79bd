"""Memory and process limits of a sandbox through control groups (version 1 or 2), where they can be written."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "farflung-"
OVERHEAD_BYTES = 16 << 20
OVERHEAD_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's folder in each hierarchy. What starts it joins by writing 0 to every ``cgroup.procs``."""

    folders: tuple[Path, ...]

    def used_up(self) -> str | None:
        """Which limit was reached: the kernel killed something for memory, or refused to start a process."""
        for file, key, what in (
            ("memory.oom_control", "oom_kill", "memory"),
            ("memory.events", "oom_kill", "memory"),
            ("pids.events", "max", "processes"),
        ):
            for folder in self.folders:
                if _counter(folder / file, key):
                    return what
        return None

    def kill(self) -> None:
        """SIGKILL to everything in it, for sandboxes that have no process namespace to die with."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                    if pid > 0:  # 0 stands for a process that our own namespace does not show
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, 9)

    def remove(self) -> bool:
        """False while something in it is still dying."""
        gone = True
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone


class Cgroups:
    """Makes groups below the process's own; ``find`` gives None where it may not."""

    def __init__(self, memory: Path, pids: Path) -> None:
        self._memory, self._pids = memory, pids
        self._count = itertools.count()
        self._owner = f"{os.getpid()}-{_started(os.getpid())}"

    @staticmethod
    def find(mounts: str = "/proc/self/mounts", own: str = "/proc/self/cgroup") -> Cgroups | None:
        """The first writable place for both controllers; groups that dead processes left there are removed."""
        v1, v2 = _hierarchies(mounts)
        paths = _paths(own)
        found = []
        for controller in ("memory", "pids"):
            places = [*_v1_places(v1.get(controller), paths.get(controller)), *_v2_places(v2, paths.get(""))]
            place = next((p for p in places if _usable(p)), None)
            if place is None:
                return None
            found.append(place)
        groups = Cgroups(*found)
        groups.sweep()
        return groups

    def make(self, memory_bytes: int, processes: int) -> Group:
        """Raises OSError. The limits leave room for what runs the sandbox itself."""
        name = f"{PREFIX}{self._owner}-{next(self._count)}"
        folders = tuple(dict.fromkeys((self._memory / name, self._pids / name)))
        for folder in folders:
            folder.mkdir()
        memory, pids = folders[0], folders[-1]
        limit = str(memory_bytes + OVERHEAD_BYTES)
        for file, value, needed in (
            (memory / "memory.limit_in_bytes", limit, False),
            (memory / "memory.memsw.limit_in_bytes", limit, False),
            (memory / "memory.max", limit, False),
            (memory / "memory.swap.max", "0", False),
            (pids / "pids.max", str(processes + OVERHEAD_PROCESSES), True),
        ):
            if needed or file.exists():
                file.write_text(value)
        return Group(folders)

    def sweep(self) -> None:
        """Remove empty groups whose owner is dead."""
        for parent in {self._memory, self._pids}:
            for folder in parent.glob(f"{PREFIX}*"):
                pid, started = folder.name.removeprefix(PREFIX).split("-")[:2]
                if _started(int(pid)) != started:
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _started(pid: int) -> str | None:
    """Start time of a living process in ticks since boot, which tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _counter(file: Path, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _hierarchies(mounts: str) -> tuple[dict[str, Path], Path | None]:
    """Mount points: version 1 by controller, and version 2."""
    v1: dict[str, Path] = {}
    v2 = None
    for line in Path(mounts).read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup2":
            v2 = Path(point)
        elif kind == "cgroup":
            v1 |= {name: Path(point) for name in options.split(",") if name in ("memory", "pids")}
    return v1, v2


def _paths(own: str) -> dict[str, str]:
    """This process's group by controller; version 2 has the empty name."""
    paths = {}
    for line in Path(own).read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    return paths


def _v1_places(mount: Path | None, path: str | None) -> Iterator[Path]:
    """The own group, or the mount's root, which is the own group where a container hides what lies above."""
    if mount is not None:
        yield mount / (path or "/").lstrip("/")
        yield mount


def _v2_places(mount: Path | None, path: str | None) -> Iterator[Path]:
    """The own group and those above it that hand both controllers down. A group with processes of its own cannot."""
    if mount is None or path is None or ".." in path:
        return
    place = mount / path.lstrip("/")
    while place.is_relative_to(mount):
        with contextlib.suppress(OSError):
            if {"memory", "pids"} <= set((place / "cgroup.subtree_control").read_text().split()):
                yield place
        place = place.parent


def _usable(place: Path) -> bool:
    """Whether groups can be made here and joined from here."""
    trial = place / f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-trial"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return os.access(place / "cgroup.procs", os.W_OK)
