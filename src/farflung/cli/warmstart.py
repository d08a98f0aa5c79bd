"""farflung warmstart: make the packaged tasks and the packaged policy, or others like them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser

DESCRIPTION = """Make a first policy: generate and validate repair tasks, let a scripted solver work on them in the real sandbox, and train a
small causal LM from scratch on its solved episodes. With the defaults it makes what is packaged."""
EXAMPLES = """  farflung warmstart runs/warmstart
  farflung warmstart /tmp/small --demonstrations 500 --steps 50      a quick try of the whole way
"""


def run(argv: Sequence[str]) -> int:
    from farflung.run.warmstart import Plan, warmstart

    plan = Plan()
    parser = Parser("warmstart", DESCRIPTION, EXAMPLES)
    parser.add_argument("out", type=Path, help="a new folder for tasks, demonstrations and policy")
    parser.add_argument("--seed", type=int, default=plan.seed, help="fixes tasks, episodes and training (%(default)s)")
    parser.add_argument("--train-tasks", type=int, default=plan.train_tasks, help="tasks to learn from (%(default)s)")
    parser.add_argument("--heldout-tasks", type=int, default=plan.heldout_tasks, help="tasks held out (%(default)s)")
    parser.add_argument("--demonstrations", type=int, default=plan.demonstrations, help="solved episodes (%(default)s)")
    parser.add_argument("--steps", type=int, default=plan.steps, help="optimiser steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=plan.batch, help="episodes per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=plan.lr, help="peak learning rate (%(default)s)")
    given = vars(parser.parse_args(argv))
    out: Path = given.pop("out")

    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # read when torch is imported; two threads that spin starve each other
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    policy = warmstart(out, Plan(**given))
    print(f"{policy}; measure it with: farflung eval {policy}")
    return 0
