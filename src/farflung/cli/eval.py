"""farflung eval: pass@1 and pass@4 of a model, or of a run's policy, on held-out tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.cli.args import Overrides, Parser, check_output
from farflung.cli.recipes import find_recipe, parse
from farflung.core.errors import BadInput

if TYPE_CHECKING:
    from farflung.evaluation.held_out import EvalResult

DESCRIPTION = """Measure how many held-out tasks a policy solves: every task several times, sampled from the whole vocabulary at
temperature 1, weights and cache in BF16. A run's result is recorded in its ledger and shown in its report, unless
keys of the recipe are changed for it."""
EXAMPLES = """  farflung eval runs/my                              the policy that the run made
  farflung eval runs/my --start                      the one that it started from
  farflung eval builtin:repair-1m --eval.tasks 20    a packaged policy
  farflung eval ./some-model --recipe my.toml        a model folder or Hub id, with a recipe's tasks and limits
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("eval", DESCRIPTION, EXAMPLES)
    parser.add_argument("what", metavar="RUN|MODEL", help="a run's folder, a model folder, a Hub id or builtin:NAME")
    parser.add_argument("--start", action="store_true", help="of a run: the policy that it started from")
    parser.add_argument("--recipe", help="of a model: the recipe that names tasks and limits (defaults)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result as JSON")
    parser.add_argument_group("recipe", "any key can be set with dots, e.g. --eval.tasks 20 --eval.samples 8")
    args, overrides = parse(parser, argv)
    check_output(args.json, "--json")
    is_run = (Path(args.what) / "recipe.json").is_file()
    if args.start and not is_run:
        raise BadInput("--start is for a run", where=f"eval {args.what}")
    if args.recipe and is_run:
        raise BadInput("a run has a recipe", where=f"eval {args.what}", mend="leave --recipe out")
    if is_run:
        result = _run(Path(args.what), args.start, overrides)
    else:
        result = _model(args.what, args.recipe, overrides)
    for k in (1, 4):
        print(f"pass@{k} {result.pass_at(k)}")
    print(f"{len(result.tallies)} tasks, ends: {', '.join(f'{name} {count}' for name, count in result.ends.items())}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    return 0


def _run(folder: Path, start: bool, overrides: Overrides) -> EvalResult:
    """Measure a run's policy and record it as what came before or after the training."""
    from rich.console import Console

    from farflung.config import override_recipe
    from farflung.report import draw_report
    from farflung.run.evaluate import evaluate_policy
    from farflung.run.ledger import Ledger
    from farflung.run.workspace import Workspace
    from farflung.tasks.files import load_tasks

    space = Workspace.open(folder)
    model = space.model if start else space.policy
    if not (model / "config.json").is_file():
        raise BadInput(
            "the run has made no policy yet",
            where=str(model),
            mend=f"let it end (farflung train --resume {folder}), or measure what it started from with --start",
        )
    name = "before" if start else "after"
    recipe = override_recipe(space.recipe, overrides)
    console = Console(stderr=True)
    ledger = Ledger(folder)  # a damaged one is better found before the measuring
    try:
        result = evaluate_policy(
            model, recipe, load_tasks(recipe.tasks.heldout), token_file=space.token_file, logs=folder / "logs", name=name,
            console=console,
        )  # fmt: skip
        if recipe == space.recipe:
            ledger.add_evaluation(name, result.to_dict())
        else:
            console.print("not recorded: measured in another way than the run's recipe says")
    finally:
        ledger.close()
    draw_report(folder)
    return result


def _model(name: str, recipe_name: str | None, overrides: Overrides) -> EvalResult:
    from rich.console import Console

    from farflung.config import Recipe, load_recipe, override_recipe
    from farflung.run.evaluate import evaluate_model
    from farflung.run.workspace import resolve_model
    from farflung.tasks.files import load_tasks

    if recipe_name:
        recipe = load_recipe(find_recipe(recipe_name), overrides)
    else:
        recipe = override_recipe(Recipe(), overrides)
    console = Console(stderr=True)
    return evaluate_model(resolve_model(name), recipe, load_tasks(recipe.tasks.heldout), name="model", console=console)
