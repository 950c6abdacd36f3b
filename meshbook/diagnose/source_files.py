"""Whose code a frame is: the user's, a library's, or Meshbook's own; and how a file is named to people.

By the path alone: the file may be on another machine.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath
from typing import Final

from meshbook.wire.messages import RECORDED_STEP_FILE, REMOTE_OPERATION_FILE

# Cells are files that exist in memory only: IPython's, ipykernel's (in a temporary folder of its own) and marimo's.
_CELL_FILE: Final = re.compile(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]|[/\\]marimo_\d+[/\\]|__marimo__cell_")
_CELL_NUMBER: Final = re.compile(r"^<ipython-input-(\d+)-")
_SITE_PACKAGES: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\](.+)$")
_STDLIB: Final = re.compile(r"[/\\]lib(?:64)?[/\\]python3\.\d+[/\\](.+)$")
_MESHBOOK_FOLDER: Final = str(PurePath(__file__).parent.parent)

# What could move a terminal's cursor, hide text or turn the direction of writing around.
_CONTROL_CHARS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@lru_cache(maxsize=4096)
def library_of(file: str) -> str | None:
    """The package that a file belongs to: "torch", "threading"; "meshbook" for our own; None for the user's code."""
    if _CELL_FILE.search(file):
        return None
    if file in (REMOTE_OPERATION_FILE, RECORDED_STEP_FILE):
        return "torch"
    # "<string>" is what namedtuple, dataclass and their kind generate; nobody's `exec` is lost by looking further out.
    if file == "<string>" or file.startswith(("<frozen ", "<attrs ", "<__array_function__", "<eval_with_key>")):
        return "python"
    if file.startswith(_MESHBOOK_FOLDER + "/") or file.startswith(_MESHBOOK_FOLDER + "\\"):
        return "meshbook"
    for pattern in (_SITE_PACKAGES, _STDLIB):
        if inside := pattern.search(file):
            first = re.split(r"[/\\]", inside[1])[0]
            return first.removesuffix(".py")
    return None


def is_user_file(file: str) -> bool:
    """Whether a file is the user's: neither the standard library's, nor an installed package's, nor Meshbook's.

    Cells are, also those typed into a function long ago.
    """
    return library_of(file) is None


def is_cell_file(file: str) -> bool:
    """Whether a file name stands for a cell of a notebook."""
    return _CELL_FILE.search(file) is not None


def cell_label(file: str) -> str | None:
    """How people know the cell of this file name, where the name tells: "cell 7"."""
    number = _CELL_NUMBER.match(file)
    return f"cell {number[1]}" if number else None


def short_path(file: str) -> str:
    """A path as a reader needs it: from site-packages or the standard library on, elsewhere its last two parts."""
    for pattern in (_SITE_PACKAGES, _STDLIB):
        if inside := pattern.search(file):
            return inside[1]
    parts = PurePath(file).parts
    return "/".join(parts[-2:]) if len(parts) > 2 else file


def sanitize_line(text: str, limit: int = 300) -> str:
    """Text of others on one line: what could act on a terminal is made visible, and its length has a bound."""
    text = _CONTROL_CHARS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\n", " ").replace("\t", " "))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
