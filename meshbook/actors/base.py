"""What an actor's class is made of: the base class `Actor`, the mark `@endpoint`, and what may be marked.

Known on both sides: the caller reads from a class which endpoints there are, the rank runs them. Knows no messages,
threads or meshes. The words are Monarch's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple


class Actor:
    """Base class of actors: an object that lives in one process and is spoken to by messages, one after the other.

    Endpoints (`@endpoint`) are what others may call. Three more methods mean something when a class defines them, each
    with `def` or `async def`:

    - `__cleanup__(self, exc)`: the actor stops; `exc` is None, or what ended it.
    - `__supervise__(self, failure) -> bool`: something that this actor spawned has failed (`MeshFailure`). True says
      that it is handled. Otherwise the failure goes on to whoever spawned this actor, and in the end to
      `unhandled_fault_hook`.
    """

    @property
    def logger(self) -> logging.Logger:
        """A logger of the class's name; what it prints is shown like any other output of the rank."""
        return logging.getLogger(type(self).__qualname__)


class EndpointProperty:
    """A method that others may call. On the class, the mark; on an instance, the method itself, so that an actor can
    call its own endpoints as plain methods."""

    def __init__(
        self,
        method: Callable[..., Any],
        *,
        propagate: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
    ) -> None:
        if not callable(method):
            raise TypeError(f"@endpoint marks a method, and {method!r} is not one")
        self.method = method
        self.propagate = propagate
        self.explicit_response_port = explicit_response_port
        self.instrument = instrument
        functools.update_wrapper(self, method)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.method)

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.method.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # super().step(…) in a subclass comes here without a mark
        return self.method(*args, **kwargs)


def endpoint(
    method: Any = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark a method of an Actor as callable from elsewhere, bare or with options.

    Args:
        propagate: how the shapes of an `rref` result are found without running it: a callable with the endpoint's
            arguments, or "cached", "inspect", "mocked".
        explicit_response_port: the method gets a `Port` as its first argument after `self` and answers through it,
            once, several times or later; what it returns is dropped.
        instrument: kept for programs written for Monarch; every endpoint is measured here.
    """
    options = {"propagate": propagate, "explicit_response_port": explicit_response_port, "instrument": instrument}
    if method is None:
        return functools.partial(EndpointProperty, **options)
    return EndpointProperty(method, **options)


class EndpointInfo(NamedTuple):
    """What a caller has to know of an endpoint."""

    name: str
    explicit_response_port: bool
    signature: str  # for people, "(self, batch, lr=0.1)"


def endpoints_of(Class: type) -> dict[str, EndpointProperty]:
    """The endpoints of a class, inherited ones included, by name.

    Raises:
        TypeError: it is not a class of actors.
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
    """Whether its endpoints run on an event loop: one of them, or a hook, is `async def`."""
    hooks = (getattr(Class, name, None) for name in ("__supervise__", "__cleanup__"))
    return any(mark.is_async for mark in endpoints_of(Class).values()) or any(
        inspect.iscoroutinefunction(hook) for hook in hooks
    )


def no_such_endpoint(class_name: str, known: list[str], name: str, *, is_method: bool = False) -> str:
    """What to say about a name that is no endpoint."""
    if is_method:
        return f"{class_name}.{name} is not an endpoint, so it cannot be called from here; mark it with @endpoint"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"its endpoints are {', '.join(sorted(known)) or '(none)'}"
    return f"{class_name} has no endpoint {name!r}; {hint}"
