"""farflung serve: one sampler."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    from farflung.fleet import process, serve

    options, token = serve.parse(argv)
    process.start_process()
    serve.serve(options, token)
    return 0
