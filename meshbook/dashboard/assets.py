"""The front end's files: separate modules for a page, and one bundled module for a widget.

anywidget accepts one module. Meshbook's files are plain ES modules without name conflicts, so bundling removes their
imports and exports and concatenates them in dependency order; there is no build step and no build tool to install.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

# In a checkout the folder beside the package, in a wheel the copy inside it.
_CANDIDATE_FOLDERS = (Path(__file__).parents[2] / "widgets", Path(__file__).parents[1] / "_widgets")

CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function |class |const )", re.MULTILINE)


@cache
def folder() -> Path:
    """Return the folder with the files.

    Raises:
        FileNotFoundError: there is none: the installation is incomplete.
    """
    for candidate in _CANDIDATE_FOLDERS:
        if (candidate / "dashboard.js").is_file():
            return candidate
    raise FileNotFoundError(
        f"the dashboard's files are neither in {_CANDIDATE_FOLDERS[0]} nor in {_CANDIDATE_FOLDERS[1]}; "
        "install meshbook again"
    )


def read_asset(name: str) -> str:
    return (folder() / name).read_text("utf-8")


def asset_names() -> tuple[str, ...]:
    """Return the names of the files that a page may request."""
    return tuple(sorted(path.name for path in folder().iterdir() if path.suffix in CONTENT_TYPES))


def bundle(entry: str) -> str:
    """Return a module and all its imports as one module."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(read_asset(name)):
                visit(needed)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", read_asset(name))) for name in order)
