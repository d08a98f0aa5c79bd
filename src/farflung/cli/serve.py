"""farflung serve: one sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace


def run(argv: Sequence[str]) -> int:
    from farflung.fleet import process, serve
    from farflung.run.workspace import resolve_model

    options, token = serve.parse(argv)
    process.start_process()
    serve.serve(replace(options, model=str(resolve_model(options.model))), token)
    return 0
