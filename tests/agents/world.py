"""A task, a scripted policy that speaks a real dialect, and a sandbox whose every answer the test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from farflung.agents.dialect import Dialect
from farflung.core.sampling import Completion, GenerateRequest, Source
from farflung.core.supports import Supports
from farflung.core.task import Task
from farflung.sandboxes.base import CommandResult

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
TEST = (
    "import unittest\n\nfrom calc.core import add\n\n\nclass TestCore(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
)
TASK = Task(
    id="calc-1",
    statement="add in calc/core.py is wrong.",
    files={"calc/__init__.py": "", "calc/core.py": WRONG, "tests/__init__.py": "", "tests/test_core.py": TEST},
    tests=("tests.test_core.TestCore.test_add",),
    protected=("tests/__init__.py", "tests/test_core.py"),
    fix={"calc/core.py": RIGHT},
)
MEND = "sed -i 's/a - b/a + b/' calc/core.py"
SOURCE = Source("pool", "pool-0", "bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Say:
    """A reply that is given as text; ``ends`` tells whether the model ended it itself."""

    text: str
    ends: bool = True


Reply = str | Say | Exception


def reply_ids(dialect: Dialect, reply: str | Say) -> np.ndarray:
    """A string is a command that is called."""
    if isinstance(reply, str):
        return dialect.reply(reply)
    ids = np.array(dialect._tokenizer.encode(reply.text, add_special_tokens=False).ids, np.int32)
    return np.append(ids, dialect.stop_ids[0]).astype(np.int32) if reply.ends else ids


def complete(ids: np.ndarray, request: GenerateRequest, *, version: int = 0, source: Source = SOURCE) -> Completion:
    """As a sampler would have it: cut at the asked length, every token with two candidates when top_k is bounded."""
    ids = ids[: request.params.max_tokens]
    n = len(ids)
    logprobs = np.full(n, np.log(0.75), np.float32)
    supports = None
    if request.params.top_k:
        pairs = np.stack([ids, np.where(ids == 0, 1, 0)], 1).astype(np.int32).reshape(-1)
        two = np.tile(np.log([0.75, 0.25]), n).astype(np.float32)
        supports = Supports(pairs, two, np.arange(n + 1, dtype=np.int64) * 2)
    stop = n > 0 and int(ids[-1]) in request.params.stop_ids
    return Completion(ids, logprobs, np.full(n, version, np.int32), supports, "stop" if stop else "length", source)


@dataclass(slots=True)
class Script:
    """A sampler that reads its replies off a list, the same list for every session; keeps all requests."""

    dialect: Dialect
    replies: Sequence[Reply]
    version_of_turn: Callable[[int], int] = lambda turn: 0
    source_of_turn: Callable[[int], Source] = lambda turn: SOURCE
    requests: list[GenerateRequest] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    _at: dict[str, Iterator[Reply]] = field(default_factory=dict)
    _turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        reply = next(self._at.setdefault(request.session, iter(self.replies)))
        turn = self._turns[request.session] = self._turns.get(request.session, -1) + 1
        if isinstance(reply, Exception):
            raise reply
        return complete(
            reply_ids(self.dialect, reply),
            request,
            version=self.version_of_turn(turn),
            source=self.source_of_turn(turn),
        )

    async def forget(self, session: str) -> None:
        self.forgotten.append(session)


Answer = str | CommandResult | Exception


@dataclass(slots=True)
class FakeBox:
    """Answers commands from a table; a string is an output that ended well. Keeps what was asked."""

    answers: Mapping[str, Answer]
    files: dict[str, str]
    asked: list[tuple[str, float, int]] = field(default_factory=list)
    closed: int = 0

    async def exec(self, command: str, *, seconds: float, max_bytes: int) -> CommandResult:
        self.asked.append((command, seconds, max_bytes))
        answer = self.answers.get(command, "")
        if isinstance(answer, Exception):
            raise answer
        return CommandResult(0, answer, 0.01) if isinstance(answer, str) else answer

    async def write(self, files: Mapping[str, str]) -> None:
        self.files.update(files)

    async def read_tree(self, *, max_bytes: int = 4 << 20) -> dict[str, bytes]:
        answer = self.answers.get("read_tree")
        if isinstance(answer, Exception):
            raise answer
        return {path: text.encode() for path, text in self.files.items()}

    async def close(self) -> None:
        self.closed += 1


@dataclass(slots=True)
class FakeFactory:
    answers: Mapping[str, Answer] = field(default_factory=dict)
    failure: Exception | None = None
    boxes: list[FakeBox] = field(default_factory=list)

    async def open(self, files: Mapping[str, str]) -> FakeBox:
        if self.failure is not None:
            raise self.failure
        box = FakeBox(self.answers, dict(files))
        self.boxes.append(box)
        return box
