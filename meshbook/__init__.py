"""Meshbook: a notebook in which every cell runs on a live mesh of processes.

    import meshbook
    with meshbook.create_mesh(4) as mesh:
        mesh.run("x = torch.ones(2) * rank")

The names in `__all__` are the public API. Each is imported on first access, so that `import meshbook` is fast and
imports neither torch nor a notebook. `%load_ext meshbook` adds `%mesh` and `%%mesh` to any IPython.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshbook import errors, exceptions
from meshbook.controller import extensions
from meshbook.version import __version__ as __version__

if TYPE_CHECKING:
    from meshbook.actors.buffer import Buffer, RDMABuffer
    from meshbook.controller.healing import heal_mesh
    from meshbook.controller.listing import list_meshes
    from meshbook.controller.mesh import Mesh
    from meshbook.controller.results import RankValues
    from meshbook.controller.starting import attach, create_mesh
    from meshbook.rank.elastic.loop import elastic
    from meshbook.rank.elastic.sampler import ElasticSampler
    from meshbook.rank.preemption import preempted
    from meshbook.rank.scalars import log
    from meshbook.rank.tensors.strategies import Plan
    from meshbook.tensors.api import distribute
    from meshbook.tensors.modules import module_to_mesh
    from meshbook.tensors.recording import record
    from meshbook.tensors.recovery import recover

__all__ = [
    "Buffer", "ElasticSampler", "Mesh", "Plan", "RDMABuffer", "RankValues", "attach", "create_mesh", "distribute",
    "elastic", "errors", "exceptions", "heal_mesh", "list_meshes", "log", "module_to_mesh", "preempted", "record",
    "recover",
]  # fmt: skip

_WHERE = {
    "Buffer": "meshbook.actors.buffer",
    "RDMABuffer": "meshbook.actors.buffer",
    "Mesh": "meshbook.controller.mesh",
    "Plan": "meshbook.rank.tensors.strategies",
    "RankValues": "meshbook.controller.results",
    "attach": "meshbook.controller.starting",
    "create_mesh": "meshbook.controller.starting",
    "list_meshes": "meshbook.controller.listing",
    "ElasticSampler": "meshbook.rank.elastic.sampler",
    "elastic": "meshbook.rank.elastic.loop",
    "log": "meshbook.rank.scalars",
    "distribute": "meshbook.tensors.api",
    "heal_mesh": "meshbook.controller.healing",
    "module_to_mesh": "meshbook.tensors.modules",
    "preempted": "meshbook.rank.preemption",
    "record": "meshbook.tensors.recording",
    "recover": "meshbook.tensors.recovery",
}

# Entry points of features that the controller offers and layers above it implement.
extensions.provide(
    {
        "activate": "meshbook.tensors.creation:activate",
        "actor_state": "meshbook.actors.state:state_of",
        "actors": "meshbook.actors.listing:actors_on",
        "create_mesh": "meshbook.controller.starting:create_mesh",
        "dashboard": "meshbook.dashboard.widget:dashboard",
        "feed": "meshbook.tensors.feeding:feed",
        "marimo_session": "meshbook.marimo.meshes:get_or_start_session",
        "resilient": "meshbook.tensors.resilient:resilient",
        "spawn": "meshbook.actors.procs:spawn_on",
        "tensor_named": "meshbook.tensors.creation:adopt",
        "with_tensors": "meshbook.tensors.creation:with_tensors",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'meshbook' has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found  # later accesses do not call `__getattr__`
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Handle `%load_ext meshbook`: add the magics. Other cells stay local until `%mesh auto on`."""
    from meshbook.kernel import magics

    magics.register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Handle `%unload_ext meshbook`: remove the magics. Running meshes continue, and end with this process."""
    from meshbook.kernel import magics

    magics.unregister(shell)
