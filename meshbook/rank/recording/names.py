"""Which names of the namespace code reads: itself, and by the functions and classes of earlier cells that it uses."""

from __future__ import annotations

import opcode
import types
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

# What reads names that no code shows. Then all of the user's names count as read.
_READS_ANYTHING = frozenset({"eval", "exec", "globals", "locals", "vars", "get_ipython", "run_line_magic"})

_EXTENDED_ARG = opcode.opmap["EXTENDED_ARG"]
_LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
_STORE_NAME = opcode.opmap["STORE_NAME"]
# A name that is deleted has to be there, as one that is read.
_READ_OPS = frozenset(
    opcode.opmap[name]
    for name in ("DELETE_GLOBAL", "DELETE_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME")
    if name in opcode.opmap
)


def names_read(codes: Iterable[CodeType], namespace: Mapping[str, Any], every: Iterable[str]) -> list[str]:
    """Return the names that code reads and the namespace has, in the order in which they are found.

    Args:
        every: the user's names, which all count as read if the code can read names that it does not show.
    """
    found: dict[str, None] = {}
    pending = list(codes)
    seen: set[int] = set()
    while pending:
        code = pending.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        for name in global_names(code):
            if name in found:
                continue
            if name in _READS_ANYTHING and name not in namespace:
                found.update((other, None) for other in every)
            elif name in namespace:
                found[name] = None
                pending += _codes_of(namespace[name], namespace)
    return list(found)


def names_bound_first(codes: Iterable[CodeType]) -> set[str]:
    """Return the names that a cell's own code binds before it reads them, as far as the order of its lines tells."""
    first: dict[str, bool] = {}
    for code in codes:
        for name, is_bound in _names_in_order(code):
            first.setdefault(name, is_bound)
    return {name for name, is_bound in first.items() if is_bound}


def _names_in_order(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the global names that code's own lines read, delete or bind, and whether that binds them."""
    extended, raw = 0, code.co_code
    for i in range(0, len(raw), 2):
        op, arg = raw[i], raw[i + 1] | extended
        extended = arg << 8 if op == _EXTENDED_ARG else 0
        if op == _STORE_NAME or op in _READ_OPS:
            yield code.co_names[arg >> 1 if op == _LOAD_GLOBAL else arg], op == _STORE_NAME


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code reads or deletes, itself or in the functions that it defines."""
    pending = [code]
    while pending:
        code = pending.pop()
        yield from (name for name, is_bound in _names_in_order(code) if not is_bound)
        pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _codes_of(value: Any, namespace: Mapping[str, Any]) -> list[CodeType]:
    """Return the code of a function or class that a cell has defined, or of a value's class."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return [value.__code__] if value.__globals__ is namespace else []
    kind = value if isinstance(value, type) else type(value)
    functions = [
        getattr(attribute, "__func__", getattr(attribute, "fget", None) or attribute)
        for base in kind.__mro__
        if base.__module__ == "__main__"
        for attribute in vars(base).values()
    ]
    return [
        function.__code__
        for function in functions
        if isinstance(function, types.FunctionType) and function.__globals__ is namespace
    ]
