"""Write a recipe for people: TOML with every key explained, and the table of all keys for the documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from farflung.config.tree import PoolConfig, Recipe, Section

SECTIONS = {
    "run": "The run as a whole.",
    "model": "The policy.",
    "tasks": "What is learnt from, and what it is measured on.",
    "agent": "The agent's limits. Each ends an episode with a reason of its own.",
    "sandbox": "Where the agent's commands run.",
    "sampling": "How training episodes are drawn.",
    "weights": "How versions of the policy travel from the trainer to the samplers.",
    "pools": "Samplers by accelerator and precision; as many entries as you like.",
    "router": "How sessions find their samplers.",
    "train": "The update.",
    "eval": "The evaluation before and after.",
}


def recipe_toml(recipe: Section, *, explain: bool = False) -> str:
    """The whole recipe as TOML, which load_recipe reads back to the same; ``explain`` adds each key's documentation."""
    lines: list[str] = []
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        if explain and name in SECTIONS:
            lines.append(f"# {SECTIONS[name]}")
        for entry, header in (
            [(e, f"[[{name}]]") for e in section] if isinstance(section, tuple) else [(section, f"[{name}]")]
        ):
            lines += [header, *_keys(entry, explain), ""]
    return "\n".join(lines)


def recipe_table() -> str:
    """Every key with kind, default and meaning, as Markdown."""
    parts = []
    for name, text in SECTIONS.items():
        model = PoolConfig if name == "pools" else type(getattr(Recipe(), name))
        shown = "pools.NAME" if name == "pools" else name
        parts += [f"## {name}", "", text, "", "| key | kind | default | meaning |", "| --- | --- | --- | --- |"]
        for key, field in model.model_fields.items():
            default = "" if field.is_required() else "none" if field.default is None else f"`{_value(field.default)}`"
            parts.append(f"| `{shown}.{key}` | {_kind(field)} | {default} | {_doc(field)} |")
        parts.append("")
    return "\n".join(parts)


def _keys(entry: BaseModel, explain: bool) -> Iterator[str]:
    for key, field in type(entry).model_fields.items():
        if explain:
            yield from textwrap.wrap(
                f"{_doc(field)} ({_kind(field).replace('`', '')})", 110, initial_indent="# ", subsequent_indent="# "
            )
        value = getattr(entry, key)
        yield f"# {key} =" if value is None else f"{key} = {_value(value)}"
        if explain:
            yield ""


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def _doc(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _kind(field: FieldInfo) -> str:
    """What a key takes, in words."""
    annotation: Any = field.annotation
    bounds = list(field.metadata)
    optional = NoneType in get_args(annotation)
    if optional:
        annotation = next(a for a in get_args(annotation) if a is not NoneType)
    if hasattr(annotation, "__metadata__"):  # Annotated[int, Field(...)] inside a union keeps its bounds to itself
        bounds += [m for info in annotation.__metadata__ for m in getattr(info, "metadata", [])]
        annotation = annotation.__origin__
    words = _words(annotation)
    for bound in bounds:
        for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            if hasattr(bound, attribute):
                words += f" {sign} {getattr(bound, attribute)}"
    return words + (", or none" if optional else "")


def _words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{word}`" for word in get_args(annotation))
    if get_origin(annotation) is tuple:
        first, second = get_args(annotation)
        return f"list, each {_words(first)}" if second is ... else "list of two numbers"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]
