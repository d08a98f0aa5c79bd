"""The body of ``farflung serve``: one sampler as a process, alone or as a replica of a run's fleet.

farflung serve --model FOLDER                                      a stand-alone sampler, its weights are version 0
farflung serve --model FOLDER --store URL --run-id ID --join URL   a replica that follows a run's weights
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from farflung.core.episode import Episode
from farflung.core.errors import BadInput, FarflungError, InfraError
from farflung.core.sampling import KvFormat, Source, WeightFormat
from farflung.engines.base import Engine
from farflung.fleet import process, wire
from farflung.fleet.reconcile import Reconciler, WeightsSource
from farflung.fleet.replica import Replica

if TYPE_CHECKING:
    from farflung.weights.subscriber import Update


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``replica`` must be different for every replica of a fleet. ``router`` is joined; ``advertise`` is this replica's
    URL as the router reaches it, where that is not the one it listens on. ``drain_seconds``: how long a stop waits for
    the turns in flight. ``image``: a folder of this replica's own, where its weights stay for the next start; ``small``: fetch BF16 deltas in fewer bytes. ``replay``: a folder of episode frames that the paced engine says again."""

    model: str
    pool: str = "default"
    replica: str = ""
    weights: WeightFormat = "bf16"
    kv: KvFormat = "bf16"
    engine: Literal["embedded", "paced"] = "embedded"
    capacity: int = 16
    store: str | None = None
    run_id: str | None = None
    image: Path | None = None
    small: bool = False
    router: str | None = None
    advertise: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tokens_per_second: float = 1000.0
    replay: Path | None = None
    threads: int = 1
    drain_seconds: float = 30.0
    poll_seconds: float = 0.5

    def check(self) -> None:
        """Raises BadInput for what cannot go together."""
        if self.capacity < 1 or self.threads < 1:
            raise BadInput(f"capacity {self.capacity}, threads {self.threads}: each must be at least 1", where="serve")
        if (self.store is None) != (self.run_id is None):
            raise BadInput(
                "a weight store needs a run id and a run id a store", where="serve", mend="--store and --run-id"
            )
        if self.router is not None and self.host in ("", "0.0.0.0", "::") and self.advertise is None:
            raise BadInput(
                f"the router cannot reach {self.host!r}", where="serve", mend="add --advertise http://HOST:PORT"
            )
        if self.replay is not None and not self.replay.is_dir():
            raise BadInput("no such folder", where=f"--replay {self.replay}")
        if self.replay is not None and self.engine != "paced":
            raise BadInput("--replay is for --engine paced", where="serve")


def serve(options: ServeOptions, token: str) -> None:
    """Serve until SIGTERM or SIGINT, then drain, leave and return. Raises BadInput before anything listens."""
    options.check()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))  # read when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    source = Source(options.pool, options.replica or f"{options.pool}-{os.getpid()}", options.weights, options.kv)
    weights = _weights(options, source.replica, token)
    asyncio.run(_serve(options, token, source, weights))


async def _serve(options: ServeOptions, token: str, source: Source, weights: WeightsSource | None) -> None:
    engine = make_engine(options, source)
    # What is there now stays: no later collection walks it, for some 0.1 s, while a decoding step waits.
    gc.collect()
    gc.freeze()
    reconciler = None if weights is None else Reconciler(engine, weights, poll_seconds=options.poll_seconds)
    replica = Replica(engine, token, capacity=options.capacity, reconciler=reconciler)
    try:
        url = await replica.start(options.host, options.port, router=options.router, advertise=options.advertise)
        process.announce("replica", url, replica=source.replica, pool=source.pool)
        if not await process.stop_signal(replica.broken):
            raise InfraError("the engine failed again and again; see the log", where=source.replica)
        await replica.drain(options.drain_seconds)
    finally:
        await replica.close()


