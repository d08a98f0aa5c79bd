"""The installer's decisions: which torch, when to do nothing, and what it says when something fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with its environment in a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", str(tmp_path))
    monkeypatch.setattr(module, "LOG", str(tmp_path / "install.log"))
    monkeypatch.setattr(module, "PYTHON", sys.executable)
    monkeypatch.setattr(module, "TERMINAL", False)
    return module


def test_the_tested_torch_is_read_from_the_project(bootstrap: ModuleType) -> None:
    assert bootstrap.torch_requirement() == "torch==2.13.0"


@pytest.mark.parametrize(
    ("log", "doing", "mend"),
    [
        ("Failed to establish a new connection: Temporary failure in name resolution", "installing x", "No network?"),
        ("error sending request for url; dns error", "installing torch==2.13.0, CPU build", "TORCH=any"),
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "installing torch",
            "There may be no build for Python",
        ),
        ("OSError: [Errno 28] No space left on device", "installing x", "The disk is full"),
        ("something else", "installing x", "it goes on where it stopped"),
    ],
)
def test_a_failure_says_what_to_do_and_leaves_out_warnings(
    bootstrap: ModuleType, log: str, doing: str, mend: str
) -> None:
    Path(bootstrap.LOG).write_text(f"WARNING: Location 'x' is ignored\n{log}\n")
    said = str(bootstrap.failed(doing))
    assert said.startswith(f"{doing} failed:\n  {log}")
    assert mend in said
    assert "WARNING" not in said


def test_a_command_that_fails_is_told_with_its_log(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; print('Progress 5 of 10'); print('Collecting that'); print('broken', file=sys.stderr); sys.exit(3)"
    )
    with pytest.raises(bootstrap.Trouble, match=r"installing that failed:\n(.*\n)*  broken"):
        bootstrap.run_logged("Installing that", [sys.executable, "-c", code])
    assert capsys.readouterr().out == "Installing that\n"
    assert "\nProgress" not in Path(bootstrap.LOG).read_text()


def test_an_environment_that_is_in_step_is_left_alone(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[bool, bool]] = []
    monkeypatch.setattr(bootstrap, "make_venv", lambda: None)
    monkeypatch.setattr(bootstrap, "install", lambda dev, any_torch: made.append((dev, any_torch)))
    monkeypatch.setattr(bootstrap, "check_torch", lambda any_torch: None)

    def run(*argv: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", *argv])
        bootstrap.main()

    run()
    run()
    assert made == [(False, False)]
    run("--dev", "--any-torch")
    run("--dev")
    run()
    assert made == [(False, False), (True, True)]
    stamp = tmp_path / "farflung-installed.json"
    stamp.write_text(json.dumps({"fingerprint": "of an older pyproject.toml", "dev": True}))
    run()
    assert made[2:] == [(True, False)], "tools for tests stay when dependencies change"
    assert "Ready after" in capsys.readouterr().out


def test_an_old_python_is_told_so(tmp_path: Path) -> None:
    """Nothing newer on PATH: the message names the version that is needed and how to say where it is."""
    code = (
        "import sys; sys.version_info = (3, 9, 0); import runpy; sys.argv = ['bootstrap.py'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "farflung needs Python 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr
    assert "Traceback" not in done.stderr
