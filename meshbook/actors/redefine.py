"""Update living actors to a redefined class: they get its methods and keep their attributes.

In a notebook the cell that defines a class is run repeatedly. Independent of notebooks: the caller passes the new
class, or a namespace that contains it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshbook.actors import base
from meshbook.actors.mesh import ActorMesh, describe_class
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import has_local_transport
from meshbook.errors import MeshTimeout

# Seconds to wait for actors to confirm the update. Later messages are processed after it in any case, so there is no
# need to wait for an actor that runs a long endpoint.
_WAIT_S = 1.0


@dataclass(frozen=True)
class Redefined:
    """The result of the update for one mesh of actors. `str()` returns it as a sentence.

    Attributes:
        name: the name of the mesh.
        changed, added, removed: names of methods and class attributes.
        init_changed: `__init__` differs; it does not run again.
        refused: why its actors were not updated; None if they were.
        is_pending: an actor is busy and is updated after its current message.
    """

    name: str
    class_name: str
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    init_changed: bool = False
    refused: str | None = None
    is_pending: bool = False

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.name} keeps the old {self.class_name}: {self.refused}"
        parts = [
            f"{word}: {', '.join(names)}"
            for word, names in (("changed", self.changed), ("new", self.added), ("gone", self.removed))
            if names
        ]
        text = f"{self.name} runs the new {self.class_name} ({'; '.join(parts) or 'nothing differs'})"
        if self.is_pending:
            text += ", after what it is running"
        return text + ("; its __init__ is for actors spawned from now on" if self.init_changed else "")


def redefine(Class: type) -> list[Redefined]:
    """Update the actors that this program has spawned from an earlier class of the same name to the methods of `Class`.

    Their attributes stay as they are, and `__init__` does not run. Messages sent before run the old methods.

    Returns:
        One result for each mesh of actors; `str()` of it is a sentence.

    Raises:
        TypeError, ValueError: `Class` is not an actor class, or cannot be one.
    """
    describe_class(Class)
    done = []
    for owned in list(local_registry().owned.values()):
        ref = owned.ref
        if owned.stopped or ref.Class is None or ref.Class is Class:
            continue
        if (ref.Class.__module__, ref.Class.__qualname__) == (Class.__module__, Class.__qualname__):
            done.append(_redefine(ref, Class))
    return done


def redefine_from(namespace: Mapping[str, Any]) -> list[Redefined]:
    """Update all living actors whose class is redefined in a namespace, such as a notebook's."""
    if not has_local_transport():
        return []
    stale = dict.fromkeys(
        Class.__qualname__
        for owned in list(local_registry().owned.values())
        if not owned.stopped and (Class := owned.ref.Class) is not None and Class.__module__ == "__main__"
        if namespace.get(Class.__qualname__) is not Class
    )
    return [
        result
        for name in stale
        if isinstance(found := namespace.get(name), type) and issubclass(found, base.Actor)
        for result in redefine(found)
    ]


def _redefine(ref: Any, Class: type) -> Redefined:
    old = ref.Class
    differences: dict[str, Any] = _differences(old, Class)
    if base.runs_on_loop(old) != base.runs_on_loop(Class):
        ref.Class = Class  # refuse only once
        was = "async def" if base.runs_on_loop(old) else "plain def"
        return Redefined(
            ref.name, Class.__name__, refused=f"its endpoints were {was}, and what they run on was made for that; "
            f"stop it and spawn it anew"
        )  # fmt: skip
    future = ActorMesh(ref, ref.axes)._apply(swap_class, Class)
    is_pending = False
    try:
        future.get(_WAIT_S)
    except MeshTimeout:
        is_pending = True
    except Exception as error:
        ref.Class = Class
        return Redefined(ref.name, Class.__name__, refused=str(error).splitlines()[0])
    ref.endpoints, ref.methods = describe_class(Class)
    ref.Class = Class
    return Redefined(ref.name, Class.__name__, **differences, is_pending=is_pending)


def swap_class(actor: Any, Class: type) -> None:
    """Set an actor's class. Runs in the actor's process, on its thread."""
    actor.__class__ = Class


def _differences(old: type, new: type) -> dict[str, Any]:
    before, after = _user_attributes(old), _user_attributes(new)
    changed = [name for name in after if name in before and not _equal(before[name], after[name])]
    return {
        "changed": tuple(name for name in changed if name != "__init__"),
        "added": tuple(name for name in after if name not in before),
        "removed": tuple(name for name in before if name not in after),
        "init_changed": "__init__" in changed,
    }


def _user_attributes(Class: type) -> dict[str, Any]:
    """Return what the user's class and its user-defined base classes define."""
    found: dict[str, Any] = {}
    for base_class in reversed(Class.__mro__):
        if base_class not in (object, base.Actor):
            found.update(vars(base_class))
    return {
        name: thing for name, thing in found.items()
        if name == "__init__" or not (name.startswith("__") and name.endswith("__"))
    }  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    """Whether two attributes are equal, comparing functions by their code."""
    if isinstance(one, base.EndpointProperty) and isinstance(other, base.EndpointProperty):
        return one.explicit_response_port == other.explicit_response_port and _equal(one.method, other.method)
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return _code_identity(one.__code__) == _code_identity(other.__code__) and one.__defaults__ == other.__defaults__
    with contextlib.suppress(Exception):
        return bool(one == other)
    return one is other


def _code_identity(code: types.CodeType) -> tuple[Any, ...]:
    """Return a comparable form of a function's code without line numbers."""
    constants = tuple(
        _code_identity(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
