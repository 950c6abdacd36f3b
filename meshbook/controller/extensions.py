"""What a Mesh offers that is built on floors above this one: remote tensors, actors, the dashboard.

`Mesh.dashboard()` belongs on Mesh, and what it makes does not belong below it. The front door says where each such
thing is found (`provide`), and a method of Mesh asks for it by name when it is called (`find`); nothing is imported
before that.
"""

from __future__ import annotations

import importlib
from typing import Any

from meshbook.errors import UsageError

_ENTRY_POINTS: dict[str, str] = {}


def provide(entry_points: dict[str, str]) -> None:
    """Say where things are: name -> "package.module:attribute"."""
    _ENTRY_POINTS.update(entry_points)


def find(name: str) -> Any:
    """The thing provided under `name`, imported now if it was not yet.

    Raises:
        UsageError: nobody provides it; `import meshbook` does.
    """
    entry_point = _ENTRY_POINTS.get(name)
    if entry_point is None:
        raise UsageError(f"nothing here provides {name!r}; import meshbook itself, not a part of it")
    module, _, attribute = entry_point.partition(":")
    return getattr(importlib.import_module(module), attribute)
