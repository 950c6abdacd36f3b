"""The API for programs written for `monarch.actor`: the same names, imported from `meshbook.actor`.

    from meshbook.actor import Actor, endpoint, this_host

    class Trainer(Actor):
        @endpoint
        def step(self, batch): ...

    trainers = this_host().spawn_procs({"gpus": 4}).spawn("trainers", Trainer)
    losses = trainers.step.call(batch).get()

docs/actors.md lists every name of `monarch.actor`: whether it is supported, what differs, and which thread runs what.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, NoReturn, ParamSpec, TypeVar

from meshbook.actors.base import Actor, EndpointProperty, endpoint
from meshbook.actors.buffer import Buffer, RDMABuffer
from meshbook.actors.mesh import ActorEndpoint as Endpoint
from meshbook.actors.mesh import ActorMesh, as_endpoint, interrupt, send
from meshbook.actors.procs import (
    HostMesh,
    ProcMesh,
    get_or_spawn_controller,
    shutdown_context,
    this_host,
    this_proc,
)
from meshbook.actors.redefine import redefine
from meshbook.actors.runtime.context import Context, context, current_actor_name, current_rank, current_size
from meshbook.actors.runtime.faults import ActorError, MeshFailure, SupervisionError
from meshbook.actors.runtime.futures import Future, as_completed, run_in_thread
from meshbook.actors.runtime.ports import Channel, Port, PortReceiver
from meshbook.actors.shape import Extent, Point
from meshbook.actors.state import pull
from meshbook.actors.unhandled_faults import unhandled_fault_hook
from meshbook.actors.values import Accumulator, ValueMesh

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Buffer",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "RDMABuffer",
    "SupervisionError",
    "ValueMesh",
    "as_completed",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "interrupt",
    "pull",
    "redefine",
    "returns_future",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]

_HOSTS = 'hosts are started by meshbook.create_mesh(on="ssh://…"), and actors on them by mesh.spawn(…)'
_CHANNELS = "processes of one machine speak over unix sockets, those of several over TCP, always"
_TRACING = "what actors do is shown by %mesh actors; spans and meters are not recorded"
_IDS = "actors and processes have plain strings for ids: context().actor_instance.actor_id"

# Names of `monarch.actor` that are not supported, and their replacements. docs/actors.md has the same table; a test
# compares them.
NOT_HERE = {
    "ChannelTransport": _CHANNELS,
    "ProcId": _IDS,
    "Uid": _IDS,
    "attach": _HOSTS,
    "attach_to_workers": _HOSTS,
    "config": "there is nothing to set: limits and timeouts are arguments of the calls that have them",
    "debug_controller": "%%mesh --actor NAME looks inside actors; breakpoint() in an endpoint is not served",
    "default_bootstrap_cmd": "processes are forked from one warm server; this_host().spawn_procs(env=…) sets variables",
    "enable_transport": _CHANNELS,
    "get_meter": _TRACING,
    "run_worker_loop_forever": _HOSTS,
    "run_worker_loop_until_shutdown": _HOSTS,
    "span": _TRACING,
    "start_worker_loop_forever": _HOSTS,
    "traced": _TRACING,
}


def __getattr__(name: str) -> NoReturn:
    if name in NOT_HERE:
        # Not AttributeError: `from meshbook.actor import …` would hide the reason.
        raise ImportError(f"meshbook.actor has no {name}: {NOT_HERE[name]}", name=name)
    raise AttributeError(f"module 'meshbook.actor' has no attribute {name!r}")


def concurrent_endpoint(method: Any = None, **options: Any) -> Any:
    """Mark an `async def` as an endpoint. Same as `endpoint`: all async endpoints interleave at `await`.

    Raises:
        TypeError: the method is not `async def`.
    """
    if method is None:
        return functools.partial(concurrent_endpoint, **options)
    mark = endpoint(method, **options)
    if isinstance(mark, EndpointProperty) and not mark.is_async:
        raise TypeError(f"@concurrent_endpoint marks an `async def`, and {mark.__name__} is a plain one: use @endpoint")
    return mark


def returns_future(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Future[T]]:
    """Make an `async def` return a Future when called: `get()` and `await` both work on it.

    The call starts immediately, on its own event loop and thread.

    Raises:
        TypeError: the function is not `async def`.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"@returns_future marks an `async def`, and {function.__name__} is none")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        caller_context = copy_context()
        return run_in_thread(
            lambda: caller_context.run(asyncio.run, function(*args, **kwargs)), function.__name__, daemon=True
        )

    return call
