"""What bubblewrap adds: nothing inside sees, reaches or outlives anything outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from farflung.config import SandboxConfig
from farflung.sandboxes import Sandbox, SandboxDied, SandboxError, SandboxFactory, bubblewrap, open_factory, probe
from farflung.sandboxes.limits import Cgroups

BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


async def output(box: Sandbox, command: str, seconds: float = 10) -> str:
    return (await box.exec(command, seconds=seconds, max_bytes=100_000)).output


async def test_no_network(jail: Sandbox) -> None:
    assert (await output(jail, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    assert "Network is unreachable" in await output(jail, f'python3 -c "{code}"')


async def test_no_host_files(jail: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    assert (await output(jail, "ls /")).split() == sorted(await _roots(jail))
    for path in (secret, "/etc/passwd", "/root/.bashrc", "/sys/kernel", "/home", Path(__file__).resolve()):
        assert "No such file" in await output(jail, f"cat {path}")


async def _roots(jail: Sandbox) -> set[str]:
    allowed = {
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "repo",
        "root",
        "sbin",
        "tmp",
        "usr",
        "opt",
    }
    found = set((await output(jail, "ls /")).split())
    assert found <= allowed
    return found


async def test_no_installed_packages(jail: Sandbox) -> None:
    """The reference fixes of packaged tasks are not in reach."""
    assert "No module named" in await output(jail, "python3 -c 'import farflung'")
    assert await output(jail, "find / -name 'farflung*' -not -path '/proc/*' 2>/dev/null") == ""


async def test_no_other_processes(jail: Sandbox) -> None:
    await output(jail, "sleep 100 &")
    names = (await output(jail, "cat /proc/[0-9]*/comm")).split()
    assert set(names) <= {"python3", "python3.11", "python3.12", "python3.13", "bash", "cat", "sleep"}
    assert len(names) <= 4


async def test_read_only_system(jail: Sandbox) -> None:
    for path in ("/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname"):
        said = await output(jail, f"echo x > {path}")
        assert "Read-only" in said or "denied" in said
    mine = "-path '/proc/[0-9]*' -o -path '/proc/*self/*' -o -path '/tmp*' -o -path '/repo*' -o -path '/dev/*'"
    assert await output(jail, f"find / \\( {mine} \\) -prune -o -not -type l -writable -print 2>/dev/null") == ""
    said = await output(jail, ": >> /usr/bin/env")
    assert "Read-only" in said or "denied" in said


async def test_no_privileges(jail: Sandbox) -> None:
    assert await output(jail, "grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status | cut -f2 | sort -u") == (
        "0000000000000000\n1\n"
    )
    assert (await jail.exec("unshare -Ur true", seconds=5, max_bytes=1000)).exit_code != 0
    assert (await jail.exec("mount -t tmpfs x /tmp", seconds=5, max_bytes=1000)).exit_code != 0


async def test_the_program_inside_is_out_of_reach(jail: Sandbox) -> None:
    """Its descriptors, memory and life: commands run as the same user in the same process space."""
    assert "denied" in await output(jail, "echo forged > /proc/1/fd/0")
    assert "denied" in await output(jail, "head -c 1 /proc/1/mem")
    assert "denied" in await output(jail, "head -c 1 /proc/1/environ")
    await output(jail, "kill -9 1; kill -STOP 1; kill -9 -1")
    assert await output(jail, "echo alive") == "alive\n"


async def test_tmpfs_is_sized(jail: Sandbox) -> None:
    for folder in ("/repo", "/tmp"):
        command = (
            f"cd {folder}; for i in $(seq 20); do head -c 1M /dev/zero > f$i || break; done 2>&1; du -sm . | cut -f1"
        )
        assert int((await output(jail, command)).split()[-1]) <= 16
    assert "No space left" in await output(jail, "head -c 8M /dev/zero > /dev/shm/x")


async def test_a_full_disk_is_the_policys_doing(jail: Sandbox) -> None:
    await output(jail, "for i in $(seq 20); do head -c 1M /dev/zero > f$i; done")
    with pytest.raises(SandboxDied, match="No space left"):
        await jail.write({"more": "x" * 100_000})


async def test_memory_is_bounded_and_the_box_stays(jail: Sandbox) -> None:
    result = await jail.exec("python3 -c 'x = bytearray(10**10)'", seconds=20, max_bytes=1000)
    assert result.exit_code != 0
    result = await jail.exec("python3 -c 'x = [bytearray(1 << 20) for _ in range(500)]'", seconds=20, max_bytes=1000)
    assert result.exit_code in (1, 137)
    assert await output(jail, "echo alive") == "alive\n"


async def test_fork_bomb_dies_at_the_deadline(jail: Sandbox) -> None:
    await jail.write({"bomb.py": BOMB})
    assert (await jail.exec("python3 bomb.py", seconds=1, max_bytes=1000)).killed == "time"
    assert await output(jail, "echo alive") == "alive\n"


async def test_fork_bomb_in_the_background_is_ended_or_ends_the_box(jail: Sandbox) -> None:
    """The next command cannot be started (the box is dead), or cannot fork until its deadline kills the bomb with it."""
    await jail.write({"bomb.py": BOMB})
    await output(jail, "python3 bomb.py &")
    with contextlib.suppress(SandboxDied):
        async with asyncio.timeout(60):  # until the bomb has gone off
            while (await jail.exec("ls; ls; echo end", seconds=1, max_bytes=1000)).killed is None:
                await asyncio.sleep(0.01)
        assert (await output(jail, "ls; ls; echo end")).endswith("end\n")


async def test_classic_fork_bomb_is_bounded(jail: Sandbox) -> None:
    with contextlib.suppress(SandboxDied):
        await output(jail, ":(){ :|:& };:; sleep 1", seconds=2)
        await output(jail, "echo", seconds=2)
    await jail.close()


async def test_limits_hold_without_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where they cannot be written: rlimits, and an ordinary user where we are root."""
    monkeypatch.setattr(Cgroups, "find", staticmethod(lambda: None))
    try:
        factory = open_factory(SandboxConfig(memory_mb=128, processes=32, disk_mb=16))
    except SandboxError as error:
        pytest.skip(str(error))
    box = await factory.open({"bomb.py": BOMB})
    assert "MemoryError" in await output(box, "python3 -c 'bytearray(10**10)'")
    assert (await box.exec("python3 bomb.py", seconds=1, max_bytes=1000)).killed == "time"
    assert await output(box, "echo alive") == "alive\n"
    await box.close()


