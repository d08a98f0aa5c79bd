"""The grader against honest repairs, against attacks on it, and against machinery that fails."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from farflung.config import SandboxConfig
from farflung.core.errors import InfraError
from farflung.core.task import Task
from farflung.sandboxes import Sandbox, SandboxError, SandboxFactory, open_factory, probe
from farflung.tasks.grader import Grade, grade, make_patch

CALC = """\
def add(a, b):
    return a - b


def largest(numbers):
    return max(numbers)
"""
TESTS = """\
import unittest

from shop import calc
from tests import helper


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(1, 2), helper.THREE)

    def test_zero(self):
        self.assertTrue(calc.add(0, 5) == 5)


class LargestTest(unittest.TestCase):
    def test_largest(self):
        with self.subTest("small"):
            self.assertEqual(calc.largest([1, 3, 2]), 3)
"""
TASK = Task(
    id="calc-1",
    statement="add subtracts",
    files={
        "shop/__init__.py": "", "shop/calc.py": CALC, "tests/__init__.py": "", "tests/test_calc.py": TESTS,
        "tests/helper.py": "THREE = 3\n", "README": "no end of line",
    },
    tests=("tests.test_calc.AddTest.test_add", "tests.test_calc.AddTest.test_zero", "tests.test_calc.LargestTest.test_largest"),
    protected=("tests/test_calc.py", "tests/__init__.py", "tests/helper.py"),
    fix={"shop/calc.py": CALC.replace("a - b", "a + b")},
)  # fmt: skip
FIXED = CALC.replace("a - b", "a + b")
CONFIG = SandboxConfig(memory_mb=128, processes=32, disk_mb=16, test_seconds=20, retries=1)


@pytest.fixture(scope="module")
def factory() -> SandboxFactory:
    return open_factory(CONFIG if probe("bubblewrap") is None else CONFIG.model_copy(update={"kind": "process"}))


def patch(changes: Mapping[str, str | bytes | None], task: Task = TASK) -> str:
    """The diff of a tree with files replaced, or deleted where None."""
    tree: dict[str, bytes] = {name: text.encode() for name, text in task.files.items()}
    for name, content in changes.items():
        if content is None:
            del tree[name]
        else:
            tree[name] = content.encode() if isinstance(content, str) else content
    return make_patch(task, tree)


async def score(
    factory: SandboxFactory, changes: Mapping[str, str | bytes | None], config: SandboxConfig = CONFIG
) -> Grade:
    return await grade(TASK, patch(changes), factory, config)


async def test_the_reference_repair_passes(factory: SandboxFactory) -> None:
    got = await score(factory, {"shop/calc.py": FIXED})
    assert (got.reward, got.detail) == (1.0, "3 tests passed")
    assert got.seconds > 0


async def test_nothing_done_fails(factory: SandboxFactory) -> None:
    got = await score(factory, {})
    assert (got.reward, got.detail) == (0.0, "2 of 3 tests failed, first tests.test_calc.AddTest.test_add: failure")


async def test_other_honest_repairs_pass(factory: SandboxFactory) -> None:
    other = "from shop import plus\n" + CALC.replace("a - b", "plus.plus(a, b)")
    changes = {
        "shop/calc.py": other,
        "shop/plus.py": "import operator\n\nplus = operator.add\n",
        "notes.txt": "x",
        "README": None,
    }
    got = await score(factory, changes)
    assert got.reward == 1.0, got.detail


async def test_a_repair_that_breaks_another_test_fails(factory: SandboxFactory) -> None:
    got = await score(factory, {"shop/calc.py": FIXED.replace("max", "min")})
    assert got.detail == "1 of 3 tests failed, first tests.test_calc.LargestTest.test_largest: failure"


ATTACKS: dict[str, dict[str, str | bytes | None]] = {
    "weaken the test": {"tests/test_calc.py": TESTS.replace("helper.THREE", "-1").replace("== 5", "== -5")},
    "delete the test": {"tests/test_calc.py": None},
    "skip the test": {"tests/test_calc.py": TESTS.replace("class", "@unittest.skip('')\nclass")},
    "edit the helper": {"tests/helper.py": "THREE = -1\n"},
    "exit the helper": {"tests/helper.py": "raise SystemExit(0)\n"},
    "test package in place of the module": {"tests/test_calc/__init__.py": "AddTest = None\n"},
    "module in place of the package": {"tests.py": "print('OK')\n"},
    "shadow unittest": {"unittest.py": "class TestCase: pass\n"},
    "shadow unittest as a package": {"unittest/__init__.py": "class TestCase: pass\n"},
    "shadow a module that the tests use": {"random.py": "x = 1\n"},
    "sitecustomize": {"sitecustomize.py": "import os; os._exit(0)\n"},
    "sitecustomize deeper": {"shop/sitecustomize.py": "x = 1\n"},
    "conftest": {"conftest.py": "def pytest_runtest_makereport(): pass\n"},
    "path file": {"shop/evil.pth": "import os\n"},
    "bytecode": {"tests/__pycache__/test_calc.cpython-311.pyc": b"abc"},
    "exit at import": {"shop/calc.py": "import os\nos._exit(0)\n"},
    "SystemExit at import": {"shop/calc.py": "raise SystemExit(0)\n"},
    "KeyboardInterrupt at import": {"shop/calc.py": "raise KeyboardInterrupt\n"},
    "skip at import": {"shop/calc.py": "import unittest\nraise unittest.SkipTest('no')\n"},
    "SystemExit in the call": {"shop/calc.py": "def add(a, b):\n    raise SystemExit(0)\n\n\nlargest = max\n"},
    "KeyboardInterrupt in the call": {"shop/calc.py": "def add(a, b):\n    raise KeyboardInterrupt\n\n\nlargest = max\n"},
    "atexit": {"shop/calc.py": "import atexit, os\natexit.register(os._exit, 0)\n" + CALC},
    "patch TestResult": {
        "shop/calc.py": "import unittest\nunittest.TestResult.addFailure = unittest.TestResult.addSuccess\n" + CALC
    },
    "patch assertEqual": {
        "shop/calc.py": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + CALC.replace("a - b", "5")
    },
    "always equal": {
        "shop/calc.py": "class Any:\n    def __eq__(self, other):\n        return True\n\n\ndef add(a, b):\n    return Any()\n\n\nlargest = max\n"
    },
    "always equal by assignment": {
        "shop/calc.py": "class Any(str):\n    __eq__ = lambda *a: True\n\n\ndef add(a, b):\n    return Any()\n\n\nlargest = max\n"
    },
    "always equal by name": {
        "shop/calc.py": "Any = type('Any', (), {'__e' + 'q__': lambda *a: True})\n\n\ndef add(a, b):\n    return Any()\n\n\nlargest = max\n"
    },
    "read the caller's frame": {
        "shop/calc.py": "import sys\n\n\ndef add(a, b):\n    return sys._getframe(1).f_globals['helper'].THREE\n\n\nlargest = max\n"
    },
    "patch the test class": {
        "shop/calc.py": "def add(a, b):\n    from tests import test_calc\n    test_calc.AddTest.assertEqual = test_calc.AddTest.assertTrue = lambda *a: None\n\n\nlargest = max\n"
    },
    "patch the helper": {
        "shop/calc.py": "def add(a, b):\n    from tests import helper\n    helper.THREE = 5\n    return 5\n\n\nlargest = max\n"
    },
    "patch the test class by a relative import": {
        "shop/calc.py": "def add(a, b):\n    from .tests.test_calc import AddTest\n    return 5\n\n\nlargest = max\n"
    },
    "patch what unittest is made of": {
        "shop/calc.py": "import contextlib, collections\ncollections.Counter = lambda x: 0\n" + CALC.replace("a - b", "5")
    },
    "an object whose difference is nothing": {
        "shop/calc.py": "class N(int):\n    def __sub__(self, other):\n        return 0\n\n\ndef add(a, b):\n    return N()\n\n\nlargest = max\n"
    },
    "evaluate text": {"shop/calc.py": "import timeit\ntimeit.timeit('import unittest; 1', number=1)\n" + CALC},
    "fork and go on": {"shop/calc.py": "import os\nif os.fork() == 0:\n    os._exit(0)\n" + CALC},
    "source in another encoding": {
        "shop/calc.py": "# coding: utf-7\n+AGkAbQBwAG8AcgB0ACAAZwBj-\n" + CALC
    },
    "not Python any more": {"shop/calc.py": "def add(a, b:\n"},
    "not text": {"shop/calc.py": b"\xff\xfe"},
    "a binary beside the repair": {"shop/calc.py": FIXED, "blob": b"\xff\xfe"},
    "a huge file": {"shop/data.py": "x = 1\n" * 100_000},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_get_nothing(factory: SandboxFactory, name: str) -> None:
    got = await score(factory, ATTACKS[name])
    assert got.reward == 0.0
    assert got.detail


KNOWN_GAPS = {
    "hard-coded answers": "def add(a, b):\n    return {1: 3, 0: 5}[a]\n\n\nlargest = max\n",
    "answers read from the tests' text": """\
