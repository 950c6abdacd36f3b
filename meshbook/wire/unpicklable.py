"""Which part of an object cannot be pickled, and what to do about it."""

from __future__ import annotations

import copyreg
import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from meshbook.clock import monotonic
from meshbook.errors import message_of, repr_of
from meshbook.wire.pickler import NotSendable, PayloadPickler, PersistentKey

if TYPE_CHECKING:
    pass

SEARCH_BUDGET_S = 1.0  # time limit of the search for the unpicklable part; then the error names the part reached so far
MAX_SEARCH_DEPTH = 32


def describe_unpicklable(
    obj: object, name: str | Sequence[str], persistent: PersistentKey | None, error: Exception
) -> str:
    """Return the error message for an object that cannot be pickled."""
    path = name if isinstance(name, str) else "value"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return f"`{path}` is nested too deeply to be pickled; send it in a flatter form, or raise sys.setrecursionlimit"
    search = _CulpritSearch(persistent, error)
    if isinstance(name, str) or not isinstance(obj, tuple):
        search.descend(path, obj)
    else:
        search.descend_into_first(zip(name, obj, strict=False))
    culprit = f"`{search.path or path}` (a {type_name(search.culprit)})"
    if isinstance(search.error, NotSendable):
        return f"{culprit} cannot travel: {search.error}"
    return f"{culprit} cannot be pickled: {format_error(search.error)}; {_suggest_fix(search)}"


class _CulpritSearch:
    """Searches an object that cannot be pickled for the part at fault, by pickling its parts one by one.

    Objects on the path, and those that pickled without an error, count as pickled: a part is not blamed for a reference
    to its owner, and nothing is pickled twice.
    """

    def __init__(self, persistent: PersistentKey | None, error: Exception) -> None:
        self._persistent = persistent
        self._deadline = monotonic() + SEARCH_BUDGET_S
        self._visited: dict[int, object] = {}  # by id; retained, so that the ids are not reused
        self.path = ""
        self.culprit: object = None
        self.owner: object = None
        self.error = error

    def descend(self, path: str, obj: object) -> None:
        """Set `culprit` to `obj`, or to the part of it that is at fault."""
        self.path, self.culprit = path, obj
        for _ in range(MAX_SEARCH_DEPTH):
            self._visited[id(self.culprit)] = self.culprit
            if not self._descend_once(_iter_parts(self.path, self.culprit)):
                return

    def descend_into_first(self, parts: Iterator[tuple[str, object]]) -> None:
        if self._descend_once(parts):
            self.descend(self.path, self.culprit)

    def _descend_once(self, parts: Iterator[tuple[str, object]]) -> bool:
        """Descend to the first part that cannot be pickled; return False if there is none or time runs out."""
        owner = self.culprit
        try:
            for path, part in parts:
                if monotonic() > self._deadline:
                    return False
                error = self._try_pickle(part)
                if error is not None:
                    self.path, self.culprit, self.owner, self.error = path, part, owner, error
                    return True
                self._visited[id(part)] = part
        # user code failed while listing its parts (__reduce__, a key's __repr__): `owner` itself is the culprit
        except Exception:
            return False
        return False

    def _try_pickle(self, part: object) -> Exception | None:
        pickler = _TrialPickler(self._persistent, self._visited, self._deadline)
        try:
            pickler.dump(part)
        except _OutOfTime:
            return None
        except Exception as error:
            return error
        return None


class _OutOfTime(Exception):
    """The search exceeds its time limit. An expected result, not an error."""


class _TrialPickler(PayloadPickler):
    """Pickles and discards the output; visited objects count as pickled."""

    def __init__(self, persistent: PersistentKey | None, visited: dict[int, object], deadline: float) -> None:
        super().__init__(self, lambda buffer: False, persistent)
        self._visited = visited
        self._deadline = deadline

    def write(self, piece: bytes | memoryview) -> int:
        if monotonic() > self._deadline:
            raise _OutOfTime
        return len(piece)

    def persistent_id(self, obj: object) -> str | None:
        return "visited" if id(obj) in self._visited else None


