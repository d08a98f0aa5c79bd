"""farflung train: run a recipe, or go on with a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser
from farflung.cli.recipes import add_shortcuts, dry_run, find_recipe, parse
from farflung.core.errors import BadInput

DESCRIPTION = "Train a model by a recipe: samplers, rollouts and trainer run at the same time, as local processes."
EXAMPLES = """  farflung train my.toml
  farflung train my.toml --dry-run                         show what would run
  farflung train my.toml --train.lr 1e-4 --minutes 30      change keys of the recipe
  farflung train builtin:quickstart --sync --dir runs/s    a packaged recipe, in turns instead of at the same time
  farflung train --resume runs/my                          go on after Ctrl-C or a crash
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("train", DESCRIPTION, EXAMPLES)
    parser.add_argument("recipe", nargs="?", help="a TOML file, or builtin:NAME for a packaged one")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument("--dir", type=Path, help="the run's folder (runs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and what would run")
    add_shortcuts(parser)
    args, overrides = parse(parser, argv)
    if (args.recipe is None) == (args.resume is None):
        raise BadInput(
            "either a recipe or --resume is needed",
            where="train",
            mend="farflung train my.toml, or farflung train --resume runs/my",
        )
    if args.resume is not None:
        if overrides or args.dir is not None:
            raise BadInput("a run goes on with the recipe and the folder that it has", where="--resume")
        if args.dry_run:
            from farflung.run.workspace import Workspace

            print(dry_run(Workspace.open(args.resume).recipe, "the rest of a run", args.resume))
            return 0
        return _train(args.resume)

    from farflung.config import load_recipe

    path = find_recipe(args.recipe)
    recipe = load_recipe(path, overrides)
    folder: Path = args.dir or Path("runs") / recipe.run.name
    if args.dry_run:
        print(dry_run(recipe, args.recipe, folder))
        return 0

    from farflung.run.workspace import Workspace

    Workspace.create(folder, recipe)
    return _train(folder)


def _train(folder: Path) -> int:
    """Run what lies in ``folder`` to its end; 130 if it was stopped by hand."""
    from farflung.run.workspace import Workspace

    space = Workspace.open(folder)

    from rich.console import Console

    from farflung.report import draw_report
    from farflung.run.train import train

    console = Console()
    outcome = train(space, console=console)
    page = draw_report(folder)
    console.print(f"update {outcome.update}, {outcome.wall_s:.0f} s; report: {page}", highlight=False)
    quoted = shlex.quote(str(folder))
    if outcome.stopped:
        console.print(
            f"{outcome.stopped}; go on with: farflung train --resume {quoted}", highlight=False, soft_wrap=True
        )
        return 130
    console.print(
        f"policy: {folder / 'policy'}; measure it with: farflung eval {quoted}", highlight=False, soft_wrap=True
    )
    return 0
