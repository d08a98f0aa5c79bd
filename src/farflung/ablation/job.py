"""One run as a process of its own: ``python -m farflung.ablation.job FOLDER RUN``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from farflung.ablation.folder import Folder, Run
from farflung.core.errors import BadInput, Diverged
from farflung.core.process import die_with_parent


def main(path: str, name: str) -> None:
    """Make the run's rows, from the first on; where it diverges it ends, which is a result as well."""
    die_with_parent(int(os.environ["FARFLUNG_PARENT"]))
    folder, run = Folder.load(Path(path)), Run.parse(name)
    if run is None:
        raise BadInput("no run is called so", where=name)
    with folder.rows_file(run).open("w") as file:
        try:
            for row in folder.experiment.rows(folder.path, run.arm, run.seed):
                file.write(json.dumps(row.to_dict()) + "\n")
                file.flush()
        except Diverged as error:
            folder.diverged_file(run).write_text(f"{error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
