"""Patches: what a tree becomes as a diff, applied again, is the same tree; git agrees; the reading rule counts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflung.core.task import Task
from farflung.tasks.patch import MAX_FILE_BYTES, PatchError, apply_patch, make_patch
from farflung.tasks.reach import new_reach

LINES = st.lists(
    st.sampled_from(["a", "b", "", "  c", "-- x", "++ y", "@@ -1 +1 @@", "\\ z", "d\r", "é", "\x0c", "\u2028"]),
    max_size=12,
)
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end, LINES, st.sampled_from(["", "\n", "\n\n"]))
TREES = st.dictionaries(st.sampled_from(["m.py", "p/m.py", "p/q r.txt", "long.name"]), TEXTS, max_size=4)


def task(files: dict[str, str], protected: tuple[str, ...] = ()) -> Task:
    return Task("t", "", files, (), protected)


def encoded(tree: dict[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in tree.items()}


@given(TREES, TREES)
@settings(max_examples=300, deadline=None)
def test_applying_the_patch_gives_the_tree(old: dict[str, str], new: dict[str, str]) -> None:
    patch = make_patch(task(old), encoded(new))
    assert apply_patch(task(old), patch) == new
    assert patch == make_patch(task(old), dict(reversed(encoded(new).items())))
    assert (patch == "") == (old == new)


@given(TREES, TREES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_git_applies_it_alike(tmp_path: Path, old: dict[str, str], new: dict[str, str]) -> None:
    git = shutil.which("git")
    patch = make_patch(task(old), encoded(new))
    if git is None or not patch:
        return
    shutil.rmtree(tmp_path)
    for name, text in old.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    tmp_path.mkdir(exist_ok=True)
    environment = {"GIT_DIR": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [git, "apply", "--whitespace=nowarn", "-"],
        input=patch.encode(),
        cwd=tmp_path,
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == encoded(new)


def test_protected_files_stay_whatever_the_patch_does_to_them() -> None:
    files = {"m.py": "1\n", "test_m.py": "t\n"}
    for content in ({"m.py": b"2\n"}, {"m.py": b"2\n", "test_m.py": b"easy\n"}):
        patch = make_patch(task(files), content)
        assert apply_patch(task(files, ("test_m.py",)), patch) == {"m.py": "2\n", "test_m.py": "t\n"}


def test_what_no_text_diff_can_carry_is_named_and_refused() -> None:
    for content, reason in ((b"\xff", "not UTF-8"), (b"x" * (MAX_FILE_BYTES + 1), "bytes")):
        patch = make_patch(task({}), {"f": content})
        assert patch.startswith("Left out: f (")
        with pytest.raises(PatchError, match=reason):
            apply_patch(task({}), patch)


def test_large_changes_become_one_hunk_quickly() -> None:
    old = "".join(f"{n % 7}\n" for n in range(20_000))
    new = "same\n" + "".join(f"{n % 5}\n" for n in range(20_000))
    assert apply_patch(task({"f": old}), make_patch(task({"f": old}), {"f": new.encode()})) == {"f": new}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import unittest.mock", "import of unittest.mock"),
        ("from gc import get_objects", "import from gc"),
        ("from os import _exit as quit", "import of _exit from os"),
        ("from os import *", "import of * from os"),
        ("x = a.__globals__", "__globals__"),
        ("getattr(a, '__globals__')", "__globals__"),
        ("getattr(a, '__glo' + 'bals__')", "getattr of a computed name"),
        ("class A:\n    def __eq__(self, o): return True", "__eq__"),
        ("class A:\n    __eq__ = f", "__eq__"),
        ("class A(metaclass=M): pass", "metaclass"),
        ("match f:\n case object(__globals__=g): pass", "__globals__"),
        ("import random\nrandom.random = f", "assignment to random.random"),
        ("from tests import test_m", "import of test_m from the tests"),
        ("import tests.test_m as t", "import of tests.test_m"),
        ("from .tests.test_m import A", "import of A from the tests"),
        ("-" * 100_000 + "1", "nesting without end"),
        ("import os, math, json\nfrom . import core\nself.x = getattr(a, 'b', None)", None),
        ("import tests_of_mine", None),
        ("not python", None),
    ],
)  # fmt: skip
def test_reach(text: str, found: str | None) -> None:
    assert new_reach(text, (), ("tests/test_m.py",)) == found


def test_reach_that_was_there_or_belongs_to_the_fix_is_allowed() -> None:
    text = "import inspect\ninspect.x\n"
    assert new_reach(text, ("", text)) is None
    assert new_reach(text + "import inspect\n", (text, "")) == "import of inspect"
