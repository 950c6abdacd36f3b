"""Features that are implemented in modules above the one that offers them: remote tensors, actors, the dashboard.

`Mesh.dashboard()` belongs to Mesh, but its implementation must not be imported below it. The top-level package
registers where each feature is (`provide`), and who offers it looks it up by name when it is called (`find`);
nothing is imported earlier.
"""

from __future__ import annotations

import importlib
from typing import Any

from meshbook.errors import UsageError

_ENTRY_POINTS: dict[str, str] = {}


def provide(entry_points: dict[str, str]) -> None:
    """Register entry points: name -> "package.module:attribute"."""
    _ENTRY_POINTS.update(entry_points)


def find(name: str) -> Any:
    """Return the object registered under `name`, importing its module if needed.

    Raises:
        UsageError: the name is not registered; `import meshbook` registers it.
    """
    entry_point = _ENTRY_POINTS.get(name)
    if entry_point is None:
        raise UsageError(f"nothing here provides {name!r}; import meshbook itself, not a part of it")
    module, _, attribute = entry_point.partition(":")
    return getattr(importlib.import_module(module), attribute)
