"""Columns of numbers as whatever the user plots with: a pandas or polars DataFrame, or plain lists.

Which of the two: the one that the program has imported already, pandas first; else polars where it is installed, which
is quicker to import, else pandas. Meshbook needs neither.
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
    """A DataFrame of these columns, or the columns themselves as lists where there is no library for one.

    Args:
        columns: of equal length; None is a missing value.
        kind: "pandas", "polars" or "dict"; None chooses.

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
    """The kind that `make_dataframe` makes when it is not told."""
    for name in _LIBRARIES:
        if name in sys.modules:
            return name
    for name in reversed(_LIBRARIES):
        if importlib.util.find_spec(name) is not None:
            return name
    return "dict"
