"""The program inside a sandbox: takes requests over one socket, runs commands, kills what must die.

It runs alone in an isolated interpreter (``python3 -I -S``), so it imports only cheap built-in modules, and the host
imports it for the wire format. It is undumpable: commands run as the same user, but can neither open its descriptors nor
read its memory. As process 1 of a bubblewrap box no signal from inside reaches it, and its end is the end of the box.

    message = u32 length of payload | u8 kind | payload
    files   = (u32 length of name | u32 length of content | name | content)*
"""

# ruff: noqa: SIM105  (contextlib takes 3 ms to import)
from __future__ import annotations

import os
import select
import struct
import sys
import time
from collections.abc import Iterable, Iterator

HEAD = struct.Struct("<IB")
EXEC = struct.Struct("<dQ")
DONE = struct.Struct("<idB")
FILE = struct.Struct("<II")
MAX_MESSAGE = 1 << 30

READY, OK, FAILED, LIMIT = range(4)
RUN, WRITE, READ = range(16, 19)
ENDED, TIME, OUTPUT = range(3)

SOCKET = 0
BASH = "/bin/bash"
SKIP_DIRECTORIES = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
SKIP_SUFFIXES = (".pyc", ".pyo")
MAX_FILES = 1 << 14
SIGKILL, SIGSTOP, SIGPIPE, SIGXFSZ = 9, 19, 13, 25
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
KILL_SECONDS = 10.0


