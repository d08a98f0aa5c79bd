"""Task files: what is written reads back, and what is wrong is named with file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.tasks.files import load_tasks, save_tasks

TASK = Task(
    "t",
    "Mend it.",
    {"a.py": "x = 1\n", "test_a.py": "t"},
    ("test_a.py::test",),
    ("test_a.py",),
    {"a.py": "x = 2\n"},
    {},
)


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.zst"])
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    tasks = [TASK, replace(TASK, id="u", statement="Lines\u2028and\x85pages\x0cstay.")]
    save_tasks(tmp_path / name, tasks)
    assert load_tasks(str(tmp_path / name)) == tasks


def test_characters_that_end_lines_elsewhere_may_stand_in_texts(tmp_path: Path) -> None:
    save_tasks(tmp_path / "t.jsonl", [replace(TASK, statement="a\u2028b")])
    text = (tmp_path / "t.jsonl").read_text().replace("\\u2028", "\u2028")
    (tmp_path / "t.jsonl").write_text(text)
    assert load_tasks(str(tmp_path / "t.jsonl"))[0].statement == "a\u2028b"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"id": ""}, "'id' is not what it should be"),
        ({"tests": []}, "at least one test"),
        ({"files": {"../a.py": ""}}, "'files' is not what it should be"),
        ({"files": {"/a.py": ""}}, "'files' is not what it should be"),
        ({"protected": ["nowhere.py"]}, "a file 'nowhere.py'"),
        ({"fix": {"nowhere.py": ""}}, "a file 'nowhere.py'"),
        ({"meta": 3}, "'meta' is not what it should be"),
    ],
)
def test_a_wrong_task_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    save_tasks(tmp_path / "t.jsonl", [TASK])
    good = (tmp_path / "t.jsonl").read_text()
    (tmp_path / "t.jsonl").write_text(good + json.dumps(json.loads(good) | {"id": "u"} | change) + "\n")
    with pytest.raises(BadInput) as caught:
        load_tasks(str(tmp_path / "t.jsonl"))
    assert str(caught.value).startswith(f"{tmp_path / 't.jsonl'}, line 2: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [(b"", "no tasks"), (b"{", "line 1: not JSON"), (b"3\n", "not a JSON object"), (b"\xff", "cannot read the tasks")],
)
def test_what_is_no_task_file_is_said(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(raw)
    with pytest.raises(BadInput, match=says):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_two_tasks_of_one_name_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    save_tasks(tmp_path / "t.jsonl", [TASK, TASK])
    with pytest.raises(BadInput, match="two tasks are named 't'"):
        load_tasks(str(tmp_path / "t.jsonl"))
    with pytest.raises(BadInput, match="cannot read the tasks"):
        load_tasks(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadInput, match="no packaged tasks"):
        load_tasks("builtin:nothing")