def _iter_parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object's pickle, each with a readable path."""
    if type(obj) is dict:
        yield from ((f"{path}[{_short_repr(key)}]", part) for key, part in cast("dict[object, object]", obj).items())
        yield from ((f"key {_short_repr(key)} of {path}", key) for key in obj)
    elif type(obj) in (list, tuple):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(cast("list[object]", obj)))
    elif type(obj) in (set, frozenset):
        yield from ((f"{_short_repr(part)} in {path}", part) for part in cast("set[object]", obj))
    elif isinstance(obj, types.FunctionType):
        yield from _iter_function_parts(path, obj)
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
    elif isinstance(obj, functools.partial):
        yield f"{path}.func", obj.func
        yield from ((f"{path}.args[{index}]", part) for index, part in enumerate(obj.args))
        yield from ((f"{path}.keywords[{key!r}]", part) for key, part in obj.keywords.items())
    elif isinstance(obj, type):
        own = {key: part for key, part in vars(obj).items() if key not in ("__dict__", "__weakref__")}
        yield from ((f"{path}.{key}", part) for key, part in own.items())
    elif isinstance(obj, (property, staticmethod, classmethod)):
        accessors = (obj.fget, obj.fset, obj.fdel) if isinstance(obj, property) else (obj.__func__,)
        yield from ((path, part) for part in accessors)
    else:
        yield from _iter_object_parts(path, obj)


def _iter_function_parts(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path} -> {name}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _global_names(code):
        if name in function.__globals__:
            yield f"{path} -> {name}", function.__globals__[name]
    positional = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    for name, default in (defaults | (function.__kwdefaults__ or {})).items():
        yield f"{path}({name}=...)", default
    yield from ((f"{path}.{name}", part) for name, part in vars(function).items())


def _global_names(code: types.CodeType) -> list[str]:
    """Return the global names that the code, or a function inside it, uses: those that cloudpickle sends along."""
    names = {str(step.argval): None for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)


def _iter_object_parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    reduce = copyreg.dispatch_table.get(type(obj))
    reduced: Any = reduce(obj) if reduce is not None else obj.__reduce_ex__(5)
    if isinstance(reduced, str):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", part) for name, part in attributes.items())
    yield from ((f"{path}[{index}]", part) for index, part in enumerate(items or ()))
    yield from ((f"{path}[{_short_repr(key)}]", part) for key, part in pairs or ())
    for index, argument in enumerate(arguments):
        yield (argument.__qualname__ if isinstance(argument, type) else f"{path}.__reduce__()[1][{index}]"), argument
    if not isinstance(state, dict):
        yield f"{path}.__getstate__()", state


def _suggest_fix(search: _CulpritSearch) -> str:
    kind = type_name(search.culprit)
    for start, advice in _SUGGESTED_FIXES.items():
        if kind.startswith(start):
            return advice
    owner = search.owner
    if owner is not None and not isinstance(owner, (dict, list, tuple, set, frozenset, type, types.FunctionType)):
        return f"leave it out, or define __getstate__ on {type(owner).__name__} to do so"
    return "leave it out, or make it where it is needed"


# By prefix of a type's name, so that nothing has to be imported.
_SUGGESTED_FIXES = {
    "generator": "send list(...) of it, or make it where it is needed",
    "coroutine": "await it, and send what it gives",
    "_io.": "send its path, and open it where it is needed",
    "socket.": "connect where it is needed",
    "torch._C._distributed_c10d.": "every rank has its own; use that one",
    "torch.distributed.": "every rank has its own; use that one",
}


def type_name(obj: object) -> str:
    kind = type(obj)
    plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def format_error(error: Exception) -> str:
    text = message_of(error).strip().rstrip(".")
    return text if text else type(error).__name__


def _short_repr(key: object) -> str:
    text = repr_of(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