def pack_files(files: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(FILE.pack(len(name), len(data)) + name + data for name, data in files)


def unpack_files(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Raises ValueError where a length points outside the payload."""
    at = 0
    while at < len(payload):
        if at + FILE.size > len(payload):
            raise ValueError("a file's header is cut")
        names, size = FILE.unpack_from(payload, at)
        at += FILE.size
        if at + names + size > len(payload):
            raise ValueError("a file's content is cut")
        yield payload[at : at + names], payload[at + names : at + names + size]
        at += names + size


def main() -> None:
    """argv: working tree, file size, processes, address space (bytes, 0 = no limit), folder to remove at the end or ''."""
    tree, file_size, processes, memory, scratch = sys.argv[1:]
    os.closerange(3, 1024)
    _protect()
    _limit(int(file_size), int(processes), int(memory))
    os.chdir(tree)
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    _send(READY, b"")
    try:
        while True:
            _wait_for_request()
            kind, payload = _receive()
            os.fchdir(root)
            try:
                _send(*_answer(kind, payload, root))
            except OSError as error:
                _send(FAILED, f"{error.strerror or error}".encode())
    except EOFError:
        pass
    if os.getpid() != 1:
        kill_everything()
        if scratch:
            os.waitpid(os.posix_spawn("/bin/rm", ["rm", "-rf", "--", scratch], os.environ), 0)
    os._exit(0)


def _answer(kind: int, payload: bytes, root: int) -> tuple[int, bytes]:
    if kind == RUN:
        seconds, limit = EXEC.unpack_from(payload)
        return _run(payload[EXEC.size :], seconds, limit)
    if kind == WRITE:
        for name, data in unpack_files(payload):
            _write(name, data)
        return OK, b""
    (limit,) = struct.unpack("<Q", payload)
    try:
        return OK, pack_files(_walk(root, b"", [limit, MAX_FILES]))
    except OverflowError as error:
        return LIMIT, str(error).encode()


def _run(command: bytes, seconds: float, limit: int) -> tuple[int, bytes]:
    """One command in its own session. The shell's end is the command's end, whoever still holds the pipe."""
    start = time.monotonic()
    reader, writer = os.pipe()
    null = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    outputs = [(os.POSIX_SPAWN_DUP2, writer, fd) for fd in (1, 2)]
    try:
        shell = os.posix_spawn(
            BASH,
            [b"bash", b"-c", command],
            os.environ,
            file_actions=[null, *outputs],
            setsid=True,
            setsigdef=(SIGPIPE, SIGXFSZ),
        )
    except BlockingIOError:
        kill_everything()
        return LIMIT, b"processes: no command can be started any more"
    except MemoryError:
        return LIMIT, b"memory: no command can be started any more"
    except (OSError, ValueError) as error:
        return OK, DONE.pack(126, 0.0, ENDED) + f"bash: {error}\n".encode()
    finally:
        os.close(writer)
    try:
        output, code, why = _follow(shell, reader, start + seconds, limit)
    finally:
        os.close(reader)
    return OK, DONE.pack(code, time.monotonic() - start, why) + output


def _follow(shell: int, reader: int, deadline: float, limit: int) -> tuple[bytes, int, int]:
    """Output, exit code and why it was stopped."""
    output = bytearray()
    ended = os.pidfd_open(shell)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(ended, select.POLLIN)
    poll.register(SOCKET, select.POLLRDHUP)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return _stop(output, limit, 124, TIME)
            ready = {fd for fd, _ in poll.poll(left * 1000 + 1)}
            if SOCKET in ready:
                raise EOFError
            if reader in ready:
                piece = os.read(reader, 1 << 16)
                output += piece
                if len(output) > limit:
                    return _stop(output, limit, 125, OUTPUT)
                if not piece:
                    poll.unregister(reader)
                    reader = -1
            if ended in ready:
                break
    finally:
        os.close(ended)
    if reader != -1:
        os.set_blocking(reader, False)
        try:
            output += os.read(reader, 1 << 16)
        except BlockingIOError:
            pass
    code = os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1])
    if len(output) > limit:
        return _stop(output, limit, 125, OUTPUT)
    return bytes(output), code if code >= 0 else 128 - code, ENDED


def _stop(output: bytearray, limit: int, code: int, why: int) -> tuple[bytes, int, int]:
    kill_everything()
    return bytes(output[:limit]), code, why


def kill_everything() -> None:
    """SIGKILL to everything that commands started, also what left its parent and its session; returns when it is gone."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        if os.getpid() == 1:
            victims = [-1]
        else:
            victims = _descendants()
            for pid in victims:
                _signal(pid, SIGSTOP)
            if set(_descendants()) - set(victims):
                continue
        for pid in victims:
            _signal(pid, SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
    os._exit(1)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _descendants() -> list[int]:
    """Living processes below this one; orphans come back to it, because it is their subreaper."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
    found: list[int] = []
    front = {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found += front
    return found


def _walk(folder: int, prefix: bytes, left: list[int]) -> Iterator[tuple[bytes, bytes]]:
    """Regular files below a directory descriptor, in order of name, no symlink followed. ``left``: bytes, files."""
    for name in sorted(os.listdir(folder)):
        raw = os.fsencode(name)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            continue
        try:
            mode = os.fstat(fd).st_mode >> 12
            if mode == 0o04 and name not in SKIP_DIRECTORIES:
                yield from _walk(fd, prefix + raw + b"/", left)
            elif mode == 0o10 and not name.endswith(SKIP_SUFFIXES):
                left[0] -= os.fstat(fd).st_size
                left[1] -= 1
                if min(left) < 0:
                    raise OverflowError("the working tree holds more than can be read")
                with open(fd, "rb", closefd=False) as file:
                    yield prefix + raw, file.read(os.fstat(fd).st_size)
        finally:
            os.close(fd)


def _write(name: bytes, data: bytes) -> None:
    folder = os.path.dirname(name)
    if folder:
        os.makedirs(folder, exist_ok=True)
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as file:
        file.write(data)


def _wait_for_request() -> None:
    """Sleep until the host speaks; bury orphans meanwhile, for a dead process that nobody buries still counts."""
    poll = select.poll()
    poll.register(SOCKET, select.POLLIN)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            pause = 1000
        except ChildProcessError:
            pause = -1
        if poll.poll(pause):
            return


def _receive() -> tuple[int, bytes]:
    size, kind = HEAD.unpack(_exactly(HEAD.size))
    return kind, _exactly(size)


def _exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(SOCKET, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _send(kind: int, payload: bytes) -> None:
    view = memoryview(HEAD.pack(len(payload), kind) + payload)
    while view:
        view = view[os.write(SOCKET, view) :]


def _protect() -> None:
    """Shut this process's memory and descriptors to its own user, and become the parent of every orphan.

    ``_ctypes`` is the quick half of ctypes; the whole package takes 5 ms to import.
    """
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if _ctypes.call_function(prctl, (option, value, 0, 0, 0)) != 0:
            raise OSError(f"prctl {option} failed")


def _limit(file_size: int, processes: int, memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for kind, value in (
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, memory),
    ):
        if value:
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
