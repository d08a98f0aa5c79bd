"""What the commands that run a recipe have in common: finding it, its shortcuts, its folder, and the dry run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.cli.args import Overrides, Parser, nearest, split_overrides
from farflung.core.errors import BadInput

if TYPE_CHECKING:
    from farflung.config import Recipe

SHORTCUTS = ("updates", "minutes", "seed", "sync")
OVERRIDES_HELP = """any key of the recipe can be set with dots, e.g. --train.lr 1e-4 --pools.bf16.replicas 2
(farflung init writes a recipe with every key explained)"""


def add_shortcuts(parser: Parser) -> None:
    """The keys that are set most often, without their section."""
    group = parser.add_argument_group("recipe", OVERRIDES_HELP)
    group.add_argument("--updates", metavar="N", help="optimiser steps (run.updates)")
    group.add_argument("--minutes", metavar="M", help="stop cleanly after this time (run.minutes)")
    group.add_argument("--seed", metavar="N", help="fixes every random number (run.seed)")
    group.add_argument("--sync", action="store_const", const="true", help="sample and train in turns (run.sync)")


def parse(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """The command's own arguments, and the overrides with the shortcuts among them."""
    rest, overrides = split_overrides(argv)
    args = parser.parse_args(rest)
    short = [(f"run.{name}", getattr(args, name, None)) for name in SHORTCUTS]
    return args, overrides + [(key, value) for key, value in short if value is not None]


def find_recipe(name: str, *kinds: str) -> Path:
    """A recipe file, or as builtin:NAME a packaged one for training or of these kinds. Raises BadInput with what there is."""
    if name.startswith("builtin:"):
        assets = Path(str(files("farflung") / "assets"))
        packaged = {path.stem: path for kind in ("recipes", *kinds) for path in (assets / kind).glob("*.toml")}
        wanted = name.removeprefix("builtin:")
        if wanted not in packaged:
            raise BadInput(
                f"no packaged recipe {wanted!r}",
                where="recipe",
                mend=f"{nearest(wanted, packaged)}packaged: {', '.join(f'builtin:{n}' for n in sorted(packaged))}",
            )
        return packaged[wanted]
    path = Path(name)
    if path.is_dir():
        raise BadInput(
            "it is a folder; a recipe is a TOML file", where=name, mend=f"a run goes on with --resume {name}"
        )
    if not path.is_file():
        near = (
            nearest(path.name, [p.name for p in path.parent.glob("*.toml")], cutoff=0.7) if path.parent.is_dir() else ""
        )
        way = "farflung ablate --dry-run prints" if "ablations" in kinds else f"farflung init {name} writes"
        raise BadInput("no such recipe", where=name, mend=f"{near}{way} one to start from")
    return path


def free_folder(wanted: Path) -> Path:
    """``wanted``, or with the first number after it that no folder has."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def dry_run(recipe: Recipe, source: str, folder: Path) -> str:
    """What would run where, and the whole recipe."""
    from farflung.config.write import recipe_toml

    samplers = [
        (
            f"sampler {pool.name}",
            pool.replicas,
            f"{pool.weights}, cache {pool.kv}, {pool.capacity} sessions each ({pool.engine})",
        )
        for pool in recipe.pools
    ]
    train = recipe.train
    processes = [
        ("coordinator", 1, "this process: ledger, buffer, live view"),
        ("trainer", 1, f"{train.groups} groups of {train.group_size} per update, {recipe.run.updates} updates"),
        ("router", 1, "sessions to samplers, in proportion to capacity"),
        *samplers,
        ("rollout", 1, f"agents in {recipe.sandbox.kind} sandboxes"),
    ]
    rows = "\n".join(f"#   {count} x {name:<18} {what}" for name, count, what in processes)
    return f"# farflung would run {source} in {folder}, as {sum(p[1] for p in processes)} processes:\n{rows}\n\n{recipe_toml(recipe)}"
