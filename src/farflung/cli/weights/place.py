"""What the actions have in common: which store, which run in it, and the key that its versions are signed with."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from farflung.cli.args import Parser, nearest
from farflung.core.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from farflung.run.workspace import Workspace
    from farflung.weights import Store
    from farflung.weights.history import History
    from farflung.weights.manifest import Ref

STORE_HELP = "a store's folder or URL, or the folder of a run"
NO_KEY = "the run is signed, and there is no key to check it with"


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL, and the run whose folder it was found in."""

    url: str
    space: Workspace | None

    @property
    def mirror(self) -> bool:
        return urlsplit(self.url).scheme in ("http", "https")

    def open(self, args: argparse.Namespace) -> Store:
        """Raises BadInput for what is no store."""
        from farflung.weights import FolderStore, open_store

        store = open_store(self.url, token=read_token(args, self) if self.mirror else None)
        if isinstance(store, FolderStore) and not store.root.is_dir():
            raise BadInput("no such folder", where=self.url, mend=f"give {STORE_HELP}")
        return store


@dataclass(frozen=True, slots=True)
class Place:
    """One run in a store. ``key``: None where signatures are not looked at; ``signed``: whether there are any."""

    address: Address
    store: Store
    run: str
    key: bytes | None = field(repr=False)
    signed: bool

    def history(self) -> History:
        from farflung.weights.history import History
        from farflung.weights.manifest import Seal

        return History(self.store, self.run, Seal(self.key))


def add_store(parser: Parser) -> None:
    parser.add_argument("store", nargs="?", metavar="STORE", help=STORE_HELP)
    parser.add_argument("--store", dest="named", metavar="STORE", help="the same, as an option")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a mirror's token (the run's, else FARFLUNG_TOKEN)"
    )


def add_run(parser: Parser) -> None:
    add_store(parser)
    parser.add_argument("--run-id", metavar="ID", help="which run of the store (the only one there is)")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="the run's token file, from which its signing key follows (the run's, else FARFLUNG_TOKEN)",
    )
    parser.add_argument("--no-key", action="store_true", help="go on without looking at signatures")


def find_store(args: argparse.Namespace, action: str) -> Address:
    """Where the store lies. A run's folder, and the store in it, know their run. Raises BadInput."""
    given: list[str] = [name for name in (args.store, args.named) if name is not None]
    if len(given) != 1:
        what = "a store is needed" if not given else f"two stores are given: {given[0]} and {given[1]}"
        raise BadInput(
            what, where=f"weights {action}", mend=f"farflung weights {action} STORE, where STORE is {STORE_HELP}"
        )
    path = Path(given[0])
    for folder in (path, path.absolute().parent if path.name == "store" else path):
        if (folder / "recipe.json").is_file():
            from farflung.run.workspace import Workspace

            space = Workspace.open(folder)
            if not Path(space.store).is_dir():
                raise BadInput("the run has published nothing yet", where=str(folder))
            return Address(space.store, space)
    return Address(given[0], None)


def read_token(args: argparse.Namespace, address: Address) -> str:
    """A mirror's token. Raises BadInput."""
    from farflung.fleet import wire

    return wire.read_token(args.token_file or (address.space.token_file if address.space else None))


def open_place(args: argparse.Namespace, action: str, *, signs: bool = False) -> Place:
    """The run that is meant, and its key. ``signs``: the action writes what is signed.

    Raises BadInput for no store, no run or several, no key for a run that is signed, and but for ``verify`` a run whose pointer
    is gone.
    """
    from farflung.weights.manifest import pointer_key

    address = find_store(args, action)
    store = address.open(args)
    run = _choose(store, address, args.run_id)
    pointer = store.read_pointer(pointer_key(run))
    if pointer is None and action != "verify":
        mend = "farflung weights verify, with the same arguments, says what to write to it"
        raise BadInput("it is not there, but versions are", where=f"pointer {pointer_key(run)}", mend=mend)
    key, signed = _find_key(args, address), _is_signed(store, run, pointer)
    if signed and key is None and (signs or not args.no_key):
        mend = "give --key-file FILE, the run's token file, or FARFLUNG_TOKEN"
        raise BadInput(NO_KEY, where=f"run {run}", mend=mend if signs else f"{mend}; or --no-key, to go on unchecked")
    return Place(address, store, run, key, signed)


