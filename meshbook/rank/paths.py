"""The way from a name or a kept object to a value: `x`, `x.shape[0]`, `model(batch) + 1`.

A `Path` is plain data that travels in a pickle. The controller writes it down, one step per operation on a handle; a
rank follows it. Standard library only; knows nothing of shells, handles or messages.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

# By the name that a step carries: the function, how it is written, and how tightly it binds in Python's grammar.
UNARY: Final[Mapping[str, tuple[Callable[[Any], Any], str, int]]] = {
    "neg": (operator.neg, "-{}", 12),
    "pos": (operator.pos, "+{}", 12),
    "invert": (operator.invert, "~{}", 12),
    "not": (operator.not_, "not {}", 4),
    "abs": (abs, "abs({})", 15),
    "bool": (bool, "bool({})", 15),
    "int": (int, "int({})", 15),
    "float": (float, "float({})", 15),
    "complex": (complex, "complex({})", 15),
    "len": (len, "len({})", 15),
}
BINARY: Final[Mapping[str, tuple[Callable[[Any, Any], Any], str, int]]] = {
    "lt": (operator.lt, "<", 5),
    "le": (operator.le, "<=", 5),
    "eq": (operator.eq, "==", 5),
    "ne": (operator.ne, "!=", 5),
    "gt": (operator.gt, ">", 5),
    "ge": (operator.ge, ">=", 5),
    "contains": (operator.contains, "in", 5),  # its left side is written on the right
    "or": (operator.or_, "|", 6),
    "xor": (operator.xor, "^", 7),
    "and": (operator.and_, "&", 8),
    "lshift": (operator.lshift, "<<", 9),
    "rshift": (operator.rshift, ">>", 9),
    "add": (operator.add, "+", 10),
    "sub": (operator.sub, "-", 10),
    "mul": (operator.mul, "*", 11),
    "matmul": (operator.matmul, "@", 11),
    "truediv": (operator.truediv, "/", 11),
    "floordiv": (operator.floordiv, "//", 11),
    "mod": (operator.mod, "%", 11),
    "pow": (operator.pow, "**", 13),
}
_UNARY_NAMES: Final = {act: op for op, (act, _, _) in UNARY.items()}
_BINARY_NAMES: Final = {act: op for op, (act, _, _) in BINARY.items()}
_TIGHTEST: Final = 15
_SHOWN_CHARS: Final = 40  # of one argument in a spelling


@dataclass(frozen=True, slots=True)
class Name:
    """A name in the rank's namespace."""

    name: str

    @property
    def key(self) -> str:
        """How one string says it."""
        return f"name:{self.name}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An object that the rank keeps: the result of a call."""

    call: str
    spelling: str = ""  # how Python would spell what was called for

    @property
    def key(self) -> str:
        """How one string says it."""
        return f"ref:{self.call}"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that travels with the path, to be called on the rank."""

    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Attr:
    name: str


@dataclass(frozen=True, slots=True)
class Item:
    key: Any


@dataclass(frozen=True, slots=True)
class Call:
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Unary:
    op: str  # a key of UNARY


@dataclass(frozen=True, slots=True)
class Binary:
    op: str  # a key of BINARY
    other: Any
    reflected: bool = False  # `other op path` instead of `path op other`


Step = Attr | Item | Call | Unary | Binary


@dataclass(frozen=True, slots=True)
class Path:
    """A root and the steps from there. `str(path)` is how Python would spell it.

    Keys, arguments and operands may be Paths themselves, also inside tuples, lists, sets, dicts and slices.
    """

    root: Name | Ref | Function
    steps: tuple[Step, ...] = ()

    def attr(self, name: str) -> Path:
        return self._then(Attr(name))

    def item(self, key: Any) -> Path:
        return self._then(Item(key))

    def call(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Path:
        return self._then(Call(tuple(args), tuple((kwargs or {}).items())))

    def unary(self, op: str) -> Path:
        """`-path` and the like; `op` is a key of UNARY."""
        return self._then(Unary(op))

    def binary(self, op: str, other: Any, *, reflected: bool = False) -> Path:
        """`path + other`, or `other + path`; `op` is a key of BINARY."""
        return self._then(Binary(op, other, reflected))

    def is_plain(self) -> bool:
        """Whether it only names: a name, attributes, subscripts by a number or a string. Such a path can be followed
        without running code, as far as the objects on it allow.
        """
        return isinstance(self.root, Name) and all(
            isinstance(step, Attr) or (isinstance(step, Item) and type(step.key) in (int, str)) for step in self.steps
        )

    def _then(self, step: Step) -> Path:
        return replace(self, steps=(*self.steps, step))

    def __str__(self) -> str:
        return self._spelling()[0]

    def _spelling(self) -> tuple[str, int]:
        text, binds = _root_spelled(self.root)
        for step in self.steps:
            text, binds = _spelled(text, binds, step)
        return text, binds


def call_function(function: Callable[..., Any], *args: Any) -> Path:
    """A path that is the result of `function(*args)`, called on the rank; operators become steps.

    Args:
        args: at least one of them a Path.
    """
    if len(args) == 1 and isinstance(args[0], Path) and function in _UNARY_NAMES:
        return args[0].unary(_UNARY_NAMES[function])
    if len(args) == 2 and function in _BINARY_NAMES:
        left, right = args
        if isinstance(left, Path):
            return left.binary(_BINARY_NAMES[function], right)
        if isinstance(right, Path):
            return right.binary(_BINARY_NAMES[function], left, reflected=True)
    return Path(Function(function)).call(args)


def evaluate(
    path: Path,
    namespace: Mapping[str, Any],
    refs: Mapping[str, Any],
    resolve: Callable[[str], Any] | None = None,
) -> Any:
    """Follow a path.

    Args:
        namespace: where names are looked up.
        refs: where kept objects are looked up, by the call that made them.
        resolve: asked for a root that is in neither, by its `key`; what it raises passes.

    Raises:
        NameError: there is no such name.
        KeyError: there is no such kept object.
        Exception: whatever a step raises, untouched.
    """
    value = _root(path.root, namespace, refs, resolve)

    def own(part: Any) -> Any:
        """An argument as the rank's own object."""
        kind = type(part)
        if kind is Path:
            return evaluate(part, namespace, refs, resolve)
        if kind is Name or kind is Ref:
            return _root(part, namespace, refs, resolve)
        if not _holds_path(part):
            return part
        if kind is slice:
            return slice(own(part.start), own(part.stop), own(part.step))
        if kind is dict:
            return {own(key): own(item) for key, item in part.items()}
        return kind(map(own, part))

    for step in path.steps:
        match step:
            case Attr(name):
                value = getattr(value, name)
            case Item(key):
                value = value[own(key)]
            case Call(args, kwargs):
                value = value(*map(own, args), **{name: own(arg) for name, arg in kwargs})
            case Unary(op):
                value = UNARY[op][0](value)
            case Binary(op, other, reflected):
                left, right = (own(other), value) if reflected else (value, own(other))
                value = BINARY[op][0](left, right)
    return value


