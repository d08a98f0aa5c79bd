"""Read a recipe: TOML, then dotted overrides, then the typed tree; one clear error for the first thing that is wrong."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from farflung.config.tree import Recipe, Section
from farflung.core.errors import BadInput

Loc = tuple[int | str, ...]
Tree = TypeVar("Tree", bound=Section)


def load_recipe(path: Path | str, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Parse ``path`` and apply overrides such as ("train.lr", "1e-6"). Raises BadInput naming key, place and mend."""
    return load_tree(Recipe, path, overrides)


def load_tree(root: type[Tree], path: Path | str, overrides: Sequence[tuple[str, str]] = ()) -> Tree:
    """``load_recipe`` for any typed tree of sections."""
    path = Path(path)
    try:
        text = path.read_text()
        tree = tomllib.loads(text)
    except OSError as error:
        raise BadInput(f"cannot read the recipe: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not TOML: {error}", where=str(path)) from None
    return _build(root, tree, overrides, str(path), text)


def override_recipe(recipe: Recipe, overrides: Sequence[tuple[str, str]]) -> Recipe:
    """The recipe with some keys set anew, as on the command line. Raises BadInput."""
    return _build(Recipe, dump_recipe(recipe), overrides, "recipe", "")


def recipe_of(tree: Any, place: str) -> Recipe:
    """A recipe from plain data, as ``dump_recipe`` gave it; ``place`` says where it came from. Raises BadInput."""
    return tree_of(Recipe, tree, place)


def tree_of(root: type[Tree], tree: Any, place: str) -> Tree:
    """``recipe_of`` for any typed tree of sections."""
    if not isinstance(tree, dict):
        raise BadInput("a recipe is a table", where=place)
    return _build(root, tree, (), place, "")


def _build(root: type[Tree], tree: dict[str, Any], overrides: Sequence[tuple[str, str]], place: str, text: str) -> Tree:
    given: dict[Loc, str] = {}
    for key, value in overrides:
        given[_set(root, tree, key, value)] = f"--{key}"
    try:
        return root.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise _explain(root, error, tree, given, place, text) from None


def dump_recipe(recipe: Section) -> dict[str, Any]:
    """The recipe as plain JSON data, complete with defaults."""
    return recipe.model_dump(mode="json")


def _set(root: type[Section], tree: dict[str, Any], key: str, value: str) -> Loc:
    """Set a dotted key and return its place; a list is entered by index or by its entries' name (pools.nvfp4.replicas)."""
    *path, last = key.split(".")
    node: Any = tree
    loc: list[int | str] = []
    for part in path:
        if isinstance(node, list):
            at = _entry(node, part, key)
            node = node[at]
            loc.append(at)
        else:
            node = node.setdefault(part, {})
            loc.append(part)
        if not isinstance(node, dict | list):
            raise BadInput(f"{'.'.join(map(str, loc))} is not a table", where=f"--{key}")
    if isinstance(node, list):
        names = ", ".join(_names(node))
        raise BadInput(
            "a list needs an entry's name or number before the key", where=f"--{key}", mend=f"entries: {names}"
        )
    node[last] = _parse(value, _annotation(root, (*loc, last)))
    return (*loc, last)


def _entry(entries: list[Any], part: str, key: str) -> int:
    if part.isdigit() and int(part) < len(entries):
        return int(part)
    names = _names(entries)
    if part in names:
        return names.index(part)
    raise BadInput(
        f"no entry {part!r}", where=f"--{key}", mend=f"{_nearest(part, names)}valid entries: {', '.join(names)}"
    )


def _names(entries: list[Any]) -> list[str]:
    return [str(entry.get("name", at)) if isinstance(entry, dict) else str(at) for at, entry in enumerate(entries)]


def _parse(text: str, annotation: Any) -> Any:
    """A value as TOML would read it; what the tree wants as text stays text, and none empties what may be empty."""
    wanted = get_args(annotation) or (annotation,)
    if NoneType in wanted and text in ("none", "null"):
        return None
    if str in wanted and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(
    root: type[Section], error: ValidationError, tree: dict[str, Any], given: dict[Loc, str], path: str, text: str
) -> BadInput:
    """The first problem as: key, place, what was expected, and the nearest valid key for an unknown one."""
    first = error.errors(include_url=False)[0]
    loc: Loc = first["loc"]
    key = _name(loc, tree)
    where = _place(loc, given, path, text)
    if first["type"] == "extra_forbidden":
        valid = _keys(root, loc[:-1])
        hint = _nearest(str(loc[-1]), valid) or _elsewhere(root, str(loc[-1]))
        return BadInput(f"unknown key {key!r}", where=where, mend=f"{hint}valid keys here: {', '.join(valid)}")
    if first["type"] == "missing":
        return BadInput(f"{key!r} is missing", where=where)
    shown = f", not {json.dumps(first['input'], default=str)}" if loc and not isinstance(first["input"], dict) else ""
    expected = (
        first["msg"].removeprefix("Value error, ").replace("Input should", "should").replace("an object", "a table")
    )
    if first["type"] == "string_pattern_mismatch":
        expected = "should be letters, digits, '_', '-' and '.', and begin with a letter, a digit or '_'"
    return BadInput(f"{key + ' ' if key else ''}{expected}{shown}", where=where)


def _name(loc: Loc, tree: Any) -> str:
    """The dotted key as a person writes it: entries of a list by their name where they have one."""
    parts = []
    for part in loc:
        if isinstance(part, int):
            parts.append(_names(tree)[part])
            tree = tree[part]
        else:
            parts.append(part)
            tree = tree.get(part) if isinstance(tree, dict) else None
    return ".".join(parts)


def _place(loc: Loc, given: dict[Loc, str], path: str, text: str) -> str:
    """Where a key was set: the flag on the command line, or file and line."""
    for known, flag in given.items():
        if loc and (known[: len(loc)] == loc or loc[: len(known)] == known):
            return flag
    lines = (_line(loc[:depth], text) for depth in range(len(loc), 0, -1))
    return next((f"{path}:{line}" for line in lines if line), path)


def _line(loc: Loc, text: str) -> int | None:
    """The line on which a key, or the table of this name, begins; None where TOML was written in a way not followed here."""
    header: Loc = ()
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if table := re.match(r"\s*\[\[?([\w.\- ]+)\]", line):
            header = tuple(part.strip() for part in table[1].split("."))
            if line.lstrip().startswith("[["):
                name = table[1].strip()
                seen[name] = seen.get(name, -1) + 1
                header = (*header, seen[name])
            if header == loc:
                return number
        elif (entry := re.match(r"\s*([\w.\-]+)\s*=", line)) and (*header, *entry[1].split(".")) == loc:
            return number
    return None


def _nearest(word: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def _elsewhere(root: type[Section], word: str) -> str:
    """A key that stands in another section under the same name."""
    found = [f"{section}.{word}" for section in root.model_fields if word in _keys(root, (section,))]
    return f"did you mean {found[0]!r}? " if found else ""


def _model(root: type[Section], loc: Loc) -> type[BaseModel] | None:
    """The section that stands at ``loc``; list positions are passed over."""
    model: type[BaseModel] = root
    for part in loc:
        if isinstance(part, int):
            continue
        if part not in model.model_fields:
            return None
        annotation = model.model_fields[part].annotation
        found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not found:
            return None
        model = found[0]
    return model


def _keys(root: type[Section], loc: Loc) -> list[str]:
    model = _model(root, loc)
    return list(model.model_fields) if model else []


def _annotation(root: type[Section], loc: Loc) -> Any:
    model = _model(root, loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    return field.annotation if field else None
