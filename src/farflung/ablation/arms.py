"""The grid: eight ways to update, each fed by a mixed and by a homogeneous fleet."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farflung.core.errors import BadInput

Fleet = Literal["mixed", "homogeneous"]
FLEETS: tuple[Fleet, ...] = ("mixed", "homogeneous")


@dataclass(frozen=True, slots=True)
class Arm:
    """What differs between runs, and nothing else does: score centering, masked importance sampling, top-p, the fleet."""

    fleet: Fleet
    sc: bool = False
    mis: bool = False
    top_p: bool = False

    @property
    def method(self) -> str:
        """GRPO, or what is added to it."""
        added = [name for name, on in (("SC", self.sc), ("MIS", self.mis), ("top-p", self.top_p)) if on]
        return "+".join(added) or "GRPO"

    @property
    def name(self) -> str:
        return f"{self.fleet}/{self.method}"

    def run_name(self, seed: int) -> str:
        """Name of the arm's run with this seed, for files and processes."""
        return f"{self.fleet}-{self.method}-{seed}"


METHODS = (
    Arm("mixed"),
    Arm("mixed", mis=True),
    Arm("mixed", sc=True),
    Arm("mixed", top_p=True),
    Arm("mixed", sc=True, mis=True),
    Arm("mixed", sc=True, top_p=True),
    Arm("mixed", mis=True, top_p=True),
    Arm("mixed", sc=True, mis=True, top_p=True),
)
GRID = tuple(Arm(fleet, arm.sc, arm.mis, arm.top_p) for fleet in FLEETS for arm in METHODS)


def choose(words: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of the grid that any of the words names, by fleet, method or both; all for no words. Raises BadInput."""
    for word in words:
        if not any(_names(word, arm) for arm in GRID):
            known = [*FLEETS, *(arm.method for arm in METHODS), *(arm.name for arm in GRID)]
            folded = {name.casefold(): name for name in known}
            near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
            hint = f"did you mean {folded[near[0]]!r}? " if near else ""
            raise BadInput(
                f"no arm {word!r}",
                where="--arms",
                mend=f"{hint}fleets: {', '.join(FLEETS)}; methods: {', '.join(arm.method for arm in METHODS)}; or both, "
                "as mixed/SC+MIS",
            )
    return tuple(arm for arm in GRID if not words or any(_names(word, arm) for word in words))


def _names(word: str, arm: Arm) -> bool:
    return word.casefold() in (arm.fleet, arm.method.casefold(), arm.name.casefold())