@pytest.mark.parametrize(
    ("says", "mend"),
    [
        ("bwrap: setting up uid map: Permission denied", "user namespaces"),
        ("bwrap: No permissions to create new namespace", "user namespaces"),
        ("bwrap: Can't mount proc on /newroot/proc", "systempaths=unconfined"),
        ("bwrap: something new", "shows it again"),
    ],
)
def test_a_bubblewrap_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, mend: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: fake)
    with pytest.raises(SandboxError) as caught:
        open_factory(SandboxConfig())
    assert says in str(caught.value)
    assert mend in str(caught.value)
    assert 'sandbox.kind = "process"' in str(caught.value)
    assert says in (probe("bubblewrap") or "")


def test_apparmor_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    switch.write_text("1\n")
    monkeypatch.setattr(bubblewrap, "APPARMOR", switch)
    problem = str(bubblewrap._problem("setting up uid map: Permission denied", Path("/x/bwrap"), None))
    assert "AppArmor" in problem
    assert "/x/bwrap" in problem


async def test_a_box_that_breaks_by_itself_is_an_infrastructure_error(
    bubblewrap: SandboxFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed from outside, with its limits unused: nothing inside could have done that."""
    if bubblewrap._cgroups is None:  # type: ignore[attr-defined]
        pytest.skip("without control groups nobody can tell")
    box = await bubblewrap.open({})
    command = asyncio.create_task(box.exec("sleep 30", seconds=30, max_bytes=10))
    await asyncio.sleep(0.3)
    os.kill(box._process.pid, 9)  # type: ignore[attr-defined]
    with pytest.raises(SandboxError):
        await command


async def test_a_start_beyond_its_deadline_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = open_factory(SandboxConfig(start_seconds=0.001))
    with pytest.raises(SandboxError, match=r"not ready after 0.001 s"):
        await factory.open({})
