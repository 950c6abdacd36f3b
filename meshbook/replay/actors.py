"""Sends a recorded actor its messages again, one after the other, in the order in which they once began."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

from meshbook.actors.runtime.context import Context, Instance, context_var
from meshbook.actors.shape import Point
from meshbook.rank.recording.bundle import BundleError

Message = tuple[str, Any, tuple[Any, ...], dict[str, Any], Point]  # method, function or None, args, kwargs, point


def run_messages(actor: Any, identity: tuple[str, str, Point], messages: Iterable[Message], *, num: int) -> None:
    """Run messages; raise what the last one raises. What others raise they also raised on the rank.

    Args:
        identity: the actor's name, its mesh's id and its point.
        num: how many messages there are.
    """
    name, mesh_id, own_point = identity
    instance = Instance(name, mesh_id, own_point, None, None, None, _open_no_procs)
    with asyncio.Runner() as runner:
        for number, (method, function, args, kwargs, point) in enumerate(messages, 1):
            context_var.set(Context(instance, point))
            function = function or getattr(type(actor), method).method
            ignored = contextlib.nullcontext() if number == num else contextlib.suppress(Exception)
            with ignored:
                value = function(actor, *args, **kwargs)
                if inspect.iscoroutine(value):
                    runner.run(value)


def _open_no_procs(procs_ref: Any) -> Any:
    raise BundleError("the replay of an actor has no other processes: what this one asked of them is not recorded")
