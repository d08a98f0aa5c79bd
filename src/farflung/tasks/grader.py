"""The grader: the diff alone, in a fresh sandbox with a clean copy of the task; its tests decide 1 or 0.

What the policy does gives a reward of 0 with a detail, whatever it breaks; what the machinery does gives InfraError.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farflung.config.tree import SandboxConfig
from farflung.core.errors import BadInput, InfraError
from farflung.core.task import Task
from farflung.sandboxes.base import CommandResult, SandboxDied, SandboxError, SandboxFactory
from farflung.tasks.patch import PatchError, apply_patch, make_patch
from farflung.tasks.reach import new_reach

__all__ = ["Grade", "grade", "make_patch"]

MAX_COMMAND_BYTES = 120_000
VERDICT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Grade:
    """``reward`` is 1 when every expected test passed, else 0; ``detail`` says why; ``seconds`` is wall time."""

    reward: float
    detail: str
    seconds: float


async def grade(task: Task, patch: str, factory: SandboxFactory, config: SandboxConfig) -> Grade:
    """Grade a submitted diff. A sandbox that fails is tried again ``config.retries`` times with fresh ones, then raises
    InfraError; a task that cannot be graded at all raises BadInput."""
    start = time.monotonic()
    try:
        tree = apply_patch(task, patch)
        changed = _changed(task, tree)
    except PatchError as error:
        return Grade(0.0, str(error), time.monotonic() - start)
    for _ in range(config.retries + 1):
        try:
            reward, detail = await _trial(task, tree, changed, factory, config)
        except SandboxError as error:
            failure = error
        else:
            return Grade(reward, detail, time.monotonic() - start)
    raise InfraError(f"grading failed {config.retries + 1} times, last: {failure}", where=task.id)


def _changed(task: Task, tree: Mapping[str, str]) -> list[str]:
    """Files that differ from the task's. Raises PatchError where one reaches into the interpreter."""
    changed = sorted(path for path, text in tree.items() if task.files.get(path) != text)
    for path in changed:
        if path.endswith(".py"):
            known = (task.files.get(path, ""), task.fix.get(path, ""))
            if (name := new_reach(tree[path], known, task.protected)) is not None:
                raise PatchError(f"{path} reaches into the interpreter: {name}")
    return changed


async def _trial(
    task: Task, tree: Mapping[str, str], changed: list[str], factory: SandboxFactory, config: SandboxConfig
) -> tuple[float, str]:
    """One run of the tests. Raises SandboxError when the machinery failed, by the runner's first word at the latest."""
    key = secrets.token_bytes(32)
    command = _command(task, changed, key)
    box = await factory.open(tree)
    try:
        result = await box.exec(command, seconds=config.test_seconds, max_bytes=VERDICT_BYTES * (len(task.tests) + 2))
    except SandboxDied as error:
        return 0.0, f"the tests ended their sandbox: {error}"
    finally:
        await box.close()
    verdicts = _verdicts(result.output, key)
    if verdicts.get(-1) != "ready":
        raise SandboxError(f"the test runner did not start: {_last_line(result)}", where="grader")
    return _judge(task, verdicts, result, config)


def _command(task: Task, changed: list[str], key: bytes) -> str:
    """A shell that becomes the isolated interpreter: the runner on descriptor 0, its orders on 3, none in its argv."""
    end = f"END-{secrets.token_hex(8)}"
    orders = "\n".join([key.hex(), *changed, "", *task.tests])
    command = f"exec python3 -s -S -P -B - <<'{end}' 3<<'{end}'\n{_runner()}\n{end}\n{orders}\n{end}\n"
    if len(command.encode()) > MAX_COMMAND_BYTES:
        raise BadInput(f"its {len(task.tests)} tests have too long names to hand over", where=task.id)
    return command


@cache
def _runner() -> str:
    return Path(__file__).with_name("runner.py").read_text()


def _verdicts(output: str, key: bytes) -> dict[int, str]:
    """Signed lines by index; what is not signed was not written by the runner. A second word on the same index fails it."""
    verdicts: dict[int, str] = {}
    for line in output.split("\n"):
        said, _, mac = line.rpartition(" ")
        expected = hashlib.blake2b(said.encode(), key=key, digest_size=16).hexdigest()
        if hmac.compare_digest(mac.encode(), expected.encode()):
            index, _, verdict = said.partition(" ")
            verdicts[int(index)] = verdict if verdicts.get(int(index), verdict) == verdict else "two verdicts"
    return verdicts


def _judge(task: Task, verdicts: Mapping[int, str], result: CommandResult, config: SandboxConfig) -> tuple[float, str]:
    count = len(task.tests)
    failed = [
        f"{name}: {verdicts.get(i, 'no verdict')}" for i, name in enumerate(task.tests) if verdicts.get(i) != "pass"
    ]
    if result.killed == "time":
        return 0.0, f"the tests did not end within {config.test_seconds:g} s"
    if verdicts.get(count) != "end":
        return 0.0, verdicts.get(count, "the tests ended their interpreter")
    if failed or not count:
        return 0.0, f"{len(failed)} of {count} tests failed, first {failed[0]}" if failed else "no tests"
    return 1.0, f"{count} tests passed"


def _last_line(result: CommandResult) -> str:
    lines = result.output.strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {result.exit_code}"
