from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.evaluation.contamination import fingerprint, require_disjoint

CODE = '"""Doc."""\n\ndef add(a, b):\n    """Sum."""\n    return a - b  # wrong\n'
TASK = Task(
    id="t1",
    statement="add is wrong",
    files={"p/core.py": CODE, "p/__init__.py": "", "tests/test_core.py": "import p\n"},
    tests=("tests.test_core",),
    protected=("tests/test_core.py",),
    fix={"p/core.py": CODE.replace("-", "+")},
)


def test_the_same_fault_is_found_under_another_id_path_layout_and_documentation() -> None:
    other = "def add(a,b):\n\n    return (a - b)\n"
    copy = replace(TASK, id="h1", files={"q/main.py": other, "tests/test_core.py": "import q\n"}, fix={"q/main.py": ""})
    assert fingerprint(copy) == fingerprint(TASK)
    with pytest.raises(BadInput, match="1 held-out tasks occur in training: h1 has the faulty code of t1"):
        require_disjoint([TASK], [copy])


@pytest.mark.parametrize("change", [("a - b", "a * b"), ("def add", "def plus"), ("return a - b", "return b - a")])
def test_another_fault_name_or_function_is_another_task(change: tuple[str, str]) -> None:
    other = replace(TASK, id="h1", files=TASK.files | {"p/core.py": CODE.replace(*change)})
    require_disjoint([TASK], [other])


def test_ids_must_differ_and_many_clashes_are_counted() -> None:
    train = [replace(TASK, id=f"t{i}") for i in range(5)]
    with pytest.raises(BadInput) as error:
        require_disjoint(train, train)
    assert error.value.what == (
        "5 held-out tasks occur in training: t0 is a training task; t1 is a training task; "
        "t2 is a training task, and 2 more"
    )


def test_without_a_known_fix_every_file_that_may_change_counts() -> None:
    unknown = replace(TASK, id="h", fix={})
    assert fingerprint(unknown) != fingerprint(TASK)
    assert fingerprint(unknown) == fingerprint(replace(unknown, files={**TASK.files, "tests/test_core.py": "other"}))
    odd = replace(unknown, files=TASK.files | {"p/core.py": "def broken(:\n\n  x \n"})
    assert fingerprint(odd) == fingerprint(replace(odd, files=odd.files | {"p/core.py": "def broken(:\n  x\n"}))
