"""The parts of an actor's class: the base class `Actor` and the decorator `@endpoint`.

Used on both sides: callers read the endpoints from the class, ranks run them. Independent of messages, threads and
meshes. The names are Monarch's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple


class Actor:
    """Base class of actors: objects that live in one process and receive messages, one after the other.

    Endpoints (`@endpoint`) are the methods that others may call. Three hooks are called if a class defines them, each
    with `def` or `async def`:

    - `__cleanup__(self, exc)`: the actor stops; `exc` is None, or the error that ended it: what an endpoint with an
      explicit port has raised, what another has raised that is no `Exception`, or that of `abort`.
    - `__supervise__(self, failure) -> bool`: something that this actor spawned has failed (`MeshFailure`). True marks
      the failure as handled. Otherwise it is reported to the actor that spawned this one, and finally to
      `unhandled_fault_hook`.
    """

    @property
    def logger(self) -> logging.Logger:
        """A logger named after the class; its output is shown like any other output of the rank."""
        return logging.getLogger(type(self).__qualname__)


class EndpointProperty:
    """A method that others may call: the decorator's result.

    On the class it is the mark itself, on an instance the bound method, so that an actor can call its own endpoints as
    plain methods.
    """

    def __init__(self, method: Callable[..., Any], *, explicit_response_port: bool = False) -> None:
        if not callable(method):
            raise TypeError(f"@endpoint marks a method, and {method!r} is not one")
        self.method = method
        self.explicit_response_port = explicit_response_port
        functools.update_wrapper(self, method)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.method)

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.method.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # called by super().step(…) in a subclass
        return self.method(*args, **kwargs)


def endpoint(
    method: Any = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark a method of an Actor as callable by others; with or without options.

    Args:
        propagate: accepted for compatibility with Monarch, where it is for endpoints that remote tensors call.
        explicit_response_port: the method gets a `Port` as its first argument after `self` and replies through it,
            once, several times or later; its return value is dropped. What it raises ends the actor.
        instrument: accepted for compatibility with Monarch; every endpoint is measured here.
    """
    if method is None:
        return functools.partial(EndpointProperty, explicit_response_port=explicit_response_port)
    return EndpointProperty(method, explicit_response_port=explicit_response_port)


class EndpointInfo(NamedTuple):
    """The data of an endpoint that callers need."""

    name: str
    explicit_response_port: bool
    signature: str  # for display, "(self, batch, lr=0.1)"


def endpoints_of(Class: type) -> dict[str, EndpointProperty]:
    """Return the endpoints of a class by name, inherited ones included.

    Raises:
        TypeError: it is not an actor class.
    """
    if not (isinstance(Class, type) and issubclass(Class, Actor)):
        raise TypeError(
            f"{getattr(Class, '__name__', Class)!r} is not a class of actors: derive it from meshbook.actor.Actor, "
            "and spawn the class itself, not an instance"
        )
    found = {}
    for name in dir(Class):
        mark = inspect.getattr_static(Class, name, None)
        if isinstance(mark, EndpointProperty):
            found[name] = mark
    return found


def runs_on_loop(Class: type) -> bool:
    """Whether the class's endpoints run on an event loop: an endpoint or a hook is `async def`."""
    hooks = (getattr(Class, name, None) for name in ("__supervise__", "__cleanup__"))
    return any(mark.is_async for mark in endpoints_of(Class).values()) or any(
        inspect.iscoroutinefunction(hook) for hook in hooks
    )


def no_such_endpoint(class_name: str, known: list[str], name: str, *, is_method: bool = False) -> str:
    """Return the error message for a name that is not an endpoint."""
    if is_method:
        return f"{class_name}.{name} is not an endpoint, so it cannot be called from here; mark it with @endpoint"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"its endpoints are {', '.join(sorted(known)) or '(none)'}"
    return f"{class_name} has no endpoint {name!r}; {hint}"
