"""One training run below a run's process, so that both die together: ``python -m farflung.ablation.train WORKSPACE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from farflung.core.errors import DIVERGED_CODE, Diverged
from farflung.core.process import die_with_parent
from farflung.run.train import train
from farflung.run.workspace import Workspace

if __name__ == "__main__":
    die_with_parent(int(os.environ["FARFLUNG_PARENT"]))
    try:
        train(Workspace.open(Path(sys.argv[1])))
    except Diverged as error:
        print(f"farflung: {error}", file=sys.stderr)
        sys.exit(DIVERGED_CODE)
