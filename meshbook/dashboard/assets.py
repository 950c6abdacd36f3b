"""The front end's files: modules as they are for a page, and joined into one for a widget.

anywidget takes one module. Ours are plain ES modules whose names are all different, so joining them is leaving out
their imports and exports and putting each after those that it needs; there is no build step, nor anything to install
for one.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

# From a checkout the folder beside the package, from a wheel the copy inside it.
_CANDIDATE_FOLDERS = (Path(__file__).parents[2] / "widgets", Path(__file__).parents[1] / "_widgets")

CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function |class |const )", re.MULTILINE)


@cache
def folder() -> Path:
    """Where the files are.

    Raises:
        FileNotFoundError: nowhere: the installation is not whole.
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
    """The files that a page may ask for."""
    return tuple(sorted(path.name for path in folder().iterdir() if path.suffix in CONTENT_TYPES))


def bundle(entry: str) -> str:
    """A module and all that it imports, as one module."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(read_asset(name)):
                visit(needed)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", read_asset(name))) for name in order)
