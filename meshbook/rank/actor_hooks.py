"""What a rank asks of its actors, if it has any.

Actors are a sibling package of ranks, not a dependency, so they are imported by name, and only on request.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from meshbook.wire.messages import ActiveEndpoint

ACTORS_MODULE = "meshbook.actors.runtime.rank_hooks"


def enable_actors(
    resolve: Callable[[str], Any], resolvers: dict[str, Callable[[str], Any]], use_device: Callable[[], None]
) -> Any:
    """Open this rank to actors; return the reply to `OpenActors`."""
    return importlib.import_module(ACTORS_MODULE).enable_actors(resolve, resolvers, use_device)


def end_actors() -> None:
    """End the rank's actors before the rank itself.

    Blocks, for ACTORS_GRACE_S at most. Call it on any thread but the service thread.
    """
    actors = _imported()
    if actors is not None:
        actors.end_actors()


def call_ended() -> None:
    """Tell the rank's actors that a cell or another call has ended. Main thread."""
    actors = _imported()
    if actors is not None:
        actors.call_ended()


def snapshot_endpoints() -> tuple[ActiveEndpoint, ...]:
    """Return the endpoints that the rank's actors are executing."""
    actors = _imported()
    return () if actors is None else actors.snapshot_endpoints()


def record_messages(recorder: Any) -> None:
    """Have the messages of the rank's actors noted by `recorder`, also of actors to come; None: no longer."""
    if recorder is not None or _imported() is not None:
        importlib.import_module(ACTORS_MODULE).record_messages(recorder)


def _imported() -> ModuleType | None:
    return sys.modules.get(ACTORS_MODULE)
