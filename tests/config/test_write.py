"""The documentation of recipes is made from the tree, and says all of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from farflung.config import PoolConfig, Recipe
from farflung.config.write import SECTIONS, recipe_table, recipe_toml

ROOT = Path(__file__).parents[2]


def test_the_page_of_recipes_is_in_step_with_the_tree() -> None:
    spec = importlib.util.spec_from_file_location("document_recipes", ROOT / "scripts" / "document_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert page == script.updated(page), "run scripts/document_recipes.py"


@pytest.mark.parametrize("section", Recipe.model_fields)
def test_every_key_has_a_meaning(section: str) -> None:
    model = PoolConfig if section == "pools" else type(getattr(Recipe(), section))
    shown = "pools.NAME" if section == "pools" else section
    table = recipe_table()
    for key, field in model.model_fields.items():
        assert field.description, f"{section}.{key}"
        assert f"| `{shown}.{key}` |" in table
    assert SECTIONS[section]


def test_comments_stay_within_the_line() -> None:
    text = recipe_toml(Recipe(), explain=True)
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("weights.formats", "list, each one of `bf16`, `fp8`, `mxfp4`, `nvfp4`"),
        ("weights.exclude", "list, each text"),
        ("train.betas", "list of two numbers"),
        ("train.gspo", "list of two numbers, or none"),
        ("weights.keep", "whole number >= 1, or none"),
        ("weights.small", "true or false"),
    ],
)
def test_a_key_says_what_it_takes(key: str, kind: str) -> None:
    assert f"| `{key}` | {kind} |" in recipe_table()
