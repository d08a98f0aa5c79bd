"""A sandbox seen from the host: a child process that runs ``inside.py`` behind a socket, whatever isolates it.

Nothing that comes out of the box is trusted: lengths are bounded before they are read, every read has a deadline, and
names are checked. After any error in the conversation the box is killed, for it may be out of step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farflung.core.errors import BadInput
from farflung.sandboxes import inside
from farflung.sandboxes.base import CommandResult, SandboxDied, SandboxError
from farflung.sandboxes.limits import Group

GRACE_SECONDS = 10.0
TRANSFER_SECONDS = 20.0
CLOSE_SECONDS = 3.0
LOG_BYTES = 2000
JOIN = 'for file in $1; do echo 0 > "$file" || exit 125; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start one box. ``unkillable``: nothing inside can kill the program inside, except its limits."""

    argv: Sequence[str]
    env: Mapping[str, str]
    unkillable: bool
    pass_fds: tuple[int, ...] = ()
    user: int | None = None
    group: Group | None = None
    scratch: Path | None = None


class Box:
    """An open sandbox; satisfies ``Sandbox``. Calls are made one at a time."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], channel: socket.socket, log: int) -> None:
        self._plan, self._process, self._channel, self._log = plan, process, channel, log
        self._lock = asyncio.Lock()
        self._commands = 0
        self._closed = False

    @staticmethod
    async def start(plan: Plan, files: Mapping[str, str], seconds: float) -> Box:
        """Raises SandboxError when the box is not ready, files included, within ``seconds``."""
        host, guest = socket.socketpair()
        host.setblocking(False)
        log = os.memfd_create("farflung-log", os.MFD_CLOEXEC)
        argv = list(plan.argv)
        if plan.group is not None:
            joins = " ".join(str(folder / "cgroup.procs") for folder in plan.group.folders)
            argv = ["/bin/sh", "-c", JOIN, "sh", joins, *argv]
        try:
            with guest:
                process = subprocess.Popen(
                    argv, stdin=guest.fileno(), stdout=log, stderr=log, env=dict(plan.env), pass_fds=plan.pass_fds,
                    user=plan.user, group=plan.user, extra_groups=None if plan.user is None else [],
                )  # fmt: skip
        except OSError as error:
            host.close()
            os.close(log)
            await _sweep(plan)
            raise SandboxError(f"cannot start {plan.argv[0]}: {error.strerror}", where="sandbox") from None
        box = Box(plan, process, host, log)
        try:
            async with asyncio.timeout(seconds):
                kind, _ = await box._receive(0)
                if kind != inside.READY:
                    raise SandboxError("the program inside did not report", where="sandbox")
                await box.write(files)
        except TimeoutError:
            said = box._said()
            await box.close()
            raise SandboxError(f"not ready after {seconds:g} s{said}", where="sandbox") from None
        except BaseException:
            await box.close()
            raise
        return box

    async def exec(self, command: str, *, seconds: float, max_bytes: int) -> CommandResult:
        async with self._conversation(seconds + GRACE_SECONDS):
            self._commands += 1
            header = inside.EXEC.pack(seconds, max_bytes)
            await self._send(inside.RUN, header + command.encode("utf-8", "replace"))
            reply = await self._reply(max_bytes + inside.DONE.size)
            if len(reply) < inside.DONE.size:
                raise self._broken("it sent half a result")
            code, took, why = inside.DONE.unpack_from(reply)
        output = reply[inside.DONE.size :].decode("utf-8", "replace")
        killed = {inside.TIME: "time", inside.OUTPUT: "output"}.get(why)
        return CommandResult(code, output, took, killed)  # type: ignore[arg-type]

    async def write(self, files: Mapping[str, str]) -> None:
        for name in files:
            check_path(name)
        payload = inside.pack_files((name.encode(), text.encode()) for name, text in files.items())
        async with self._conversation(TRANSFER_SECONDS):
            await self._send(inside.WRITE, payload)
            await self._reply(0)

    async def read_tree(self, *, max_bytes: int = 4 << 20) -> dict[str, bytes]:
        async with self._conversation(TRANSFER_SECONDS):
            await self._send(inside.READ, struct.pack("<Q", max_bytes))
            reply = await self._reply(max_bytes + inside.MAX_FILES * (inside.FILE.size + 4096))
            try:
                pairs = list(inside.unpack_files(reply))
            except ValueError as error:
                raise self._broken(str(error)) from None
        tree = {}
        for raw, data in pairs:
            with contextlib.suppress(UnicodeDecodeError, BadInput):
                tree[check_path(raw.decode())] = data
        return tree

    async def close(self) -> None:
        """The program inside ends when its socket shuts, and everything inside with it; what does not is killed."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        try:
            if not await self._exited(CLOSE_SECONDS):
                self._process.kill()
                await self._exited(CLOSE_SECONDS)
        finally:
            os.close(self._log)
            await _sweep(self._plan)

    async def _exited(self, seconds: float) -> bool:
        """Whether the box's process ends within ``seconds``."""
        if self._process.poll() is not None:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handle = os.pidfd_open(self._process.pid)
        loop.add_reader(handle, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self._process.poll() is not None

    @contextlib.asynccontextmanager
    async def _conversation(self, seconds: float) -> AsyncIterator[None]:
        """One request and its reply within ``seconds``; whatever else happens ends the box."""
        async with self._lock:
            if self._closed:
                raise SandboxError("it is closed", where="sandbox")
            try:
                async with asyncio.timeout(seconds):
                    yield
            except TimeoutError:
                error = self._broken(f"it did not answer within {seconds:g} s")
                await self._end()
                raise error from None
            except BaseException:
                await self._end()
                raise

    async def _send(self, kind: int, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._channel, inside.HEAD.pack(len(payload), kind) + payload)
        except OSError:
            raise self._broken("it ended") from None

    async def _reply(self, limit: int) -> bytes:
        kind, payload = await self._receive(max(limit, LOG_BYTES))
        if kind == inside.LIMIT:
            raise SandboxDied(payload.decode("utf-8", "replace"))
        if kind == inside.FAILED:
            text = payload.decode("utf-8", "replace")
            raise SandboxDied(text) if self._commands else SandboxError(text, where="sandbox")
        if kind != inside.OK:
            raise self._broken(f"it sent a message of kind {kind}")
        return payload

    async def _receive(self, limit: int) -> tuple[int, bytes]:
        size, kind = inside.HEAD.unpack(await self._exactly(inside.HEAD.size))
        if size > limit:
            raise self._broken(f"it announced {size} bytes where {limit} are the most")
        return kind, await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size:
            try:
                piece = await loop.sock_recv(self._channel, min(size - len(data), 1 << 18))
            except OSError:
                piece = b""
            if not piece:
                raise self._broken("it ended")
            data += piece
        return bytes(data)

    def _broken(self, what: str) -> SandboxDied | SandboxError:
        """Who broke it? The policy, if its limits are used up, or if what ran inside was able to; else the machinery."""
        limit = self._plan.group.used_up() if self._plan.group is not None else None
        if limit is not None:
            return SandboxDied(f"{limit} used up: {what}")
        if self._commands and not (self._plan.unkillable and self._plan.group is not None):
            return SandboxDied(what)
        return SandboxError(f"{what}{self._said()}", where="sandbox")

    def _said(self) -> str:
        text = os.pread(self._log, LOG_BYTES, 0).decode("utf-8", "replace").strip()
        return f": {text}" if text else ""


def check_path(name: str) -> str:
    """A path inside a tree: relative, no '..', no empty part, not .git, printable. Raises BadInput."""
    path = PurePosixPath(name)
    if (
        not name
        or path.is_absolute()
        or str(path) != name
        or name == "."
        or {"..", ".git"} & set(path.parts)
        or not name.isprintable()
        or len(name.encode()) > 1024
    ):
        raise BadInput(f"{name!r} is not a path inside the working tree", where="sandbox")
    return name


async def _sweep(plan: Plan) -> None:
    """Free what the box had outside itself."""
    if plan.group is not None:
        for _ in range(100):
            if plan.group.remove():
                break
            plan.group.kill()
            await asyncio.sleep(0.01)
    if plan.scratch is not None:
        shutil.rmtree(plan.scratch, ignore_errors=True)
