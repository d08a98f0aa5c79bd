"""The command line: one module per command, loaded only when that command runs, so that ``farflung --help`` is instant."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from farflung import __version__
from farflung.cli.args import nearest
from farflung.core.errors import BadInput, FarflungError, Stopped

COMMANDS = {
    "quickstart": "train a small coding agent here, in minutes, and show how much better it got",
    "train": "train a model by a recipe, or go on with a run that stopped",
    "report": "draw a run's report.html, also while the run goes on",
    "eval": "measure pass@1 and pass@k of a model or a run on held-out tasks",
    "ablate": "measure what each part of the correction is worth, on a small task",
    "serve": "run one sampler (a train run starts its own; this one can join from elsewhere)",
    "weights": "look at a run's weight versions, verify, prune, write a checkpoint, serve a mirror",
    "warmstart": "make a first policy from solved episodes, as the packaged one was made",
    "init": "write a commented recipe to start from",
    "doctor": "look at this machine and say what would go wrong",
}

HELP = f"""farflung {__version__}: reinforcement learning of LLM agents on whatever accelerators you can get

usage: farflung COMMAND [options]         farflung COMMAND --help tells more

{{commands}}

examples:
  farflung doctor                                   is this machine ready?
  farflung quickstart                               the whole loop here, in minutes
  farflung init my.toml                             a recipe with every key explained
  farflung train my.toml --dry-run                  what would run?
  farflung train my.toml --train.lr 1e-4 --run.updates 40
  farflung train --resume runs/my                   go on where it stopped
"""


class Command(Protocol):
    def run(self, argv: Sequence[str]) -> int:
        """Parse the command's own arguments and carry it out; the result is the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done, 1: something failed, 2: something was asked for wrongly, 130: Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except FarflungError as error:
        if os.environ.get("FARFLUNG_TRACEBACK") == "1":
            raise
        print(f"farflung: {error}", file=sys.stderr)
        return 130 if isinstance(error, Stopped) else 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:
        print("\nfarflung: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone; say nothing, also not when stdout is closed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # the machine refused: no permission, no room, too many files
        if error.strerror is None or os.environ.get("FARFLUNG_TRACEBACK") == "1":
            raise
        place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        print(f"farflung: {place}{error.strerror}", file=sys.stderr)
        return 1


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())), end="")
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"farflung {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        raise BadInput(f"unknown command {name!r}", mend=f"{hint}commands: {', '.join(COMMANDS)}")
    command: Command = importlib.import_module(f"farflung.cli.{name}")
    return command.run(rest)


if __name__ == "__main__":
    sys.exit(main())
