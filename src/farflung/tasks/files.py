"""Task files: one JSON object a line, read strictly; ``builtin:SET/SPLIT`` names a packaged one."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

from farflung.core.errors import BadInput
from farflung.core.task import Task

BUILTIN = "builtin:"
SUFFIXES = (".jsonl", ".jsonl.zst")
MAX_BYTES = 1 << 30
KEYS = {"id", "statement", "files", "tests", "protected", "fix", "meta"}
OPTIONAL = {"fix", "meta"}


def load_tasks(name: str) -> list[Task]:
    """The tasks of a file or a packaged set, in order. Raises BadInput naming file, line, key and mend."""
    path = _resolve(name)
    try:
        raw = path.read_bytes()
        if path.suffix == ".zst":
            raw = zstandard.ZstdDecompressor().decompress(raw, max_output_size=MAX_BYTES)
        lines = raw.decode().split("\n")  # splitlines would also split at characters that JSON allows in texts
    except (OSError, zstandard.ZstdError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        mend = "give the path of a task file, as seen from here, or builtin:SET/SPLIT"
        raise BadInput(f"cannot read the tasks: {why}", where=str(path), mend=mend) from None
    tasks = [_task(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise BadInput("it holds no tasks", where=str(path))
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise BadInput(f"two tasks are named {task.id!r}", where=str(path))
        seen.add(task.id)
    return tasks


def save_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write tasks so that ``load_tasks`` reads the same; a name that ends in .zst is compressed."""
    text = "".join(json.dumps({key: _plain(getattr(task, key)) for key in Task.__slots__}) + "\n" for task in tasks)
    raw = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor(19).compress(raw) if path.suffix == ".zst" else raw)


def _resolve(name: str) -> Path:
    if not name.startswith(BUILTIN):
        return Path(name).expanduser()
    folder = Path(str(importlib.resources.files("farflung"))) / "assets" / "tasks"
    for suffix in SUFFIXES:
        path = folder / (name.removeprefix(BUILTIN) + suffix)
        if path.is_file():
            return path
    found = sorted(str(p.relative_to(folder)).split(".")[0] for p in folder.rglob("*.jsonl*"))
    raise BadInput(
        f"no packaged tasks {name!r}", where="tasks", mend=f"packaged: {', '.join(BUILTIN + f for f in found)}"
    )


def _task(line: str, where: str) -> Task:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise BadInput(f"not JSON: {error}", where=where) from None
    if not isinstance(data, dict):
        raise BadInput("not a JSON object", where=where)
    if unknown := sorted(set(data) - KEYS):
        raise BadInput(f"unknown key {unknown[0]!r}", where=where, mend=f"keys: {', '.join(sorted(KEYS))}")
    if missing := sorted(KEYS - OPTIONAL - set(data)):
        raise BadInput(f"{missing[0]!r} is missing", where=where)
    for key in ("id", "statement"):
        _require(isinstance(data[key], str) and data[key].strip() != "", key, "a text that is not empty", where)
    for key in ("tests", "protected"):
        good = isinstance(data[key], list) and all(isinstance(item, str) and item for item in data[key])
        _require(good, key, "a list of texts", where)
    for key in ("files", "fix"):
        value = data.get(key, {})
        good = isinstance(value, dict) and all(isinstance(text, str) and _safe(path) for path, text in value.items())
        _require(good, key, "an object from relative paths to texts", where)
    _require(isinstance(data.get("meta", {}), dict), "meta", "an object", where)
    _require(len(data["tests"]) > 0, "tests", "at least one test", where)
    for path in (*data["protected"], *data.get("fix", {})):
        _require(path in data["files"], "files", f"a file {path!r}, since protected or fix names it", where)
    return Task(
        data["id"], data["statement"], data["files"], tuple(data["tests"]), tuple(data["protected"]), data.get("fix", {}),
        data.get("meta", {}),
    )  # fmt: skip


def _require(good: bool, key: str, wanted: str, where: str) -> None:
    if not good:
        raise BadInput(f"{key!r} is not what it should be", where=where, mend=f"wanted: {wanted}")


def _safe(path: str) -> bool:
    pure = PurePosixPath(path)
    return path != "" and not pure.is_absolute() and ".." not in pure.parts and "\0" not in path


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
