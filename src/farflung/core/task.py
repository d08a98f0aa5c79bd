"""A task: a small repository with a problem, and the tests that decide whether the problem is solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """``files`` (path -> text) is the tree that the agent sees, fault included; ``statement`` is what it is asked.

    ``tests`` are the unittest ids that must all pass; ``protected`` are the paths restored from ``files`` before grading;
    ``fix`` (path -> text) is the reference repair, never shown to the agent. ``meta`` is for people and statistics.
    """

    id: str
    statement: str
    files: Mapping[str, str]
    tests: tuple[str, ...]
    protected: tuple[str, ...]
    fix: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
