"""farflung quickstart: measure the packaged policy, train it, measure it again, show the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser, check_output
from farflung.cli.recipes import add_shortcuts, dry_run, find_recipe, free_folder, parse

DESCRIPTION = """Train a small packaged policy to repair Python packages, here and now: measured on held-out tasks before and after, fed
by samplers in three precisions. A few minutes on two CPU cores."""
EXAMPLES = """  farflung quickstart
  farflung quickstart --updates 3 --eval.tasks 8      a taste
  farflung quickstart --summary result.json           the result as JSON too
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("quickstart", DESCRIPTION, EXAMPLES)
    parser.add_argument("--dir", type=Path, help="the run's folder (runs/quickstart, numbered if it is there already)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and what would run")
    add_shortcuts(parser)
    args, overrides = parse(parser, argv)
    check_output(args.summary, "--summary")

    from farflung.config import load_recipe

    recipe = load_recipe(find_recipe("builtin:quickstart"), overrides)
    folder: Path = args.dir or free_folder(Path("runs") / recipe.run.name)
    if args.dry_run:
        print(dry_run(recipe, "the quickstart", folder))
        return 0

    from rich.console import Console

    from farflung.run.quickstart import quickstart

    quickstart(recipe, folder, console=Console(), summary=args.summary)
    return 0