def refuse_mirror(place: Place, action: str) -> None:
    """Raises BadInput for a mirror."""
    if place.address.mirror:
        what = "a mirror is read-only and cannot list"
        raise BadInput(what, where=f"weights {action} {place.address.url}", mend="give the store behind it")


def at_least(value: float | None, least: float, flag: str) -> None:
    """Raises BadInput for a number below ``least``, or none."""
    if value is not None and not least <= value < math.inf:
        raise BadInput(f"{value:g} is out of range", where=flag, mend=f"at least {least:g}")


def _choose(store: Store, address: Address, wanted: str | None) -> str:
    from farflung.weights.manifest import pointer_key
    from farflung.weights.store import check_name

    if wanted is None and address.space is not None:
        wanted = address.space.run_id
    if wanted is not None and store.read_pointer(pointer_key(check_name(wanted, "run"))) is not None:
        return wanted
    if wanted is not None and not address.mirror and _manifests(store, wanted):
        return wanted  # its pointer is gone, which its reader will say
    if address.mirror:
        what = "a mirror cannot say which runs there are" if wanted is None else f"no run {wanted!r} has published here"
        raise BadInput(what, where=address.url, mend="--run-id ID names the run")
    folders = store.folders()
    runs = [name for name in folders if store.read_pointer(pointer_key(name)) is not None]
    runs = runs or [name for name in folders if _manifests(store, name)]
    if wanted is not None:
        raise BadInput(f"no run {wanted!r} has published here", where=address.url, mend=_list(runs, wanted))
    if not runs:
        raise BadInput("no run has published here", where=address.url, mend=f"is it {STORE_HELP}?")
    if len(runs) > 1:
        mend = f"--run-id says which: {', '.join(runs)}"
        raise BadInput(f"the store holds {len(runs)} runs", where=address.url, mend=mend)
    return runs[0]


def _manifests(store: Store, run: str) -> list[Ref]:
    """Of all versions that are there, published or not, in rising order."""
    from farflung.weights.manifest import manifest_ref

    refs = [ref for key in store.list(run) if (ref := manifest_ref(run, key)) is not None]
    return sorted(refs, key=lambda ref: ref.version)


def _list(runs: Sequence[str], wanted: str) -> str:
    return f"{nearest(wanted, runs)}runs here: {', '.join(runs) or 'none'}"


def _find_key(args: argparse.Namespace, address: Address) -> bytes | None:
    from farflung.fleet import wire
    from farflung.weights.manifest import derive_key

    if args.no_key:
        if args.key_file is not None:
            raise BadInput("--key-file and --no-key are given", where="weights", mend="give one of them")
        return None
    if args.key_file is not None:
        return derive_key(wire.read_token(args.key_file))
    if address.space is not None and address.space.token_file.exists():
        return derive_key(address.space.token)
    return derive_key(wire.read_token()) if os.environ.get(wire.TOKEN_VARIABLE, "").strip() else None


def _is_signed(store: Store, run: str, pointer: bytes | None) -> bool:
    """Whether the version that the pointer names is signed, or without a pointer the last one that is there; false where it
    cannot be read, which its reader will say."""
    from farflung.weights import Missing
    from farflung.weights.manifest import MAX_MANIFEST, decode_pointer, is_signed, manifest_key, pointer_key

    try:
        where = f"pointer {pointer_key(run)}"
        refs = _manifests(store, run)[-1:] if pointer is None else [decode_pointer(pointer, where)]
        return any(is_signed(store.get(manifest_key(run, ref), MAX_MANIFEST)) for ref in refs)
    except (Missing, Corrupt):
        return False
