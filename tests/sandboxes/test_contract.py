"""What every adapter promises. Nothing here may hurt a machine that runs it without isolation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import pytest

from farflung.core.errors import BadInput
from farflung.sandboxes import CommandResult, Sandbox, SandboxDied, SandboxError, SandboxFactory


async def run(box: Sandbox, command: str, seconds: float = 10, max_bytes: int = 10_000) -> CommandResult:
    return await box.exec(command, seconds=seconds, max_bytes=max_bytes)


async def test_starts_with_exactly_the_files(box: Sandbox, files: Mapping[str, str]) -> None:
    assert await box.read_tree() == {name: text.encode() for name, text in files.items()}
    assert (await run(box, "cat pkg/b.txt")).output == "naïve\n"


async def test_exit_codes_are_results(box: Sandbox) -> None:
    assert (await run(box, "exit 7")).exit_code == 7
    assert (await run(box, "no-such-command")).exit_code == 127
    assert (await run(box, "kill -TERM $$")).exit_code == 128 + 15
    assert (await run(box, "if")).exit_code == 2


async def test_output_is_both_streams_in_order(box: Sandbox) -> None:
    result = await run(box, "echo one; echo two >&2; echo three")
    assert (result.output, result.killed) == ("one\ntwo\nthree\n", None)


async def test_output_that_is_not_text_is_replaced(box: Sandbox) -> None:
    assert (await run(box, r"printf '\xff\xfeok'")).output == "\ufffd\ufffdok"


async def test_state_stays_between_commands_and_shells_do_not(box: Sandbox) -> None:
    await run(box, "echo 1 > x; echo 2 > $TMPDIR/y; sleep 100 & echo $! > pid; V=3; cd pkg")
    result = await run(box, "cat x $TMPDIR/y; echo [$V]; basename $PWD; kill -0 $(cat pid) && echo alive")
    assert result.output == "1\n2\n[]\nrepo\nalive\n"


async def test_python_and_unittest_work(box: Sandbox) -> None:
    await box.write({"test_x.py": "import unittest\n\nclass T(unittest.TestCase):\n    def test(self): pass\n"})
    result = await run(box, "python3 a.py && python3 -m unittest 2>&1 | tail -1")
    assert result.output == "hello\nOK\n"


async def test_environment_is_clean(box: Sandbox, monkeypatch: pytest.MonkeyPatch, factory: SandboxFactory) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    other = await factory.open({})
    assert "SECRET_OF_THE_HOST" not in (await run(other, "env")).output
    await other.close()


async def test_time_limit_kills_what_ignores_signals(box: Sandbox) -> None:
    result = await run(box, "trap '' TERM INT HUP; echo before; while :; do sleep 0.1; done", seconds=0.5)
    assert (result.exit_code, result.output, result.killed) == (124, "before\n", "time")
    assert result.seconds >= 0.5
    assert (await run(box, "echo after")).output == "after\n"


async def test_sleep_for_ever_is_bounded(box: Sandbox) -> None:
    assert (await run(box, "sleep inf", seconds=0.3)).killed == "time"


async def test_output_limit_kills(box: Sandbox) -> None:
    result = await run(box, "yes | head -c 100M", max_bytes=5000)
    assert (result.exit_code, result.output, result.killed) == (125, "y\n" * 2500, "output")
    assert (await run(box, "echo after")).output == "after\n"


async def test_output_exactly_at_the_limit_passes(box: Sandbox) -> None:
    result = await run(box, "head -c 5000 /dev/zero | tr '\\0' x", max_bytes=5000)
    assert (result.output, result.killed, result.exit_code) == ("x" * 5000, None, 0)


async def test_last_output_before_the_shell_ends_is_kept(box: Sandbox) -> None:
    result = await run(box, "head -c 200000 /dev/zero | tr '\\0' x; echo end", max_bytes=300_000)
    assert result.output == "x" * 200_000 + "end\n"


async def test_the_shell_decides_the_end_not_who_holds_the_pipe(box: Sandbox) -> None:
    result = await run(box, "(while :; do echo x; sleep 0.05; done) & setsid sleep 50 & echo started", seconds=8)
    assert result.killed is None
    assert "started\n" in result.output


async def test_time_limit_kills_daemons_too(box: Sandbox) -> None:
    """A double fork in a session of its own is killed with the command that overran."""
    daemon = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(5555)\n os._exit(0)"
    await box.write({"daemon.py": daemon})
    mark = f"mark-{id(box)}-{os.getpid()}"
    assert (await run(box, f"python3 daemon.py {mark}; sleep 30", seconds=1)).killed == "time"
    assert (
        await run(box, f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '{mark[:-1]}[{mark[-1]}]'")
    ).output == "0\n"


async def test_write_replaces_and_creates(box: Sandbox) -> None:
    await run(box, "ln -s a.py link")
    await box.write({"a.py": "print(2)\n", "new/deep/c.txt": "c", "link": "mine"})
    tree = await box.read_tree()
    assert tree["a.py"] == b"print(2)\n"
    assert (tree["new/deep/c.txt"], tree["link"]) == (b"c", b"mine")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a//b", "a/", "./a", "a\nb", ".git/config"])
async def test_paths_that_leave_the_tree_are_refused(box: Sandbox, name: str) -> None:
    with pytest.raises(BadInput):
        await box.write({name: "x"})
    assert (await run(box, "echo still here")).output == "still here\n"


async def test_read_tree_leaves_out_links_caches_and_devices(box: Sandbox) -> None:
    command = """
    ln -s /etc/hostname l; ln -s /usr d; mkfifo f; mkdir -p .git/x __pycache__ empty; touch .git/x/y __pycache__/z.pyc
    printf x > $'odd\\nname'; printf '\\xff' > raw; touch m.pyc
    """
    await run(box, command)
    assert set(await box.read_tree()) == {"a.py", "pkg/__init__.py", "pkg/b.txt", "raw"}


async def test_a_tree_beyond_the_limit_is_the_policys_doing(box: Sandbox) -> None:
    await run(box, "head -c 200000 /dev/zero > big")
    with pytest.raises(SandboxDied, match="working tree"):
        await box.read_tree(max_bytes=100_000)


async def test_commands_that_cannot_be_started_are_results(box: Sandbox) -> None:
    assert (await run(box, "echo \0")).exit_code == 126
    assert (await run(box, "#" * 200_000)).exit_code == 126
    assert (await run(box, "echo \ud800")).output == "?\n"


async def test_files_larger_than_the_disk_are_not_written(box: Sandbox) -> None:
    result = await run(box, "dd if=/dev/zero of=big bs=1M count=10240 2>/dev/null; stat -c %s big; rm big")
    assert int(result.output.split()[-1]) <= 16 << 20
    assert (await run(box, "echo x > small && cat small")).output == "x\n"


async def test_close_is_final_and_may_be_repeated(box: Sandbox) -> None:
    await box.close()
    await box.close()
    with pytest.raises(SandboxError):
        await run(box, "echo")


async def test_close_ends_a_running_command(box: Sandbox) -> None:
    command = asyncio.create_task(run(box, "sleep 60", seconds=60))
    await asyncio.sleep(0.3)
    await box.close()
    with pytest.raises((SandboxError, SandboxDied)):
        await command


async def test_a_cancelled_command_ends_the_box(box: Sandbox) -> None:
    command = asyncio.create_task(run(box, "sleep 60", seconds=60))
    await asyncio.sleep(0.3)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    with pytest.raises(SandboxError):
        await run(box, "echo")


async def test_many_at_once_stay_apart(factory: SandboxFactory) -> None:
    async def one(number: int) -> str:
        box = await factory.open({"n": str(number)})
        try:
            return (await run(box, "cat n; echo > n")).output.strip()
        finally:
            await box.close()

    assert await asyncio.gather(*map(one, range(32))) == [str(n) for n in range(32)]


async def test_files_that_do_not_fit_fail_the_start(bubblewrap: SandboxFactory) -> None:
    with pytest.raises(SandboxError, match="No space left"):
        await bubblewrap.open({f"{n}": "x" * (1 << 20) for n in range(20)})
