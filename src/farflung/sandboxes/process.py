"""Sandboxes that are plain processes in a folder of their own: the same contract, and no isolation at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from farflung.config.tree import SandboxConfig
from farflung.sandboxes.base import Sandbox, SandboxError
from farflung.sandboxes.box import Box, Plan
from farflung.sandboxes.bubblewrap import command_environment
from farflung.sandboxes.limits import Cgroups
from farflung.sandboxes.python import find_python


class ProcessFactory:
    """Opens plain-process boxes; satisfies ``SandboxFactory``. Commands see and may change all that their user may."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises SandboxError when there is no Python to run inside."""
        self._config = config
        self._python = find_python()
        self._cgroups = Cgroups.find()

    async def open(self, files: Mapping[str, str]) -> Sandbox:
        return await Box.start(self._plan(), files, self._config.start_seconds)

    def _plan(self) -> Plan:
        config, python = self._config, self._python
        scratch = Path(tempfile.mkdtemp(prefix="farflung-"))
        tree, home = scratch / "repo", scratch / "tmp"
        group = None
        try:
            tree.mkdir()
            home.mkdir()
            if self._cgroups is not None:
                group = self._cgroups.make(config.memory_mb << 20, config.processes)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise SandboxError(f"cannot make a working tree: {error}", where="sandbox") from None
        memory = 0 if group else config.memory_mb << 20
        argv = python.argv(str(tree), file_size=config.disk_mb << 20, memory=memory, scratch=str(scratch))
        environment = command_environment(python, home=str(home))
        return Plan(argv, environment, False, (python.program,), None, group, scratch)
