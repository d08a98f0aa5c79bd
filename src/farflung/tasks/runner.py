# ruff: noqa: PT009, PT027
"""Runs the expected tests in a fresh sandbox and signs each verdict. The text of this file goes to the interpreter on
its standard input, so nothing of it lies in the tree; descriptor 3 carries the key, then closes.

    input   key | tree's changed files, one a line | empty line | test ids, one a line
    output  index SPACE verdict SPACE mac, one a line: -1 ready, n "end"; anything else is not ours

Standard library only. The code under test shares this interpreter: see docs/sandboxes.md for what that means.
"""

from __future__ import annotations

import _blake2
import os
import sys
import unittest
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

FRAMES = frozenset({"sys._getframe", "sys._getframemodulename"})
NEVER = frozenset(
    {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions",
     "sys.settrace", "sys.setprofile", "sys.addaudithook"}
)  # fmt: skip
FRAME_ATTRIBUTES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame", "__code__"})
CALLABLE = (type, FunctionType, BuiltinFunctionType)
TESTERS = (unittest.TestCase, unittest.TestResult, unittest.BaseTestSuite)
GO_BETWEENS = ("inspect.py", "traceback.py", "threading.py")


def main() -> None:
    with open(3, "rb") as file:
        head, _, names = file.read().decode().partition("\n\n")
    key, *files = head.split("\n")
    tree = os.getcwd()
    changed = frozenset(os.path.join(tree, name) for name in files)
    tests = names.removesuffix("\n").split("\n")
    report = _reporter(bytes.fromhex(key), _quiet())
    del key, head
    _undumpable()
    report(-1, "ready")
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path.insert(0, tree)
    sys.addaudithook(_watch(changed, report, len(tests)))
    before = _state(list(sys.modules.values()))
    suite, index, modules = _load(tests, changed)
    _insist(before, report, len(tests))
    before |= _state(modules)
    _verdicts(report, index).run_all(suite)
    _insist(before, report, len(tests))
    report(len(tests), "end")
    os._exit(0)


def _quiet() -> int:
    """Keep the output for verdicts alone, under another number."""
    output = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return output


def _reporter(key: bytes, output: int) -> Any:
    def report(index: int, verdict: str) -> None:
        line = f"{index} {verdict[:200]}"
        mac = _blake2.blake2b(line.encode(), key=key, digest_size=16).hexdigest()
        os.write(output, f"{line} {mac}\n".encode())

    return report


def _undumpable() -> None:
    """No process that the code under test starts may read this one's memory."""
    import _ctypes

    _ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"), (4, 0, 0, 0, 0))  # type: ignore[arg-type]


def _watch(changed: frozenset[str], report: Any, end: int) -> Any:
    """An audit hook (it cannot be removed) that ends the run when a submitted file reaches for frames or the collector."""
    busy = False

    def from_submission(frame: FrameType | None, direct: bool) -> bool:
        while frame is not None:
            name = frame.f_code.co_filename
            if name in changed:
                return True
            if direct and not name.endswith(GO_BETWEENS):
                return False
            frame = frame.f_back
        return False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy:
            return
        direct = event in FRAMES or (event == "object.__getattr__" and args[1] in FRAME_ATTRIBUTES)
        process = event == "open" and isinstance(args[0], str) and args[0].startswith("/proc")
        if direct or process or event in NEVER or event.startswith("ctypes."):
            busy = True
            if from_submission(sys._getframe(1), direct):
                report(end, f"the submission used {event}")
                os._exit(1)
            busy = False

    return hook


def _load(tests: list[str], changed: frozenset[str]) -> tuple[unittest.TestSuite, dict[str, int], list[ModuleType]]:
    """The tests found under exactly their ids, their numbers and modules. The others stay without a verdict, which is a
    failure; so does a test whose code lies in a submitted file."""
    suite = unittest.TestSuite()
    index: dict[str, int] = {}
    modules = {}
    for number, name in enumerate(tests):
        try:
            found = unittest.defaultTestLoader.loadTestsFromName(name)
            case: Any = next(iter(found))
            method = getattr(type(case), case._testMethodName)
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            if found.countTestCases() == 1 and case.id() == name and method.__code__.co_filename not in changed:
                suite.addTest(case)
                index[name] = number
                modules[type(case).__module__] = sys.modules[type(case).__module__]
        except BaseException:
            continue
    return suite, index, list(modules.values())


def _verdicts(report: Any, index: dict[str, int]) -> Any:
    class Verdicts(unittest.TestResult):
        """Reports a test as it stops: passed only when it succeeded and nothing else was said about it."""

        def startTest(self, test: Any) -> None:
            self.said: list[str] = []

        def stopTest(self, test: Any) -> None:
            if (number := index.pop(test.id(), None)) is not None:
                report(number, "pass" if self.said == ["success"] else ",".join(self.said) or "nothing")

        def addSuccess(self, test: Any) -> None:
            self.said.append("success")

        def addFailure(self, test: Any, err: Any) -> None:
            self.said.append("failure")

        def addError(self, test: Any, err: Any) -> None:
            self.said = [*getattr(self, "said", []), "error"]

        def addSkip(self, test: Any, reason: str) -> None:
            self.said = [*getattr(self, "said", []), "skipped"]

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            self.said.append("expected failure")

        def addUnexpectedSuccess(self, test: Any) -> None:
            self.said.append("unexpected success")

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.said.append("failure")

        def run_all(self, suite: unittest.TestSuite) -> None:
            try:
                suite.run(self)
            except BaseException:
                self.said = []

    return Verdicts()


def _state(modules: list[ModuleType]) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Functions and classes of these modules and of their test classes: (owner, name) -> (owner, value).

    What is loaded before the submission is what unittest is made of."""
    state = {}
    for module in modules:
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type) and issubclass(v, TESTERS))]
        for owner in owners:
            for name, value in vars(owner).items():
                if isinstance(value, CALLABLE):
                    state[f"{module.__name__}.{owner.__name__}", name] = (owner, value)
    return state


def _insist(before: dict[tuple[str, str], tuple[Any, Any]], report: Any, end: int) -> None:
    """End the run when something that decides verdicts was replaced, or when tests that must fail do not."""
    for (where, name), (owner, value) in before.items():
        if vars(owner).get(name) is not value:
            report(end, f"the submission replaced {where}.{name}")
            os._exit(1)

    class Canary(unittest.TestCase):
        def equal(self) -> None:
            self.assertEqual(1, 2)

        def true(self) -> None:
            self.assertTrue(False)

        def raises(self) -> None:
            self.assertRaises(ValueError, int)

    result = unittest.TestResult()
    for name in ("equal", "true", "raises"):
        Canary(name).run(result)
    if len(result.failures) != 3:
        report(end, "the submission made failing tests pass")
        os._exit(1)


if __name__ == "__main__":
    main()
