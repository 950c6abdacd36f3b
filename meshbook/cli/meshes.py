"""What the commands share: how they find a mesh, and how they print what they have found."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach
from meshbook.errors import NotAttached
from meshbook.wire import keys


def find_mesh(name: str | None) -> keys.ConnectionInfo:
    """Find a running mesh, with an error message for the terminal if there is none.

    Raises NotAttached, MeshNameError.
    """
    if not keys.list_connections():
        raise NotAttached("no mesh is running; meshbook repl -n 4 starts one")
    return keys.find_connection(name)


@contextlib.contextmanager
def observed_mesh(name: str | None) -> Iterator[Mesh]:
    """Attach to a mesh as an observer."""
    mesh = attach(find_mesh(name).name, kind="cli", observer=True)
    try:
        yield mesh
    finally:
        mesh.session.close()


def print_result(options: argparse.Namespace, result: Any, as_text: Callable[[], object]) -> None:
    """Print a command's result, as JSON if the user wants it."""
    print(msgspec.json.format(as_json(result), indent=2).decode() if options.json else as_text())


def as_json(result: Any) -> bytes:
    return msgspec.json.encode(result, enc_hook=str)  # paths


def use_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
