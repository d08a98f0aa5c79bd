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
from types import FrameType, ModuleType
from typing import Any

FRAMES = frozenset({"sys._getframe", "sys._getframemodulename"})
NEVER = frozenset(
    {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions",
     "sys.settrace", "sys.setprofile", "sys.addaudithook"}
)  # fmt: skip
FRAME_ATTRIBUTES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame", "__code__"})
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
    before = _state()
    suite, index = _load(tests)
    if not _sound(before):
        report(len(tests), "unittest was changed at import")
        os._exit(1)
    _verdicts(report, index).run_all(suite)
    report(len(tests), "end" if _sound(before) else "unittest was changed by a test")
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


def _load(tests: list[str]) -> tuple[unittest.TestSuite, dict[str, int]]:
    """The tests that can be found under exactly their ids; the others stay without a verdict, which is a failure."""
    suite = unittest.TestSuite()
    index = {}
    for number, name in enumerate(tests):
        try:
            found = unittest.defaultTestLoader.loadTestsFromName(name)
            case: Any = next(iter(found))
            if found.countTestCases() == 1 and case.id() == name:
                suite.addTest(case)
                index[name] = number
        except BaseException:
            continue
    return suite, index


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


def _state() -> dict[str, Any]:
    """Everything that decides a verdict, by name."""
    import builtins
    import unittest.case
    import unittest.result
    import unittest.suite

    owners = (
        unittest.case,
        unittest.result,
        unittest.suite,
        unittest.TestCase,
        unittest.TestResult,
        unittest.TestSuite,
    )
    state = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    return state | {f"builtins.{name}": value for name, value in vars(builtins).items() if name != "_"}


def _sound(before: dict[str, Any]) -> bool:
    """Nothing was replaced, and tests that must fail do."""
    after = _state()
    if before.keys() != after.keys() or any(before[name] is not after[name] for name in before):
        return False

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
    return len(result.failures) == 3


if __name__ == "__main__":
    main()
