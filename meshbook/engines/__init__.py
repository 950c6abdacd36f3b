"""How hosts are started: on this machine, or through an external launcher."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.engines.base import HostEngine
from meshbook.engines.local import LocalEngine

# By the names that `create_mesh(engine=…)` takes.
ENGINES: dict[str, Callable[[], HostEngine]] = {"local": LocalEngine}
