"""Expressions on a name or a stored object: `x`, `x.shape[0]`, `model(batch) + 1`.

An `Expression` is plain data that is sent as a pickle. The controller records it, one step per operation on a handle; a
rank evaluates it. Standard library only; does not depend on shells, handles or messages.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshbook.errors import repr_of

# By a step's `op`: the function, its source form, and its precedence in Python's grammar.
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
    "copy": (copy.copy, "copy.copy({})", 15),
}
BINARY: Final[Mapping[str, tuple[Callable[[Any, Any], Any], str, int]]] = {
    "lt": (operator.lt, "<", 5),
    "le": (operator.le, "<=", 5),
    "eq": (operator.eq, "==", 5),
    "ne": (operator.ne, "!=", 5),
    "gt": (operator.gt, ">", 5),
    "ge": (operator.ge, ">=", 5),
    "contains": (operator.contains, "in", 5),  # its left operand is written on the right
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
_MAX_PRECEDENCE: Final = 15
_MAX_ARGUMENT_CHARS: Final = 40  # of one argument in the source form


@dataclass(frozen=True, slots=True)
class NameRef:
    """A name in the rank's namespace."""

    name: str

    @property
    def key(self) -> str:
        """The reference as one string."""
        return f"name:{self.name}"


@dataclass(frozen=True, slots=True)
class ResultRef:
    """An object stored on the rank: the result of a call."""

    call: str
    source: str = ""  # the Python source of what was called

    @property
    def key(self) -> str:
        """The reference as one string."""
        return f"ref:{self.call}"


@dataclass(frozen=True, slots=True)
class AttrStep:
    name: str


@dataclass(frozen=True, slots=True)
class ItemStep:
    key: Any


@dataclass(frozen=True, slots=True)
class CallStep:
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class UnaryStep:
    op: str  # a key of UNARY


@dataclass(frozen=True, slots=True)
class BinaryStep:
    op: str  # a key of BINARY
    other: Any
    reflected: bool = False  # `other op expression` instead of `expression op other`


ExpressionStep = AttrStep | ItemStep | CallStep | UnaryStep | BinaryStep


@dataclass(frozen=True, slots=True)
class Expression:
    """A root and the steps from it. `str(expression)` is its Python source.

    Keys, arguments and operands may be Expressions themselves, also inside tuples, lists, sets, dicts and slices.
    """

    root: NameRef | ResultRef
    steps: tuple[ExpressionStep, ...] = ()

    def attr(self, name: str) -> Expression:
        return self._with_step(AttrStep(name))

    def item(self, key: Any) -> Expression:
        return self._with_step(ItemStep(key))

    def call(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Expression:
        return self._with_step(CallStep(tuple(args), tuple((kwargs or {}).items())))

    def unary(self, op: str) -> Expression:
        """Return `-expression` and the like; `op` is a key of UNARY."""
        return self._with_step(UnaryStep(op))

    def binary(self, op: str, other: Any, *, reflected: bool = False) -> Expression:
        """Return `expression + other`, or `other + expression`; `op` is a key of BINARY."""
        return self._with_step(BinaryStep(op, other, reflected))

    def is_lookup_only(self) -> bool:
        """Whether it only looks up: a name, attributes, subscripts by a number or a string.

        Such an expression can be evaluated without running code, if the objects in it allow that.
        """
        return isinstance(self.root, NameRef) and all(
            isinstance(step, AttrStep) or (isinstance(step, ItemStep) and type(step.key) in (int, str))
            for step in self.steps
        )

    def _with_step(self, step: ExpressionStep) -> Expression:
        return replace(self, steps=(*self.steps, step))

    def __str__(self) -> str:
        return self._render()[0]

    def _render(self) -> tuple[str, int]:
        text, precedence = _render_root(self.root)
        for step in self.steps:
            text, precedence = _render_step(text, precedence, step)
        return text, precedence


def evaluate(
    expression: Expression,
    namespace: Mapping[str, Any],
    results: Mapping[str, Any],
    resolve: Callable[[str], Any] | None = None,
) -> Any:
    """Evaluate an expression.

    Args:
        namespace: where names are looked up.
        results: where stored objects are looked up, by the call that made them.
        resolve: called with the `key` of a root that is in neither; its exceptions propagate.

    Raises:
        NameError: the name does not exist.
        KeyError: the stored object does not exist.
        Exception: whatever a step raises, unchanged.
    """
    value = _resolve_root(expression.root, namespace, results, resolve)

    def resolve_argument(part: Any) -> Any:
        """Return an argument as the rank's own object."""
        kind = type(part)
        if kind is Expression:
            return evaluate(part, namespace, results, resolve)
        if kind is NameRef or kind is ResultRef:
            return _resolve_root(part, namespace, results, resolve)
        if not _contains_expression(part):
            return part
        if kind is slice:
            return slice(resolve_argument(part.start), resolve_argument(part.stop), resolve_argument(part.step))
        if kind is dict:
            return {resolve_argument(key): resolve_argument(item) for key, item in part.items()}
        return kind(map(resolve_argument, part))

    for step in expression.steps:
        match step:
            case AttrStep(name):
                value = getattr(value, name)
            case ItemStep(key):
                value = value[resolve_argument(key)]
            case CallStep(args, kwargs):
                value = value(*map(resolve_argument, args), **{name: resolve_argument(arg) for name, arg in kwargs})
            case UnaryStep(op):
                value = UNARY[op][0](value)
            case BinaryStep(op, other, reflected):
                left, right = (resolve_argument(other), value) if reflected else (value, resolve_argument(other))
                value = BINARY[op][0](left, right)
    return value


def _resolve_root(
    root: NameRef | ResultRef,
    namespace: Mapping[str, Any],
    results: Mapping[str, Any],
    resolve: Callable[[str], Any] | None,
) -> Any:
    match root:
        case NameRef(name):
            if name in namespace:
                return namespace[name]
            if resolve is None:
                raise NameError(f"name {name!r} is not defined", name=name)
        case ResultRef(call):
            if call in results:
                return results[call]
            if resolve is None:
                raise KeyError(call)
    return resolve(root.key)


def _contains_expression(part: Any) -> bool:
    """Whether a built-in container has an Expression anywhere in it; only then it is rebuilt."""
    kind = type(part)
    if kind is Expression or kind is NameRef or kind is ResultRef:
        return True
    if kind is slice:
        return any(map(_contains_expression, (part.start, part.stop, part.step)))
    if kind is dict:
        return any(_contains_expression(key) or _contains_expression(item) for key, item in part.items())
    return kind in (tuple, list, set) and any(map(_contains_expression, part))


# ---------------------------------------------------------------------------------------------------------------------
# Source form


def _render_root(root: NameRef | ResultRef) -> tuple[str, int]:
    match root:
        case NameRef(name):
            return name, _MAX_PRECEDENCE
        case ResultRef(call, source):
            if not source:
                return f"<{call}>", _MAX_PRECEDENCE
            return source, _MAX_PRECEDENCE if _is_primary(source) else 0


def _is_primary(source: str) -> bool:
    """Whether a following `.attribute` applies to the complete source."""
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError:
        return False
    return isinstance(tree.body, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))


