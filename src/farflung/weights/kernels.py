"""When the codec's loops are compiled ones (``loops.py``): where numba is installed (the extra ``fast``), for arrays that are
worth it. Else numpy does the same.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

WORTH_ITEMS = 1 << 20
"""Arrays of fewer items are left to numpy."""


@cache
def available() -> bool:
    """Whether numba can be imported."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def worth(items: int, least: int = WORTH_ITEMS) -> bool:
    """Whether the loops over so many items should be compiled ones."""
    return items >= least and available()


@cache
def loops() -> ModuleType:
    """``loops.py``, which imports numba."""
    from farflung.weights import loops

    return loops
