"""Write the table of all recipe keys into docs/recipes.md, between its markers. Run it after a change of config/tree.py."""

from __future__ import annotations

from pathlib import Path

from farflung.config.write import recipe_table

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- keys: written by scripts/document_recipes.py -->", "<!-- end of keys -->"


def updated(text: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{recipe_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