def _render_step(text: str, precedence: int, step: ExpressionStep) -> tuple[str, int]:
    """Return the text after one more step, and its precedence."""
    match step:
        case AttrStep(name):
            return f"{_parenthesize(text, precedence, _MAX_PRECEDENCE)}.{name}", _MAX_PRECEDENCE
        case ItemStep(key):
            return f"{_parenthesize(text, precedence, _MAX_PRECEDENCE)}[{_render_key(key)}]", _MAX_PRECEDENCE
        case CallStep(args, kwargs):
            arguments = [*map(_render_argument, args), *(f"{name}={_render_argument(arg)}" for name, arg in kwargs)]
            return f"{_parenthesize(text, precedence, _MAX_PRECEDENCE)}({', '.join(arguments)})", _MAX_PRECEDENCE
        case UnaryStep(op):
            _, template, level = UNARY[op]
            return template.format(text if template.endswith(")") else _parenthesize(text, precedence, level)), level
        case BinaryStep(op, other, reflected):
            _, symbol, level = BINARY[op]
            right, right_precedence = _render_argument(other), _precedence_of(other)
            left, left_precedence = text, precedence
            if op == "contains":
                reflected = not reflected
            if reflected:
                left, left_precedence, right, right_precedence = right, right_precedence, left, left_precedence
            # Chained comparisons have another meaning, and ** groups to the right: their left operand is parenthesized
            # too.
            outer = level + 1 if level == 5 or op == "pow" else level
            inner = level if op == "pow" else level + 1
            return (
                f"{_parenthesize(left, left_precedence, outer)} {symbol} "
                f"{_parenthesize(right, right_precedence, inner)}",
                level,
            )
    raise TypeError(f"{step!r} is not a step of a path")


def _parenthesize(text: str, precedence: int, needed: int) -> str:
    return text if precedence >= needed else f"({text})"


def _precedence_of(value: Any) -> int:
    """Return the precedence of an operand's source form."""
    if isinstance(value, Expression):
        return value._render()[1]
    if isinstance(value, (int, float)) and value < 0:
        return UNARY["neg"][2]
    return _MAX_PRECEDENCE


def _render_argument(value: Any) -> str:
    if isinstance(value, Expression):
        return str(value)
    if isinstance(value, (NameRef, ResultRef)):
        return _render_root(value)[0]
    if value is Ellipsis:
        return "..."
    text = _render_container(value) if _contains_expression(value) else " ".join(repr_of(value).split())
    return text if len(text) <= _MAX_ARGUMENT_CHARS else f"{text[: _MAX_ARGUMENT_CHARS - 1]}…"


def _render_container(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_render_argument(key)}: {_render_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_render_argument(value.start)}, {_render_argument(value.stop)}, {_render_argument(value.step)})"
    inner = ", ".join(map(_render_argument, value))
    if isinstance(value, tuple):
        return f"({inner}{',' if len(value) == 1 else ''})"
    return f"[{inner}]" if isinstance(value, list) else f"{{{inner}}}"


def _render_key(key: Any) -> str:
    if isinstance(key, slice):
        ends = ["" if end is None else _render_argument(end) for end in (key.start, key.stop)]
        return ":".join(ends if key.step is None else [*ends, _render_argument(key.step)])
    if isinstance(key, tuple) and key:
        return ", ".join(map(_render_key, key)) + ("," if len(key) == 1 else "")
    return _render_argument(key)
