"""farflung weights: look at a run's weight versions, and look after them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from farflung.cli.args import nearest
from farflung.core.errors import BadInput

ACTIONS = {
    "ls": "versions, what they cost, and who holds them",
    "verify": "read everything and say what is damaged, with the mend",
    "gc": "remove old versions that nobody holds",
    "compact": "make the jumps that let a reader far behind catch up in few steps",
    "materialize": "write a version as a checkpoint",
    "serve": "a mirror: one region's read-through cache of a store",
}

HELP = """usage: farflung weights ACTION STORE [options]         farflung weights ACTION --help tells more

{actions}

STORE is a folder, a URL (s3://, gs://, az://, http:// of a mirror), or the folder of a run, which has its own.

examples:
  farflung weights ls runs/my                                         what has the run published?
  farflung weights verify s3://bucket/weights --run-id my-run --key-file token
  farflung weights materialize runs/my latest --format nvfp4 --out my-nvfp4
  farflung weights serve --store s3://bucket/weights --cache /data/cache --port 8300 --token-file token
"""


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, ACTIONS))
        print(HELP.format(actions="\n".join(f"  {name:<{width}}  {text}" for name, text in ACTIONS.items())), end="")
        return 0
    name, *rest = argv
    if name not in ACTIONS:
        mend = f"{nearest(name, ACTIONS)}actions: {', '.join(ACTIONS)}"
        raise BadInput(f"unknown action {name!r}", where="weights", mend=mend)
    code: int = importlib.import_module(f"farflung.cli.weights.{name}").run(rest)
    return code
