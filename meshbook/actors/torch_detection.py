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
    if any(_is_from_torch(thing) for thing in _flatten((*args, *kwargs.values()))):
        return True
    bases = [base for base in Class.__mro__ if base is not object]
    if any(TORCH in str(annotation) for base in bases for annotation in _annotations(base)):
        return True
    if any(_imports_torch(_unwrap_function(vars(base).get("__init__"))) for base in bases):
        return True
    return any(_is_from_torch(thing) for base in bases for thing in _referenced_objects(base))


def _annotations(Class: type) -> Iterator[Any]:
    """What its methods say that they take and give: tensors that arrive need torch as well."""
    for value in vars(Class).values():
        if (function := _unwrap_function(value)) is not None and function.__module__.partition(".")[0] != "meshbook":
            yield from function.__annotations__.values()


def _referenced_objects(Class: type) -> Iterator[Any]:
    """What a class's methods find by name outside themselves, functions of the program's own followed."""
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
    value = getattr(value, "method", value)  # an endpoint's own
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _imports_torch(function: FunctionType | None) -> bool:
    instructions = dis.get_instructions(function.__code__) if function is not None else ()
    return any(
        instruction.opname == "IMPORT_NAME" and instruction.argval.partition(".")[0] == TORCH
        for instruction in instructions
    )


def _global_names(code: CodeType) -> set[str]:
    """Globals that it reads. `co_names` has attributes and imports as well."""
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
