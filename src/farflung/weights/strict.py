"""JSON from a store, read strictly: every field is there, none else, none twice, each of its type and range."""

from __future__ import annotations

import json
import re
from collections.abc import ItemsView
from typing import Any

_SHA256 = re.compile(r"[0-9a-f]{64}")


def loads(raw: bytes) -> dict[str, Any]:
    """A JSON object without repeated keys. Raises ValueError, RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        need(len(keys) == len(pairs), "a key comes twice")
        return keys

    data = json.loads(raw, object_pairs_hook=unique)
    need(isinstance(data, dict), "it is not an object")
    return data  # type: ignore[no-any-return]


def strict_object(data: dict[str, Any], fields: set[str], format: int) -> None:
    """Raises ValueError unless it is of this format and has exactly these fields."""
    need(data.get("format") == format, f"format {data.get('format')!r}, not {format}")
    need(set(data) == fields, f"its fields are {sorted(data)}, not {sorted(fields)}")


def items(value: Any) -> ItemsView[str, Any]:
    need(isinstance(value, dict), f"{str(value)[:100]!r} is not an object")
    return value.items()  # type: ignore[no-any-return]


def count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{str(value)[:100]!r} is not a count")
    return value


def sha256(value: Any) -> str:
    need(isinstance(value, str) and _SHA256.fullmatch(value) is not None, f"{str(value)[:100]!r} is not a SHA-256")
    return value  # type: ignore[no-any-return]


def need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
