"""Carrying an ablation out: a run whose process dies costs that run only."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from farflung.ablation.arms import Arm
from farflung.ablation.folder import Folder, Run
from farflung.ablation.schedule import carry_out
from farflung.ablation.small import Small
from farflung.core.errors import InfraError
from tests.ablation.tiny import recipe


def kill(name: str) -> None:
    """End the child of this process that makes the run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            if name in child.cmdline():
                child.kill()
                return
        time.sleep(0.01)


def test_when_a_process_dies_the_others_go_on_and_it_is_told_last(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "a", Small(recipe(start={"updates": 5})))
    dead, alive = Run(Arm("mixed"), 0), Run(Arm("mixed", mis=True), 0)
    said = io.StringIO()
    killer = threading.Thread(target=kill, args=(dead.name,))
    killer.start()
    with pytest.raises(InfraError, match=r"the run's process ended with -9"):
        carry_out(folder, [dead, alive], 1, Console(file=said))
    killer.join()
    assert (folder.complete(dead), folder.complete(alive)) == (False, True)
    assert "mixed/GRPO seed 0: failed; the others go on" in said.getvalue()
    carry_out(folder, [dead, alive], 1, Console(file=said))
    assert folder.complete(dead)
