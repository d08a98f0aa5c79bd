"""Makes the packaged tasks and the packaged policy: tasks, proofs, solved episodes, vocabulary, training, model card."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from farflung.agents.dialect import Dialect
from farflung.agents.solver import Habits
from farflung.config import Recipe
from farflung.core.errors import BadInput
from farflung.core.task import Task
from farflung.evaluation.held_out import EvalResult
from farflung.run.demonstrations import Demonstration, encode, record
from farflung.run.model_card import model_card
from farflung.run.tokenizer import END, PAD, SPECIALS, train_tokenizer
from farflung.sandboxes import SandboxFactory, open_factory
from farflung.tasks.files import save_tasks
from farflung.tasks.repair import generate, signature
from farflung.tasks.validate import validate

VOCABULARY_EPISODES = 4000
COMMON = ("bash", "[no output]", "[exit code 1]", "[exit code 2]")  # what the harness says, beside what programs print


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make. The defaults make what is packaged."""

    seed: int = 0
    train_tasks: int = 800
    heldout_tasks: int = 128
    demonstrations: int = 32_000
    steps: int = 3000
    batch: int = 48
    lr: float = 2e-3
    habits: Habits = field(default_factory=Habits)

    def __post_init__(self) -> None:
        for name in ("train_tasks", "heldout_tasks", "demonstrations", "steps", "batch"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; at least 1 is needed", where="warmstart")

    @property
    def command(self) -> str:
        """The command line that makes this plan."""
        words = [f"--{f.name.replace('_', '-')} {getattr(self, f.name)}" for f in fields(self) if f.name != "habits"
                 and getattr(self, f.name) != f.default]  # fmt: skip
        return " ".join(["farflung warmstart OUT", *words])


@dataclass(frozen=True, slots=True)
class Tasks:
    """``demonstrated`` never ends. No module of one part occurs in another."""

    heldout: list[Task]
    train: list[Task]
    demonstrated: Iterator[Task]


def warmstart(out: Path, plan: Plan = Plan(), *, console: Console | None = None) -> Path:
    """Fill the new folder ``out``: ``tasks/train.jsonl.zst``, ``tasks/heldout.jsonl.zst``, ``demonstrations.jsonl.zst`` and
    ``policy/``, a Hugging Face folder with its card. The same for the same plan. Returns ``policy/``."""
    console = console or Console(stderr=True)
    if out.exists() and any(out.iterdir()):
        raise BadInput("the folder is not empty", where=str(out), mend="name a new one")
    recipe = Recipe()
    factory = open_factory(recipe.sandbox)
    tasks = make_tasks(plan)
    with _bar(console, "validating tasks", plan.train_tasks + plan.heldout_tasks) as tick:
        asyncio.run(validate([*tasks.heldout, *tasks.train], factory, recipe.sandbox, progress=tick))
    save_tasks(out / "tasks" / "train.jsonl.zst", tasks.train)
    save_tasks(out / "tasks" / "heldout.jsonl.zst", tasks.heldout)
    with _bar(console, "recording demonstrations", plan.demonstrations) as tick:
        episodes = asyncio.run(_record(plan, tasks.demonstrated, factory, recipe, tick))
    _save_episodes(out / "demonstrations.jsonl.zst", episodes)
    policy = out / "policy"
    train_tokenizer(_texts(episodes), 1024, policy)
    with _bar(console, "training", plan.steps) as tick:
        loss = train(episodes, plan, policy, tick)
    result = measure(policy, tasks.heldout, recipe, console)
    (policy / "README.md").write_text(model_card(plan, loss, result))
    return policy


def make_tasks(plan: Plan) -> Tasks:
    """All tasks of a plan: three seeds of the generator, each leaving out what came before."""
    heldout = list(islice(generate(3 * plan.seed + 2), plan.heldout_tasks))
    taken = {signature(task) for task in heldout}
    train = list(islice(generate(3 * plan.seed + 1, taken), plan.train_tasks))
    taken |= {signature(task) for task in train}
    return Tasks(heldout, train, generate(3 * plan.seed, taken))


def train(episodes: list[Demonstration], plan: Plan, policy: Path, tick: Callable[[int], None]) -> float:
    """Train on the episodes with the tokenizer in ``policy`` and save the model there. Returns the last loss."""
    from farflung.run.supervised import Shape, fit, new_model

    dialect = Dialect.load(policy)
    samples = [encode(episode, dialect) for episode in episodes]
    model = new_model(Shape(), plan.seed, end_id=SPECIALS.index(END), pad_id=SPECIALS.index(PAD))
    losses: list[float] = []

    def heard(step: int, loss: float) -> None:
        losses.append(loss)
        tick(step)

    fit(model, samples, steps=plan.steps, batch=plan.batch, lr=plan.lr, seed=plan.seed, progress=heard)
    model.bfloat16().save_pretrained(policy)
    return sum(losses[-50:]) / len(losses[-50:])


def measure(policy: Path, heldout: list[Task], recipe: Recipe, console: Console) -> EvalResult:
    """pass@1 on held-out tasks as a run measures it: temperature 1, whole vocabulary, BF16."""
    from farflung.run.evaluate import evaluate_model

    return evaluate_model(policy, recipe, heldout, name="policy", console=console)


async def _record(
    plan: Plan, tasks: Iterator[Task], factory: SandboxFactory, recipe: Recipe, tick: Callable[[int], None]
) -> list[Demonstration]:
    episodes: list[Demonstration] = []
    async for episode in record(tasks, factory, recipe.agent, seed=plan.seed, habits=plan.habits):
        episodes.append(episode)
        tick(len(episodes))
        if len(episodes) == plan.demonstrations:
            break
    return episodes


def _texts(episodes: list[Demonstration]) -> Iterator[str]:
    for episode in episodes[:VOCABULARY_EPISODES]:
        yield episode.statement
        yield from COMMON
        for turn in episode.turns:
            yield from (turn.command, turn.output)


def _save_episodes(path: Path, episodes: list[Demonstration]) -> None:
    lines: Iterator[dict[str, Any]] = map(asdict, episodes)
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(zstandard.ZstdCompressor(9).compress(raw))


@contextmanager
def _bar(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar, or one plain line at the end where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=total)
        yield lambda done: bars.update(bar, completed=done)
    console.print(f"{name}: {total} in {time.monotonic() - started:.0f} s")
