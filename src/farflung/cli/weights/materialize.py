"""farflung weights materialize: a version as a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.cli.args import Parser
from farflung.cli.weights.place import add_run, at_least, open_place
from farflung.core.errors import BadInput

if TYPE_CHECKING:
    from farflung.cli.weights.place import Place

FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4", "native")

DESCRIPTION = """Write a version as a checkpoint: safetensors under checkpoint names, in the format's own codes and scales, each piece
verified. Several files and an index when it is large. A model's folder gives configuration and tokenizer, and config.json
then says what the weights are; of a run it is known. The folder is there whole or not at all."""
EXAMPLES = """  farflung weights materialize runs/my latest --out my-latest
  farflung weights materialize runs/my 40 --format nvfp4 --out my-40-nvfp4
  farflung weights materialize --store s3://bucket/weights --run-id r1 --key-file token 40 --format fp8 --model ./base --out r1-40
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("weights materialize", DESCRIPTION, EXAMPLES)
    add_run(parser)
    parser.add_argument("version", nargs="?", metavar="VERSION", help="a number, or latest")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="one that is published (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for the checkpoint")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="where configuration and tokenizer are (the run's model)"
    )
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        metavar="G",
        help="the most that a file takes, in 10^9 bytes (%(default)g)",
    )
    args = parser.parse_args(argv)
    if args.named is not None and args.version is None:
        args.store, args.version = None, args.store  # the only word without a flag is the version
    _check(args)
    place = open_place(args, "materialize")

    from rich.console import Console
    from rich.filesize import decimal

    from farflung.weights import Subscriber
    from farflung.weights.checkpoint import check_target, write_checkpoint

    check_target(args.out)
    model = _model(args.model, place)
    subscriber = Subscriber(place.store, place.run, format=args.format, key=place.key)
    version = subscriber.newest() if args.version == "latest" else int(args.version)
    assert version is not None  # a run without a pointer is not opened
    with Console(stderr=True).status(f"fetching version {version}") as status:
        subscriber.fetch(version)
        status.update(f"writing {args.out}")
        image = subscriber.image
        assert image is not None
        facts = {"run": place.run, "version": str(version), "weights": args.format, "root": image.root}
        written = write_checkpoint(
            args.out, image, args.format, facts=facts, model=model, shard_bytes=round(args.shard_gb * 1e9)
        )
    print(f"{args.out}: version {version} as {args.format}, {decimal(written.nbytes)}, {', '.join(written.files)}")
    for name, owner in written.tied.items():
        print(f"{name} is {owner}, and stands there under that name alone")
    return 0


def _check(args: argparse.Namespace) -> None:
    version = args.version
    if version is None or (version != "latest" and not (version.isascii() and version.isdigit() and len(version) < 15)):
        what = "a version is needed" if version is None else f"{version!r} is not a version"
        mend = "farflung weights materialize STORE VERSION --out FOLDER, where VERSION is a number, or latest"
        raise BadInput(what, where="weights materialize", mend=mend)
    at_least(args.shard_gb, 1e-6, "--shard-gb")


def _model(given: Path | None, place: Place) -> Path | None:
    """The folder that configuration and tokenizer come from."""
    if given is not None:
        return given
    space = place.address.space
    if space is None:
        return None
    if not (space.model / "config.json").is_file():
        raise BadInput("the run's model is not there any more", where=str(space.model), mend="give --model FOLDER")
    return space.model
