"""Arguments: plain argparse, dotted overrides of the recipe, and errors that name the nearest thing that exists."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from farflung.core.errors import BadInput

Overrides = list[tuple[str, str]]

DOTTED = re.compile(r"--([A-Za-z_]\w*(?:\.[\w\-]+)+)(?:=(.*))?", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse that raises BadInput instead of leaving, and keeps the layout of its help."""

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"farflung {command}",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._command = command

    def error(self, message: str) -> NoReturn:
        mend = f"farflung {self._command} --help lists what it takes"
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
            first = unknown[1].split()[0].split("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            message = f"unknown argument {first!r}"
            mend = f"{nearest(first, flags)}{mend}"
        raise BadInput(message, where=self._command, mend=mend)


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """A sentence that names the valid word closest to this one, or nothing."""
    near = difflib.get_close_matches(word, list(valid), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def check_output(path: Path | None, flag: str) -> None:
    """Better now than after an hour: raises BadInput if a file that is written at the end cannot be."""
    if path is None:
        return
    folder, where = path.absolute().parent, f"{flag} {path}"
    if not folder.is_dir():
        raise BadInput(f"the folder {path.parent} is not there", where=where, mend="make it first")
    if path.is_dir():
        raise BadInput("it is a folder", where=where, mend="give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BadInput("it cannot be written", where=where, mend="give another file")


def split_overrides(argv: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take ``--a.b value`` and ``--a.b=value`` out of the arguments; a switch without a value means true."""
    rest: list[str] = []
    overrides: Overrides = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        match = DOTTED.fullmatch(word)
        if match is None:
            rest.append(word)
        elif match[2] is not None:
            overrides.append((match[1], match[2]))
        elif waiting and not waiting[0].startswith("--"):
            overrides.append((match[1], waiting.pop(0)))
        else:
            overrides.append((match[1], "true"))
    return rest, overrides
