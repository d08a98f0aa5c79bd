"""Many working trees in one sandbox: for solved episodes by the thousand, where a sandbox each would cost too much."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from farflung.sandboxes.base import CommandResult, Sandbox, SandboxError, SandboxFactory

DRIVER = "batch_driver.py"
JOBS = "jobs.json"
SECONDS = 300.0
MAX_BYTES = 64 << 20


class Batch:
    """Working trees 0, 1, ... in one sandbox. What runs in one could see the others, so no command of a model belongs here."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    @staticmethod
    async def open(factory: SandboxFactory, trees: Sequence[Mapping[str, str]]) -> Batch:
        """A fresh sandbox with all the trees. Raises SandboxError."""
        files = {f"{number}/{path}": text for number, tree in enumerate(trees) for path, text in tree.items()}
        return Batch(await factory.open(files | {DRIVER: Path(__file__).with_name(DRIVER).read_text()}))

    async def run(self, jobs: Sequence[tuple[int, str]]) -> list[CommandResult]:
        """Run each (tree, command) with bash in that tree, one after the other. Raises SandboxError."""
        await self._box.write({JOBS: json.dumps([[str(tree), command] for tree, command in jobs])})
        result = await self._box.exec(f"python3 {DRIVER} {JOBS}", seconds=SECONDS, max_bytes=MAX_BYTES)
        if result.exit_code or result.killed:
            raise SandboxError(f"the batch ended with {result.killed or result.exit_code}: {result.output[-500:]}")
        return [CommandResult(code, output, 0.0) for code, output in json.loads(result.output)]

    async def trees(self) -> list[dict[str, str]]:
        """What the trees hold now, those with files in order."""
        found: dict[int, dict[str, str]] = {}
        for name, content in (await self._box.read_tree(max_bytes=MAX_BYTES)).items():
            number, slash, path = name.partition("/")
            if slash:
                found.setdefault(int(number), {})[path] = content.decode(errors="replace")
        return [found[number] for number in sorted(found)]

    async def close(self) -> None:
        await self._box.close()
