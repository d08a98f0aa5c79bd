"""Submissions as unified diffs: made from a tree, and applied strictly to a clean copy of the task on the host.

A patch is data from the policy. What it may touch is decided here; everything else is refused with a reason.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.sandboxes.box import check_path

MAX_PATCH_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 18
MAX_FILES = 200
MAX_DIFF_LINES = 2000
CONTEXT = 3
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_NEWLINE = "\\ No newline at end of file"
REFUSED_HEADERS = (
    "rename ",
    "copy ",
    "similarity ",
    "GIT binary",
    "Binary files ",
    "old mode",
    "new mode",
    "Left out: ",
)
REFUSED_NAMES = frozenset(
    {"sitecustomize", "usercustomize", "conftest", "pytest", "_pytest", "pyvenv", "__pycache__", "__main__"}
)
REFUSED_SUFFIXES = (".pth", ".pyc", ".pyo", ".so", ".pyd", ".egg-link", ".zip")


class PatchError(ValueError):
    """The patch is malformed, does not fit the task, or touches what it must not: a result of the policy."""


@dataclass(slots=True)
class Change:
    """One file of a patch: hunks of (first old line, from 1; old lines; new lines), lines with their ends."""

    path: str
    creates: bool = False
    deletes: bool = False
    hunks: list[tuple[int, list[str], list[str]]] = field(default_factory=list)


def make_patch(task: Task, tree: Mapping[str, bytes]) -> str:
    """The difference of a submitted tree to ``task.files``, files in order of path. What no text diff can carry gets a
    line ``Left out: PATH (reason)``, with which no patch applies."""
    return "".join(_file_diff(path, task.files.get(path), tree.get(path)) for path in sorted({*task.files, *tree}))


def apply_patch(task: Task, patch: str) -> dict[str, str]:
    """The task's tree with the patch applied and every protected path as in the task. Raises PatchError."""
    if len(patch) > MAX_PATCH_BYTES:
        raise PatchError(f"the patch has {len(patch)} bytes; {MAX_PATCH_BYTES} are allowed")
    changes = list(_parse(patch))
    if len(changes) > MAX_FILES:
        raise PatchError(f"the patch touches {len(changes)} files; {MAX_FILES} are allowed")
    tree = dict(task.files)
    for change in changes:
        _check(task, change)
        if change.path in task.protected:
            continue
        _apply(tree, change)
        if len(tree.get(change.path, "")) > MAX_FILE_BYTES:
            raise PatchError(f"{change.path} becomes larger than {MAX_FILE_BYTES} bytes")
    folders = {"/".join(parts[:n]) for path in tree for parts in [path.split("/")] for n in range(1, len(parts))}
    if both := folders & tree.keys():
        raise PatchError(f"{min(both)} is a file and a folder")
    return tree


def _file_diff(path: str, old: str | None, raw: bytes | None) -> str:
    if old is not None and raw is not None and old.encode() == raw:
        return ""
    new = None
    if raw is not None:
        if len(raw) > MAX_FILE_BYTES:
            return f"Left out: {path} (it has {len(raw)} bytes; {MAX_FILE_BYTES} are allowed)\n"
        try:
            new = raw.decode()
        except UnicodeDecodeError:
            return f"Left out: {path} (it is not UTF-8 text)\n"
    head = [f"diff --git a/{path} b/{path}"]
    head += ["new file mode 100644"] if old is None else []
    head += ["deleted file mode 100644"] if new is None else []
    body = [_line(mark, text) for mark, text in _hunks(_lines(old or ""), _lines(new or ""))]
    if body:
        head += [f"--- a/{path}" if old is not None else "--- /dev/null"]
        head += [f"+++ b/{path}" if new is not None else "+++ /dev/null"]
    return "\n".join(head) + "\n" + "".join(body)


