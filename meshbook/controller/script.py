"""The script that this process runs on ranks, if it was started for one: `meshbook run FILE.py -- ARGUMENTS`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

_VARIABLE = "MESHBOOK_ARGV"

# The script's path and its arguments: `sys.argv` here and on the ranks of meshes that this process starts.
argv: tuple[str, ...] = ()


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """Return the variable by which a process learns that it runs a script: its path and its arguments."""
    return {_VARIABLE: json.dumps(list(arguments))} if arguments else {}


def take_over() -> None:
    """Run what this process was started for. Its children do not inherit that."""
    global argv
    if text := os.environ.pop(_VARIABLE, ""):
        argv = tuple(json.loads(text))
        sys.argv = list(argv)
