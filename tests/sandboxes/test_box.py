"""The host's side of the conversation, against programs inside that lie, stall or end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import farflung.sandboxes.python as interpreters
from farflung.config import SandboxConfig
from farflung.sandboxes import SandboxDied, SandboxError, inside, open_factory, probe
from farflung.sandboxes import box as box_module
from farflung.sandboxes.box import Box, Plan
from farflung.sandboxes.limits import Group

# A program inside whose answers to RUN and READ are given; it writes files honestly, into nothing.
LIAR = """
import os, struct, sys, time
def receive():
    size, kind = struct.unpack("<IB", os.read(0, 5))
    while size: size -= len(os.read(0, size))
    return kind
os.write(0, struct.pack("<IB", 0, 0))
while True:
    kind = receive()
    if kind == 17: os.write(0, struct.pack("<IB", 0, 1)); continue
    exec(sys.argv[1])
"""


async def liar(says: str, *, unkillable: bool = False, group: Group | None = None) -> Box:
    plan = Plan([sys.executable, "-c", LIAR, says], {}, unkillable, group=group)
    return await Box.start(plan, {}, 20)


ANSWERS = {
    "more than was allowed": "os.write(0, struct.pack('<IB', 1 << 31, 1))",
    "an unknown kind": "os.write(0, struct.pack('<IB', 0, 99))",
    "half a header": "os.write(0, b'\\0\\0'); sys.exit()",
    "half a payload": "os.write(0, struct.pack('<IB', 50, 1) + b'x'); sys.exit()",
    "a result without its head": "os.write(0, struct.pack('<IB', 3, 1) + b'xxx')",
    "nothing": "sys.exit()",
    "a failure": "os.write(0, struct.pack('<IB', 3, 2) + b'bad')",
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_lies_end_the_box_and_are_the_policys_where_it_could_lie(answer: str) -> None:
    box = await liar(ANSWERS[answer])
    with pytest.raises(SandboxDied):
        await box.exec("ls", seconds=5, max_bytes=1000)
    with pytest.raises(SandboxError, match="closed"):
        await box.exec("ls", seconds=5, max_bytes=1000)


async def test_the_same_is_machinery_where_the_policy_could_not() -> None:
    box = await liar("sys.exit()", unkillable=True, group=Group(()))
    with pytest.raises(SandboxError, match="it ended"):
        await box.exec("ls", seconds=5, max_bytes=1000)


async def test_an_end_after_limits_were_used_up_is_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    box = await liar("sys.exit()", unkillable=True, group=Group(()))
    monkeypatch.setattr(Group, "used_up", lambda self: "memory")
    with pytest.raises(SandboxDied, match="memory used up: it ended"):
        await box.exec("ls", seconds=5, max_bytes=1000)


async def test_silence_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "GRACE_SECONDS", 0.2)
    box = await liar("time.sleep(60)")
    with pytest.raises(SandboxDied, match="did not answer"):
        await box.exec("ls", seconds=0.1, max_bytes=1000)


async def test_names_that_leave_the_tree_are_dropped() -> None:
    names = ["/etc/passwd", "../x", "a/../../x", "ok.py", ".git/config", "a\0b"]
    payload = inside.pack_files((name.encode(), b"1") for name in names)
    box = await liar(f"os.write(0, struct.pack('<IB', {len(payload)}, 1) + {payload!r})")
    assert await box.read_tree() == {"ok.py": b"1"}
    await box.close()


async def test_cut_files_are_noticed() -> None:
    payload = inside.pack_files([(b"a", b"12345")])[:-2]
    box = await liar(f"os.write(0, struct.pack('<IB', {len(payload)}, 1) + {payload!r})")
    with pytest.raises(SandboxError, match="content is cut"):
        await box.read_tree()


async def test_a_program_that_cannot_start_says_what_it_said() -> None:
    with pytest.raises(SandboxError, match="cannot start /none"):
        await Box.start(Plan(["/none"], {}, False), {}, 5)
    with pytest.raises(SandboxError, match="it ended: wrong day"):
        await Box.start(Plan(["/bin/sh", "-c", "echo wrong day >&2"], {}, False), {}, 5)


async def test_boxes_work_with_the_interpreter_we_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system has no Python, or another version."""
    if probe("bubblewrap") is not None:
        pytest.skip("no bubblewrap")
    monkeypatch.setattr(interpreters, "SYSTEM", Path("/none/python3"))
    interpreters.find_python.cache_clear()
    try:
        box = await open_factory(SandboxConfig()).open({})
        command = "python3 -c 'import sys, unittest; print(sys.base_prefix)'; python3 -c 'import pip'"
        output = (await box.exec(command, seconds=10, max_bytes=1000)).output
        await box.close()
    finally:
        interpreters.find_python.cache_clear()
    assert output.splitlines()[0] == sys.base_prefix
    assert "No module named 'pip'" in output
