"""A run's folder: what it was started with, its secret, and the lock that keeps a second coordinator out."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.resources
import json
import os
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farflung.config import Recipe, dump_recipe, recipe_of
from farflung.core.errors import BadInput, Corrupt
from farflung.fleet import wire
from farflung.tasks.files import BUILTIN

LEDGER = "ledger.sqlite"
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class Workspace:
    """``model`` is the local folder of the starting policy; ``run_id`` names the run in the weight store."""

    path: Path
    recipe: Recipe
    model: Path
    run_id: str

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def token(self) -> str:
        """Raises BadInput if the file is not there or empty."""
        return wire.read_token(self.token_file)

    @property
    def store(self) -> str:
        """The weight store's path or URL."""
        return self.recipe.weights.store or str((self.path / "store").absolute())

    @property
    def policy(self) -> Path:
        """The newest policy in Hugging Face format, once training has ended."""
        return self.path / "policy"

    @staticmethod
    def create(path: Path, recipe: Recipe) -> Workspace:
        """A new run. Raises BadInput if one is here already or the model cannot be found. One that never began (its input
        was wrong) has no ledger, and is made anew."""
        if (path / "recipe.json").exists() and (path / LEDGER).exists():
            raise BadInput(
                "a run is here already",
                where=str(path),
                mend=f"go on with it: farflung train --resume {shlex.quote(str(path))}, or pass another --dir",
            )
        model = resolve_model(recipe.model.path)
        recipe = _anchored(recipe)
        facts = {"recipe": dump_recipe(recipe), "model": str(model), "run_id": secrets.token_hex(8)}
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_whole(path / "token", secrets.token_urlsafe(24), 0o600)
            _write_whole(path / "recipe.json", json.dumps(facts, indent=1), 0o644)  # last: with it there is a run
        except OSError as error:
            raise BadInput(
                f"no run can be made here: {error.strerror}", where=str(path), mend="give another --dir"
            ) from None
        return Workspace(path, recipe, model, str(facts["run_id"]))

    @staticmethod
    def open(path: Path) -> Workspace:
        """An existing run. Raises BadInput if there is none."""
        where = str(path / "recipe.json")
        try:
            facts = json.loads((path / "recipe.json").read_text())
            return Workspace(path, recipe_of(facts["recipe"], where), Path(facts["model"]), str(facts["run_id"]))
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput("no run is here: recipe.json is missing", where=str(path)) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"not a run's recipe: {error!r}", where=where) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held while a coordinator runs; the kernel lets go when it dies."""
        with locked(self.path, "this run is going on in another process"):
            yield


@contextlib.contextmanager
def locked(folder: Path, said: str, mend: str = "") -> Iterator[None]:
    """Hold the folder's lock file, which the kernel lets go of when this process dies. Raises BadInput with what is ``said``
    if another process holds it."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(said, where=str(folder), mend=mend) from None
        yield


def _anchored(recipe: Recipe) -> Recipe:
    """The recipe with file names that hold wherever the run is gone on with from."""

    def anchored(name: str) -> str:
        return name if name.startswith(BUILTIN) else str(Path(name).expanduser().absolute())

    tasks = recipe.tasks.model_copy(
        update={"train": anchored(recipe.tasks.train), "heldout": anchored(recipe.tasks.heldout)}
    )
    pools = tuple(
        pool.model_copy(update={"replay": anchored(pool.replay)}) if pool.replay else pool for pool in recipe.pools
    )
    weights = recipe.weights
    if weights.store is not None and "://" not in weights.store:
        weights = weights.model_copy(update={"store": anchored(weights.store)})
    return recipe.model_copy(update={"tasks": tasks, "pools": pools, "weights": weights})


def _write_whole(path: Path, text: str, mode: int) -> None:
    """A small file that is there with all its text or not at all, whenever this process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.rename(path)


def resolve_model(path: str) -> Path:
    """A local folder for ``path``: a folder, builtin:NAME (packaged), or a Hub id. Raises BadInput."""
    if path.startswith("builtin:"):
        policies = Path(str(importlib.resources.files("farflung"))) / "assets" / "policies"
        folder = policies / path.removeprefix("builtin:")
        if not (folder / "config.json").is_file():
            names = sorted(p.name for p in policies.glob("*") if (p / "config.json").is_file())
            raise BadInput(f"no packaged policy {path!r}", where="model.path", mend=f"packaged: {', '.join(names)}")
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BadInput(
                "the folder holds no config.json",
                where=f"model.path {path}",
                mend="a Hugging Face model folder is needed",
            )
        return folder.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise BadInput(
            "no such folder",
            where=f"model.path {path}",
            mend="give a model folder, a Hub id (owner/name) or builtin:NAME",
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub's client raises a family of its own for offline, missing and gated
        raise BadInput(
            f"neither a folder nor a model that the Hub gives: {type(error).__name__}", where=f"model.path {path}",
            mend="check the name and the connection, or download it and give the folder",
        ) from None  # fmt: skip
