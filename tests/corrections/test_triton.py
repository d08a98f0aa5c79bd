"""The GPU kernels in Triton's interpreter, which needs Triton and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.corrections.rows import TRITON


@pytest.mark.skipif(not TRITON, reason="needs Triton")
def test_kernels_do_what_the_plain_operations_do() -> None:
    """In a process of its own: whether kernels are interpreted is decided when Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(Path(__file__).parent / "interpreted.py")], env=env, check=True, timeout=110)