def _root(
    root: Name | Ref | Function,
    namespace: Mapping[str, Any],
    refs: Mapping[str, Any],
    resolve: Callable[[str], Any] | None,
) -> Any:
    match root:
        case Function(function):
            return function
        case Name(name):
            if name in namespace:
                return namespace[name]
            if resolve is None:
                raise NameError(f"name {name!r} is not defined", name=name)
        case Ref(call):
            if call in refs:
                return refs[call]
            if resolve is None:
                raise KeyError(call)
    return resolve(root.key)


def _holds_path(part: Any) -> bool:
    """Whether a built-in container has a Path somewhere in it; only then it is rebuilt."""
    kind = type(part)
    if kind is Path or kind is Name or kind is Ref:
        return True
    if kind is slice:
        return any(map(_holds_path, (part.start, part.stop, part.step)))
    if kind is dict:
        return any(_holds_path(key) or _holds_path(item) for key, item in part.items())
    return kind in (tuple, list, set) and any(map(_holds_path, part))


# ---------------------------------------------------------------------------------------------------------------------
# Spelling


def _root_spelled(root: Name | Ref | Function) -> tuple[str, int]:
    match root:
        case Name(name):
            return name, _TIGHTEST
        case Function(function):
            return getattr(function, "__qualname__", None) or repr(function), _TIGHTEST
        case Ref(call, spelling):
            if not spelling:
                return f"<{call}>", _TIGHTEST
            return spelling, _TIGHTEST if _is_primary(spelling) else 0


