"""Classify a frame's file as the user's, a library's or Meshbook's code, and shorten its path for display.

Only the path is used, as the file may be on another machine.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath
from typing import Final

from meshbook.wire.messages import RECORDED_STEP_FILE, REMOTE_OPERATION_FILE

# Files of cells exist in memory only: those of IPython, ipykernel (in a temporary folder of its own) and marimo.
_CELL_FILE: Final = re.compile(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]|[/\\]marimo_\d+[/\\]|__marimo__cell_")
_CELL_NUMBER: Final = re.compile(r"^<ipython-input-(\d+)-")
_SITE_PACKAGES: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\](.+)$")
_STDLIB: Final = re.compile(r"[/\\]lib(?:64)?[/\\]python3\.\d+[/\\](.+)$")
# What torch.compile has generated, in a cache folder of any name: cd/ccdhk….py.
_COMPILED_FILE: Final = re.compile(r"[/\\]([a-z2-7]{2})[/\\]c\1[a-z2-7]{40,}\.py$")
_MESHBOOK_FOLDER: Final = str(PurePath(__file__).parent.parent)

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
# Characters that could move a terminal's cursor, hide text or change the direction of writing.
_CONTROL_CHARS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@lru_cache(maxsize=4096)
def library_of(file: str) -> str | None:
    """Return the package of a file: "torch", "threading"; "meshbook" for Meshbook's own; None for the user's code."""
    if _CELL_FILE.search(file):
        return None
    if file in (REMOTE_OPERATION_FILE, RECORDED_STEP_FILE) or _COMPILED_FILE.search(file):
        return "torch"
    # namedtuple, dataclass and the like generate code in "<string>". A user's `exec` has it too; its caller is found
    # further out.
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
    """Whether a file is the user's: not of the standard library, an installed package or Meshbook.

    Cells are user files, also earlier ones that define a function.
    """
    return library_of(file) is None


def is_cell_file(file: str) -> bool:
    """Whether a file name denotes a notebook cell."""
    return _CELL_FILE.search(file) is not None


def cell_label(file: str) -> str | None:
    """Return the display name of the cell with this file name, "cell 7", if the name contains its number."""
    number = _CELL_NUMBER.match(file)
    return f"cell {number[1]}" if number else None


def short_path(file: str) -> str:
    """Return a path for display: from site-packages or the standard library on, else its last two parts."""
    for pattern in (_SITE_PACKAGES, _STDLIB):
        if inside := pattern.search(file):
            return inside[1]
    parts = PurePath(file).parts
    return "/".join(parts[-2:]) if len(parts) > 2 else file


def sanitize_line(text: str, limit: int = 300) -> str:
    """Return untrusted text as one line of bounded length, with terminal control characters replaced."""
    text = _COLOUR.sub("", text).replace("\n", " ").replace("\t", " ")
    text = _CONTROL_CHARS.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
