"""Read a recipe: TOML, then dotted overrides, then the typed tree; one clear error for the first thing that is wrong."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from farflung.config.tree import Recipe
from farflung.core.errors import BadInput


def load_recipe(path: Path | str, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Parse ``path`` and apply overrides such as ("train.lr", "1e-6"). Raises BadInput naming key, place and mend."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"cannot read the recipe: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not TOML: {error}", where=str(path)) from None
    for key, value in overrides:
        _set(tree, key, _parse(value))
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree, str(path)) from None


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON data, complete with defaults."""
    return recipe.model_dump(mode="json")


def _parse(text: str) -> Any:
    """A value as TOML would read it; bare words are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a list is entered by index or by its entries' name (pools.nvfp4.replicas)."""
    *path, last = key.split(".")
    node: Any = tree
    for at, part in enumerate(path):
        if isinstance(node, list):
            node = _entry(node, part, key)
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise BadInput(f"{'.'.join(path[:at])} is not a table", where=f"--{key}")
    if isinstance(node, list):
        raise BadInput("a list needs an entry's name or number before the key", where=f"--{key}")
    if not isinstance(node, dict):
        raise BadInput(f"{'.'.join(path)} is not a table", where=f"--{key}")
    node[last] = value


def _entry(entries: list[Any], part: str, key: str) -> Any:
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    names = [str(e.get("name")) for e in entries if isinstance(e, dict)]
    if part in names:
        return entries[names.index(part)]
    raise BadInput(f"no entry {part!r}", where=f"--{key}", mend=f"valid entries: {', '.join(names)}")


def _explain(error: ValidationError, tree: dict[str, Any], place: str) -> BadInput:
    """The first problem as: key, place, what was expected, and the nearest valid key for an unknown one."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        valid = _keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), valid, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return BadInput(f"unknown key {key!r}", where=place, mend=f"{hint}valid keys here: {', '.join(valid)}")
    if first["type"] == "missing":
        return BadInput(f"{key!r} is missing", where=place)
    given = f", not {json.dumps(first['input'], default=str)}" if first["loc"] else ""
    expected = first["msg"].removeprefix("Value error, ")
    return BadInput(f"{key + ': ' if key else ''}{expected[:1].lower()}{expected[1:]}{given}", where=place)


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    """The valid keys of the section at ``loc``."""
    model: type[BaseModel] = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not found:
            return []
        model = found[0]
    return list(model.model_fields)
