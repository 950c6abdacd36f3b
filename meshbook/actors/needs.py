"""Whether a class of actors is going to need torch, so that processes which do not are there at once. Pure.

A guess, made before anything is sent: to be wrong costs the seconds of an import, and nothing else.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

TORCH = "torch"


def needs_torch(Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the class names torch, or something of torch's, or is given something of it.

    A class that lives in a module counts as one that does: who knows what the module imports. An `import torch` inside
    `__init__` counts, for that runs at once; inside an endpoint it does not, for that runs when it is called.
    """
    if Class.__module__ != "__main__" and "<locals>" not in Class.__qualname__:
        return True
    if any(_is_torchs(thing) for thing in _flat((*args, *kwargs.values()))):
        return True
    bases = [base for base in Class.__mro__ if base is not object]
    if any(TORCH in str(kind) for base in bases for kind in _annotations(base)):
        return True
    if any(_imports_torch(_function(vars(base).get("__init__"))) for base in bases):
        return True
    return any(_is_torchs(thing) for base in bases for thing in _named_by(base))


def _annotations(Class: type) -> Iterator[Any]:
    """What its methods say that they take and give: tensors that arrive need torch as well."""
    for value in vars(Class).values():
        if (function := _function(value)) is not None and function.__module__.partition(".")[0] != "meshbook":
            yield from function.__annotations__.values()


def _named_by(Class: type) -> Iterator[Any]:
    """What a class's methods find by name outside themselves, functions of the program's own followed."""
    yield Class
    ways = [found for value in vars(Class).values() if (found := _function(value)) is not None]
    known: set[int] = set()
    while ways:
        function = ways.pop()
        if id(function) in known or function.__module__.partition(".")[0] == "meshbook":
            continue
        known.add(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        globals_ = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        for thing in (*cells, *globals_):
            yield thing
            inner = vars(thing).values() if isinstance(thing, type) and thing.__module__ == "__main__" else (thing,)
            ways += [found for value in inner if (found := _function(value)) is not None]
            if isinstance(thing, type):
                yield from thing.__mro__


def _function(value: Any) -> FunctionType | None:
    value = getattr(value, "method", value)  # an endpoint's own
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _imports_torch(function: FunctionType | None) -> bool:
    steps = dis.get_instructions(function.__code__) if function is not None else ()
    return any(step.opname == "IMPORT_NAME" and step.argval.partition(".")[0] == TORCH for step in steps)


def _names(code: CodeType) -> set[str]:
    """Globals that it reads. `co_names` has attributes and imports as well."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return own.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty one raises)
    except ValueError:
        return False
    return True


def _is_torchs(thing: Any) -> bool:
    kind = thing if isinstance(thing, type | FunctionType) else type(thing)
    where = thing.__name__ if isinstance(thing, ModuleType) else getattr(kind, "__module__", None) or ""
    return str(where).partition(".")[0] == TORCH


def _flat(things: Any) -> Iterator[Any]:
    for thing in things:
        yield thing
        if isinstance(thing, dict):
            yield from thing.values()
        elif isinstance(thing, list | tuple):
            yield from thing
