"""Call the hooks that an actor's class may define: `__supervise__`, `__cleanup__` and `__del__`."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from meshbook.actors.runtime.faults import MeshFailure
from meshbook.errors import message_of, traceback_of

log = logging.getLogger("meshbook.actors")


async def supervise(actor: Any, name: str, failure: MeshFailure, *, on_loop: bool) -> MeshFailure | None:
    """Let an actor handle the failure of something that it owns; return what it has not handled.

    Args:
        on_loop: the hook may be `async def`. Otherwise this coroutine does not wait.
    """
    hook = getattr(actor, "__supervise__", None)
    if hook is None:
        return failure
    try:
        handled = hook(failure)
        if on_loop and inspect.isawaitable(handled):
            handled = await handled
        return None if handled else failure
    except BaseException as error:
        raised = f"{type(error).__name__}: {message_of(error)}"
        text = f"{name}.__supervise__ raised {raised}, when it was called with: {failure}"
        return MeshFailure(failure.mesh_name, failure.ranks, text, traceback_of(error))


async def clean_up(actor: Any, label: str, cause: BaseException | None, *, on_loop: bool) -> None:
    """Tell an actor that it ends; log what its hook raises."""
    hook = getattr(actor, "__cleanup__", None)
    try:
        if hook is not None:
            done = hook(cause)
            if on_loop and inspect.isawaitable(done):
                await done
    except BaseException as error:
        log.error("__cleanup__ of %s failed\n%s", label, traceback_of(error))


def deletion_of(actor: Any) -> Callable[[], None]:
    """Return a function that has `__del__` of the actor run, once nobody but the actor itself refers to it."""
    left = weakref.ref(actor) if hasattr(actor, "__del__") else lambda: None

    def run_del() -> None:
        if left() is not None:
            gc.collect()

    return run_del