def make_engine(options: ServeOptions, source: Source) -> Engine:
    """The engine that the options name, ready to serve version 0."""
    if options.engine == "paced":
        from farflung.engines.paced import PacedEngine, Recording

        recording = None
        if options.replay is not None:
            files = sorted(path for path in options.replay.iterdir() if path.is_file())
            recording = Recording.of(Episode.decode(path.read_bytes(), where=str(path)).trajectory for path in files)
        return PacedEngine(
            source, tokens_per_second=options.tokens_per_second, capacity=options.capacity, recording=recording
        )
    import torch

    from farflung.engines.embedded import EmbeddedEngine, EngineOptions

    torch.set_num_threads(options.threads)
    return EmbeddedEngine.from_folder(Path(options.model), source, EngineOptions(capacity=options.capacity))


def _weights(options: ServeOptions, replica: str, token: str) -> WeightsSource | None:
    if options.store is None or options.run_id is None:
        return None
    from farflung.weights.manifest import derive_key
    from farflung.weights.subscriber import Subscriber
    from farflung.weights.urls import open_store

    subscriber = Subscriber(
        open_store(options.store, token=token),
        options.run_id,
        format=options.weights,
        key=derive_key(token),
        folder=options.image,
        name=replica,
        small=options.small,
    )
    return _PointerOnly(subscriber) if options.engine == "paced" else subscriber


class _PointerOnly:
    """For an engine that needs no weights: a remote replica's fetching costs this machine nothing either."""

    def __init__(self, source: WeightsSource) -> None:
        self._source = source

    def newest(self) -> int | None:
        return self._source.newest()

    def fetch(self, version: int) -> Update:
        from farflung.weights.subscriber import Update

        return Update(version, {}, None)


def parse(argv: Sequence[str] | None = None) -> tuple[ServeOptions, str]:
    """Options and token from a command line. Raises BadInput."""
    d = ServeOptions(model="")
    parser = argparse.ArgumentParser(
        prog="farflung serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a Hugging Face causal LM")
    add("--pool", default=d.pool, help="the pool's name in every metric")
    add("--replica", default=d.replica, help="this replica's name, different for every replica (default: POOL-PID)")
    add("--weights", default=d.weights, choices=get_args(WeightFormat), help="format that the weights are served in")
    add("--kv", default=d.kv, choices=get_args(KvFormat), help="format of the key-value cache")
    add("--engine", default=d.engine, choices=("embedded", "paced"))
    add("--capacity", type=int, default=d.capacity, help="sessions at a time; pools get sessions in proportion")
    add("--store", help="the run's weight store: a folder, s3://..., gs://..., az://..., or http://... of a mirror")
    add("--run-id", help="the run whose versions are followed")
    add("--image", type=Path, metavar="FOLDER", help="keep the weights in this folder of its own, for the next start")
    add(
        "--small", action="store_true", help="fetch deltas in fewer bytes, where the run publishes such (weights.small)"
    )
    add("--join", dest="router", metavar="URL", help="the router to join")
    add("--advertise", metavar="URL", help="this replica's URL as the router reaches it")
    add("--host", default=d.host)
    add("--port", type=int, default=d.port, help="0 takes a free one; the real one is printed as a JSON line")
    add("--token-file", type=Path, help=f"file with the run's token; without it {wire.TOKEN_VARIABLE} is read")
    add("--tokens-per-second", type=float, default=d.tokens_per_second, help="rate of the paced engine, per session")
    add("--replay", type=Path, metavar="FOLDER", help="episodes that the paced engine says again")
    add("--threads", type=int, default=d.threads, help="threads of torch")
    add("--drain-seconds", type=float, default=d.drain_seconds, help="how long a stop waits for turns in flight")
    given = vars(parser.parse_args(argv))
    token = wire.read_token(given.pop("token_file"))
    return ServeOptions(**given), token


def main(argv: Sequence[str] | None = None) -> int:
    process.start_process()
    try:
        serve(*parse(argv))
    except FarflungError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
