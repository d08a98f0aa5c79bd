"""farflung init: a recipe to start from, with every key, its default and its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser
from farflung.core.errors import BadInput

DESCRIPTION = (
    "Write a recipe with every key, its default and what it means. Delete what you don't change: defaults stay."
)
EXAMPLES = """  farflung init                     writes recipe.toml
  farflung init my.toml             then: farflung train my.toml --dry-run
"""
HEADER = """# A farflung recipe. Every key is shown with its default; delete those that you leave as they are.
# On the command line each can be set with dots: farflung train THIS --train.lr 1e-4 --pools.bf16.replicas 2
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("init", DESCRIPTION, EXAMPLES)
    parser.add_argument("path", nargs="?", type=Path, default=Path("recipe.toml"), help="file to write (recipe.toml)")
    path: Path = parser.parse_args(argv).path

    from farflung.config import Recipe
    from farflung.config.write import recipe_toml

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{HEADER}\n{recipe_toml(Recipe(), explain=True)}")
    except FileExistsError:
        raise BadInput("is there already; nothing was written", where=str(path), mend="name another file") from None
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror}", where=str(path)) from None
    print(f"wrote {path}; next: farflung train {path} --dry-run")
    return 0
