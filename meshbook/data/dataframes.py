"""Columns of numbers as a pandas or polars DataFrame, or as plain lists.

Preference: the library that the program has imported already, pandas first; else an installed polars, which imports
faster; else pandas. Meshbook requires neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from meshbook.errors import UsageError

_LIBRARIES = ("pandas", "polars")


def make_dataframe(columns: Mapping[str, Sequence[Any]], kind: str | None = None) -> Any:
    """Return a DataFrame of these columns, or a dict of lists if no library is available.

    Args:
        columns: of equal length; None is a missing value.
        kind: "pandas", "polars" or "dict"; None: `default_kind()`.

    Raises:
        UsageError: no such kind, or it is not installed.
    """
    chosen = kind if kind is not None else default_kind()
    if chosen == "dict":
        return {name: list(values) for name, values in columns.items()}
    if chosen not in _LIBRARIES:
        raise UsageError(f"there are no frames of kind {chosen!r}; there are pandas, polars and dict")
    try:
        library = importlib.import_module(chosen)
    except ImportError:
        raise UsageError(f"{chosen} is not installed here: pip install {chosen}, or ask for kind='dict'") from None
    return library.DataFrame({name: list(values) for name, values in columns.items()})


def default_kind() -> str:
    """Return the kind that `make_dataframe` uses by default."""
    for name in _LIBRARIES:
        if name in sys.modules:
            return name
    for name in reversed(_LIBRARIES):
        if importlib.util.find_spec(name) is not None:
            return name
    return "dict"
