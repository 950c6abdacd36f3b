"""A class that was defined anew, for the actors that live: their methods become the new ones, their attributes stay.

In a notebook the cell that defines a class is run again and again. Knows no notebook: it is told the new class, or a
namespace to look in.
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
from meshbook.mesh_axes import MeshAxes

# Seconds to wait for actors to say that they are what they were told to be. Later messages come after in any case, so
# an actor in the middle of a long endpoint need not be waited for.
_WAIT_S = 1.0


@dataclass(frozen=True)
class Redefined:
    """What became of one mesh of actors. `str()` of it is a sentence.

    Attributes:
        name: the mesh's.
        changed, added, removed: names of methods and class attributes.
        init_changed: `__init__` differs; it does not run again.
        refused: why its actors stay as they are; None: they do not.
        is_later: an actor is busy, and becomes new after the message it is at.
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
    """Have the actors that this program has spawned from an earlier class of the same name run the methods of `Class`.

    Their attributes stay as they are, and `__init__` does not run. Messages sent before run the old methods.

    Returns:
        One for each mesh of actors; a sentence each by `str`.

    Raises:
        TypeError, ValueError: it is no class of actors, or cannot be one.
    """
    describe_class(Class)
    done = []
    for owned in list(local_registry().owned.values()):
        ref = owned.ref
        if ref is None or owned.stopped or ref.Class in (None, Class):
            continue
        if (ref.Class.__module__, ref.Class.__qualname__) == (Class.__module__, Class.__qualname__):
            done.append(_redefine(ref, Class))
    return done


def redefine_from(namespace: Mapping[str, Any]) -> list[Redefined]:
    """The same for every class of a live actor that a namespace (a notebook's) has another definition of by now."""
    done: list[Redefined] = []
    if not has_local_transport():
        return done
    visited: set[int] = set()
    for owned in list(local_registry().owned.values()):
        ref = owned.ref
        if ref is None or ref.Class is None or owned.stopped or ref.Class.__module__ != "__main__":
            continue
        current_class = namespace.get(ref.Class.__qualname__)
        if (
            isinstance(current_class, type)
            and current_class is not ref.Class
            and id(current_class) not in visited
            and issubclass(current_class, base.Actor)
        ):
            visited.add(id(current_class))
            done += redefine(current_class)
    return done


def _redefine(ref: Any, Class: type) -> Redefined:
    old = ref.Class
    differences: dict[str, Any] = _differences(old, Class)
    if base.runs_on_loop(old) != base.runs_on_loop(Class):
        ref.Class = Class  # asked once, answered once
        was = "async def" if base.runs_on_loop(old) else "plain def"
        return Redefined(
            ref.name, Class.__name__, refused=f"its endpoints were {was}, and what they run on was made for that; "
            f"stop it and spawn it anew"
        )  # fmt: skip
    mesh = ActorMesh(
        ref, MeshAxes(ref.procs_ref.axis_names, ref.procs_ref.axis_sizes, tuple(range(len(ref.addresses))))
    )
    future = mesh._apply(swap_class, Class)
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
    """In the actor's process, on its thread."""
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
    """What a class of the user's defines, base classes of the user's included."""
    found: dict[str, Any] = {}
    for base_class in reversed(Class.__mro__):
        if base_class not in (object, base.Actor):
            found.update(vars(base_class))
    return {
        name: thing for name, thing in found.items()
        if name == "__init__" or not (name.startswith("__") and name.endswith("__"))
    }  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    """Whether two methods do the same, as far as their code says."""
    if isinstance(one, base.EndpointProperty) and isinstance(other, base.EndpointProperty):
        return one.explicit_response_port == other.explicit_response_port and _equal(one.method, other.method)
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return _code_identity(one.__code__) == _code_identity(other.__code__) and one.__defaults__ == other.__defaults__
    with contextlib.suppress(Exception):
        return bool(one == other)
    return one is other


def _code_identity(code: types.CodeType) -> tuple[Any, ...]:
    """A function's code without the lines it stands on."""
    constants = tuple(
        _code_identity(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