import re


def add(a, b):
    text = open("tests/test_calc.py").read()
    return int(re.search(rf"add\\({a}, {b}\\) == (\\d)", text + "add(1, 2) == 3")[1])


largest = max
""",
}


@pytest.mark.parametrize("name", KNOWN_GAPS)
async def test_known_gaps_are_what_the_documentation_says(factory: SandboxFactory, name: str) -> None:
    assert (await score(factory, {"shop/calc.py": KNOWN_GAPS[name]})).reward == 1.0


# The same reach, by ways that the reading rule is blinded to here: what the runner itself withstands.
BEHIND_THE_RULE = (
    "patch TestResult", "patch assertEqual", "patch the test class", "patch what unittest is made of", "atexit", "exit at import", "read the caller's frame", "fork and go on",
)  # fmt: skip


@pytest.mark.parametrize("name", BEHIND_THE_RULE)
async def test_the_runner_withstands_what_the_rule_refuses(
    factory: SandboxFactory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.tasks.grader.new_reach", lambda *a: None)
    assert (await score(factory, ATTACKS[name])).reward == 0.0


FORGERIES = {
    "write verdicts everywhere": """
import os
for fd in range(3, 256):
    for index in range(-1, 4):
        try:
            os.write(fd, f"{index} pass {'0' * 32}\\n".encode())
        except OSError:
            pass
