"""Detect whether an actor class needs torch; processes without torch start immediately. Pure.

This is a guess, made before anything is sent: a wrong one only costs the seconds of an import.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

TORCH = "torch"


def needs_torch(Class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the class refers to torch or to objects of torch, or receives any as arguments.

    A class from a module always counts as needing torch, because the module's imports are unknown. An `import torch`
    inside `__init__` counts, because it runs at once; inside an endpoint it does not, because it runs when the endpoint
    is called.
    """
    if Class.__module__ != "__main__" and "<locals>" not in Class.__qualname__:
        return True
    if any(_is_from_torch(thing) for thing in _flatten((*args, *kwargs.values()))):
        return True
    bases = [base for base in Class.__mro__ if base is not object]
    if any(TORCH in str(annotation) for base in bases for annotation in _annotations(base)):
        return True
    if any(_imports_torch(_unwrap_function(vars(base).get("__init__"))) for base in bases):
        return True
    return any(_is_from_torch(thing) for base in bases for thing in _referenced_objects(base))


def _annotations(Class: type) -> Iterator[Any]:
    """Yield the annotations of a class's methods: received tensors also need torch."""
    for value in vars(Class).values():
        if (function := _unwrap_function(value)) is not None and function.__module__.partition(".")[0] != "meshbook":
            yield from function.__annotations__.values()


def _referenced_objects(Class: type) -> Iterator[Any]:
    """Yield objects that a class's methods refer to by name, following functions of the user's program."""
    yield Class
    pending = [found for value in vars(Class).values() if (found := _unwrap_function(value)) is not None]
    visited: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in visited or function.__module__.partition(".")[0] == "meshbook":
            continue
        visited.add(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        globals_ = [
            function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__
        ]
        for thing in (*cells, *globals_):
            yield thing
            inner = vars(thing).values() if isinstance(thing, type) and thing.__module__ == "__main__" else (thing,)
            pending += [found for value in inner if (found := _unwrap_function(value)) is not None]
            if isinstance(thing, type):
                yield from thing.__mro__


def _unwrap_function(value: Any) -> FunctionType | None:
    value = getattr(value, "method", value)  # the method of an endpoint
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _imports_torch(function: FunctionType | None) -> bool:
    instructions = dis.get_instructions(function.__code__) if function is not None else ()
    return any(
        instruction.opname == "IMPORT_NAME" and instruction.argval.partition(".")[0] == TORCH
        for instruction in instructions
    )


def _global_names(code: CodeType) -> set[str]:
    """Return the globals that code reads. `co_names` also contains attributes and imports."""
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return own.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty one raises)
    except ValueError:
        return False
    return True


def _is_from_torch(thing: Any) -> bool:
    kind = thing if isinstance(thing, type | FunctionType) else type(thing)
    module = thing.__name__ if isinstance(thing, ModuleType) else getattr(kind, "__module__", None) or ""
    return str(module).partition(".")[0] == TORCH


def _flatten(things: Any) -> Iterator[Any]:
    for thing in things:
        yield thing
        if isinstance(thing, dict):
            yield from thing.values()
        elif isinstance(thing, list | tuple):
            yield from thing