def _lines(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends one."""
    return text.replace("\n", "\n\0").removesuffix("\0").split("\0") if text else []


def _line(mark: str, text: str) -> str:
    return f"{mark}{text}" if text.endswith("\n") else f"{mark}{text}\n{NO_NEWLINE}\n"


def _hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(mark, text) of every line of every hunk, headers with an empty mark."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    if max(len(old), len(new)) - same > MAX_DIFF_LINES:
        groups = [[("replace", same, len(old), same, len(new))]]
    else:
        groups = [list(g) for g in difflib.SequenceMatcher(None, old, new, False).get_grouped_opcodes(CONTEXT)]
    for group in groups:
        a, b, c, d = group[0][1], group[-1][2], group[0][3], group[-1][4]
        yield "", f"@@ -{a + (b > a)},{b - a} +{c + (d > c)},{d - c} @@\n"
        for tag, i, j, k, m in group:
            if tag == "equal":
                yield from ((" ", text) for text in old[i:j])
            else:
                yield from (("-", text) for text in old[i:j])
                yield from (("+", text) for text in new[k:m])


def _parse(patch: str) -> Iterator[Change]:
    lines = patch.split("\n")
    at, change = 0, None
    while at < len(lines):
        line = lines[at]
        if line.startswith(REFUSED_HEADERS):
            raise PatchError(line[:200])
        if line.startswith("diff --git "):
            if change is not None:
                yield change
            change = Change(_git_path(line))
        elif line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            old, new = _header_path(line, "a/"), _header_path(lines[at + 1], "b/")
            names = {old, new} - {None}
            if len(names) != 1:
                raise PatchError(f"a file has two names: {line[:200]}")
            if change is None or change.hunks:
                if change is not None:
                    yield change
                change = Change(old or new or "")
            if change.path != (old or new):
                raise PatchError(f"a file has two names: {change.path!r} and {old or new!r}")
            change.creates |= old is None
            change.deletes |= new is None
            at += 1
        elif line.startswith(("new file mode ", "deleted file mode ")):
            if change is None or not line.endswith((" 100644", " 100755")):
                raise PatchError(f"only ordinary files may change: {line[:200]}")
            change.creates |= line.startswith("new")
            change.deletes |= line.startswith("deleted")
        elif line.startswith("@@ "):
            if change is None:
                raise PatchError("a hunk stands before any file")
            at = _hunk(lines, at, change)
            continue
        elif line and not line.startswith("index ") and change is not None:
            raise PatchError(f"not a line of a patch: {line[:200]!r}")
        at += 1
    if change is not None:
        yield change


def _git_path(line: str) -> str:
    both = line.removeprefix("diff --git ")
    half = len(both) // 2
    if both[:2] != "a/" or both[half : half + 3] != " b/" or both[2:half] != both[half + 3 :]:
        raise PatchError(f"a file has two names: {line[:200]}")
    return both[2:half]


def _header_path(line: str, prefix: str) -> str | None:
    name = line[4:].split("\t")[0]
    return None if name == "/dev/null" else name.removeprefix(prefix)


def _hunk(lines: Sequence[str], at: int, change: Change) -> int:
    """Read one hunk into ``change``; the number of the line after it."""
    match = HUNK.match(lines[at])
    if match is None:
        raise PatchError(f"not a hunk: {lines[at][:200]}")
    start, olds, _, news = (1 if g is None else int(g) for g in match.groups())
    old: list[str] = []
    new: list[str] = []
    at += 1
    while len(old) < olds or len(new) < news or (at < len(lines) and lines[at].startswith("\\")):
        if at >= len(lines):
            raise PatchError(f"a hunk of {change.path} is cut")
        mark, text = lines[at][:1], lines[at][1:] + "\n"
        sides = {" ": (old, new), "": (old, new), "-": (old,), "+": (new,)}.get(mark)
        if mark == "\\":
            _cut_newline(lines[at - 1][:1], old, new)
        elif sides is None:
            raise PatchError(f"a hunk of {change.path} holds {lines[at][:200]!r}")
        else:
            for side in sides:
                side.append(text)
        at += 1
    if (len(old), len(new)) != (olds, news):
        raise PatchError(f"a hunk of {change.path} does not have the lines that it announces")
    change.hunks.append((start if olds else start + 1, old, new))
    return at


def _cut_newline(mark: str, old: list[str], new: list[str]) -> None:
    for side, marks in ((old, "- "), (new, "+ ")):
        if side and mark in marks:
            side[-1] = side[-1].removesuffix("\n")


def _apply(tree: dict[str, str], change: Change) -> None:
    path = change.path
    if change.creates == (path in tree):
        raise PatchError(f"{path} exists already" if change.creates else f"{path} does not exist")
    source, result, at = _lines(tree.get(path, "")), list[str](), 0
    for start, old, new in change.hunks:
        first = start - 1
        if first < at or source[first : first + len(old)] != old:
            raise PatchError(f"{path} differs from what the patch expects at line {start}")
        result += source[at:first] + new
        at = first + len(old)
    result += source[at:]
    if any(not line.endswith("\n") for line in result[:-1]):
        raise PatchError(f"{path} has a line without an end in its middle")
    tree[path] = "".join(result)
    if change.deletes and tree.pop(path):
        raise PatchError(f"{path} is deleted, but not all of its lines are")


def _check(task: Task, change: Change) -> None:
    """Where a patch may write, and which new files could stand in for the tests, the runner or the standard library."""
    path = change.path
    try:
        check_path(path)
    except BadInput:
        raise PatchError(f"{path!r} is not a path inside the task") from None
    if path in task.files:
        return
    parts = path.split("/")
    stems = [part.split(".")[0] for part in parts]
    if set(stems) & REFUSED_NAMES or path.endswith(REFUSED_SUFFIXES):
        raise PatchError(f"{path} could change how tests run")
    known_roots = {known.split("/")[0].split(".")[0] for known in task.files}
    if stems[0] in sys.stdlib_module_names and stems[0] not in known_roots:
        raise PatchError(f"{path} would stand in for the standard library")
    module = stems[:-1] if stems[-1] == "__init__" else stems
    for protected in task.protected:
        tested = [part.split(".")[0] for part in protected.split("/")]
        if module == tested[: len(module)] or tested == module[: len(tested)]:
            raise PatchError(f"{path} would stand in for {protected}")
