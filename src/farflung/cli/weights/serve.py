"""farflung weights serve: a mirror of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_store, at_least, find_store, read_token

DESCRIPTION = """Serve a store over HTTP from a cache: each object comes over the long way once, however many samplers ask for it, and is
verified before anything of it is served. Samplers of the region take it for their store (--store http://HOST:PORT). It
holds no truth: stop it, lose its folder, start it elsewhere at any time. Requests carry the run's token. One JSON line with
the URL is printed when it listens; SIGTERM and Ctrl-C stop it."""
EXAMPLES = """  farflung weights serve --store s3://bucket/weights --cache /data/cache --host 0.0.0.0 --port 8300 --token-file token
  farflung weights serve --store http://mirror-1:8300 --cache /data/cache --port 8300      a mirror of a mirror
  farflung weights serve runs/my --cache /tmp/cache --limit-gb 2                           with the run's token
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights serve", DESCRIPTION, EXAMPLES)
    add_store(parser)
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER", help="where objects are kept")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the port; 0 takes a free one (%(default)s)")
    parser.add_argument(
        "--limit-gb", type=float, default=64.0, metavar="G", help="the cache's size, 10^9 bytes (%(default)g)"
    )
    args = parser.parse_args(argv)
    at_least(args.limit_gb, 1e-3, "--limit-gb")
    at_least(args.port, 0, "--port")
    address = find_store(args, "serve")
    address.open(args)
    token = read_token(args, address)

    from farflung.fleet import mirror, process

    process.start_process()
    limit = round(args.limit_gb * 1e9)
    asyncio.run(mirror.serve(mirror.MirrorOptions(address.url, args.cache, token, args.host, args.port, limit)))
    return 0