def _is_primary(spelling: str) -> bool:
    """Whether `.attribute` after it belongs to all of it."""
    try:
        tree = ast.parse(spelling, mode="eval")
    except SyntaxError:
        return False
    return isinstance(tree.body, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))


def _spelled(text: str, binds: int, step: Step) -> tuple[str, int]:
    """The text after one more step, and how tightly it binds."""
    match step:
        case Attr(name):
            return f"{_enclosed(text, binds, _TIGHTEST)}.{name}", _TIGHTEST
        case Item(key):
            return f"{_enclosed(text, binds, _TIGHTEST)}[{_key(key)}]", _TIGHTEST
        case Call(args, kwargs):
            given = [*map(_argument, args), *(f"{name}={_argument(arg)}" for name, arg in kwargs)]
            return f"{_enclosed(text, binds, _TIGHTEST)}({', '.join(given)})", _TIGHTEST
        case Unary(op):
            _, template, level = UNARY[op]
            return template.format(text if template.endswith(")") else _enclosed(text, binds, level)), level
        case Binary(op, other, reflected):
            _, sign, level = BINARY[op]
            right, right_binds = _argument(other), _binding(other)
            left, left_binds = text, binds
            if op == "contains":
                reflected = not reflected
            if reflected:
                left, left_binds, right, right_binds = right, right_binds, left, left_binds
            # Chained, comparisons mean something else, and ** groups to the right: their left side is enclosed as well.
            outer = level + 1 if level == 5 or op == "pow" else level
            inner = level if op == "pow" else level + 1
            return f"{_enclosed(left, left_binds, outer)} {sign} {_enclosed(right, right_binds, inner)}", level
    raise TypeError(f"{step!r} is not a step of a path")


def _enclosed(text: str, binds: int, needed: int) -> str:
    return text if binds >= needed else f"({text})"


def _binding(value: Any) -> int:
    """How tightly the spelling of an operand binds."""
    if isinstance(value, Path):
        return value._spelling()[1]
    if isinstance(value, (int, float)) and value < 0:
        return UNARY["neg"][2]
    return _TIGHTEST


def _argument(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (Name, Ref)):
        return _root_spelled(value)[0]
    if value is Ellipsis:
        return "..."
    if _holds_path(value):
        text = _container(value)
    else:
        try:
            text = " ".join(repr(value).split())
        except Exception:
            text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def _container(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_argument(key)}: {_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
    inner = ", ".join(map(_argument, value))
    if isinstance(value, tuple):
        return f"({inner}{',' if len(value) == 1 else ''})"
    return f"[{inner}]" if isinstance(value, list) else f"{{{inner}}}"


def _key(key: Any) -> str:
    if isinstance(key, slice):
        ends = ["" if end is None else _argument(end) for end in (key.start, key.stop)]
        return ":".join(ends if key.step is None else [*ends, _argument(key.step)])
    if isinstance(key, tuple) and key:
        return ", ".join(map(_key, key)) + ("," if len(key) == 1 else "")
    return _argument(key)