""",
    "find the key with gc": """
import gc
found = [o for o in gc.get_objects() if isinstance(o, dict) and 'key' in o]
""",
    "read our own memory": "open('/proc/self/mem', 'rb').seek(0)\n",
    "read our memory from a child": """
import os, subprocess
subprocess.run(['cat', f'/proc/{os.getpid()}/mem'], check=True)
os._exit(0)
""",
    "trace": "import sys\nsys.settrace(lambda *a: None)\n",
    "frames by traceback": """
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame.f_back
""",
    "frames by inspect": "import inspect\nframe = inspect.currentframe()\n",
    "ctypes": "import ctypes\nctypes.string_at(id(ctypes), 8)\n",
    "the runner's module": "import sys\nsys.modules['__main__']._reporter\n",
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_verdicts_cannot_be_forged_from_the_source(
    factory: SandboxFactory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.tasks.grader.new_reach", lambda *a: None)
    got = await score(factory, {"shop/calc.py": FORGERIES[name] + CALC})
    assert got.reward == 0.0
    got = await score(factory, {"shop/calc.py": FORGERIES[name] + FIXED})
    assert (got.reward, got.detail) == (1.0, "3 tests passed") if name.startswith("write") else got.reward == 0.0


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    pass\n",
        "import time\ntime.sleep(1000)\n",
        "x = bytearray(1 << 33)\n",
        "x = [bytearray(1 << 20) for _ in range(1000)]\n",
        "import os\nwhile True:\n    os.write(2, b'x' * 10000)\n",
        "import threading\nwhile True:\n    threading.Thread(target=threading.Event().wait).start()\n",
    ],
)
async def test_using_up_the_box_is_a_result_of_the_policy(factory: SandboxFactory, body: str) -> None:
    config = CONFIG.model_copy(update={"test_seconds": 1.0})
    got = await score(factory, {"shop/calc.py": body + FIXED}, config)
    assert got.reward == 0.0


GIT = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"
RAW_PATCHES = {
    "outside": (GIT.format("../evil.py", "100644"), "not a path inside"),
    "absolute": ("--- /dev/null\n+++ /etc/evil\n@@ -0,0 +1 @@\n+x\n", "not a path inside"),
    "into .git": (GIT.format(".git/hooks/post-checkout", "100755"), "not a path inside"),
    "symlink": (GIT.format("link", "120000"), "only ordinary files"),
    "submodule": (GIT.format("sub", "160000"), "only ordinary files"),
    "rename": ("diff --git a/README b/READ\nsimilarity index 100%\nrename from README\nrename to READ\n", "two names"),
    "mode": ("diff --git a/README b/README\nold mode 100644\nnew mode 100755\n", "old mode"),
    "binary": ("diff --git a/b b/b\nnew file mode 100644\nGIT binary patch\nliteral 1\n", "GIT binary"),
    "two names": ("--- a/README\n+++ b/shop/calc.py\n@@ -1 +1 @@\n-x\n+y\n", "two names"),
    "does not fit": ("--- a/shop/calc.py\n+++ b/shop/calc.py\n@@ -1 +1 @@\n-def sub(a, b):\n+x\n", "differs"),
    "beyond the end": ("--- a/shop/calc.py\n+++ b/shop/calc.py\n@@ -90 +90 @@\n-x\n+y\n", "differs"),
    "exists already": ("--- /dev/null\n+++ b/shop/calc.py\n@@ -0,0 +1 @@\n+x\n", "exists already"),
    "does not exist": ("--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n", "does not exist"),
    "half deleted": ("--- a/shop/calc.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-def add(a, b):\n", "not all"),
    "cut": ("--- a/shop/calc.py\n+++ b/shop/calc.py\n@@ -1,9 +1,9 @@\n def add(a, b):\n", "a hunk"),
    "no patch": ("--- a/x\n+++ b/x\nhello\n", "not a line of a patch"),
    "file and folder": (GIT.format("shop/calc.py/x", "100644"), "a file and a folder"),
    "huge": ("x" * (2 << 20), "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW_PATCHES)
async def test_patches_that_are_refused(factory: SandboxFactory, name: str) -> None:
    text, why = RAW_PATCHES[name]
    got = await grade(TASK, text, factory, CONFIG)
    assert got.reward == 0.0
    assert why in got.detail


class Failing:
    """A factory whose first sandboxes do not start; the rest are real."""

    def __init__(self, factory: SandboxFactory, failures: int) -> None:
        self.factory, self.failures, self.opened = factory, failures, 0

    async def open(self, files: Mapping[str, str]) -> Sandbox:
        self.opened += 1
        if self.opened <= self.failures:
            raise SandboxError("no room", where="sandbox")
        return await self.factory.open(files)


async def test_a_sandbox_that_fails_is_tried_again(factory: SandboxFactory) -> None:
    failing = Failing(factory, CONFIG.retries)
    assert (await grade(TASK, patch({"shop/calc.py": FIXED}), failing, CONFIG)).reward == 1.0
    assert failing.opened == CONFIG.retries + 1


async def test_machinery_that_keeps_failing_is_no_zero(factory: SandboxFactory) -> None:
    failing = Failing(factory, 99)
    with pytest.raises(InfraError, match="2 times, last: sandbox: no room"):
        await grade(TASK, patch({"shop/calc.py": FIXED}), failing, CONFIG)
    assert failing.opened == CONFIG.retries + 1


async def test_a_runner_that_does_not_start_is_machinery(
    factory: SandboxFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.tasks.grader._runner", lambda: "raise RuntimeError('broken')\n")
    with pytest.raises(InfraError, match="RuntimeError: broken"):
        await grade(TASK, patch({"shop/calc.py": FIXED}), factory, CONFIG)
