"""Operators of an object that stands for one value per rank: they give what they give on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshbook.rank.previews.expressions import BINARY, UNARY


class AgreedOperators:
    """`float(x)`, `f"{x:.2f}"`, `if x:`, `x == 3` and `2 * x` of one value per rank.

    All raise ValuesDiffer if it is not the same on all ranks; the message shows what each has.
    """

    __slots__ = ()

    def _meshbook_same(self) -> Any:
        """Return the value on which all ranks agree.

        Raises:
            ValuesDiffer: they do not.
        """
        raise NotImplementedError

    def _meshbook_each(self) -> Iterable[Any]:
        """Return the ranks' values, as far as they are here: those of which an operator may give the same."""
        return (self._meshbook_same(),)

    def _meshbook_agreed(self, op: str, *operands: Any, reflected: bool = False) -> Any:
        """Return what an operation of `expressions` gives on all ranks. Raises ValuesDiffer."""

        def apply(value: Any) -> Any:
            if not operands:
                return UNARY[op][0](value)
            return BINARY[op][0](operands[0], value) if reflected else BINARY[op][0](value, operands[0])

        first, *others = map(apply, self._meshbook_each())
        # results that differ are of values that do, for which `_meshbook_same` has the message
        return first if all(values_equal(first, other) for other in others) else apply(self._meshbook_same())

    def _meshbook_operate(self, op: str, *operands: Any, reflected: bool = False) -> Any:
        """Return what an operator of Python's gives: `x + 1`, `-x`, `x == 3`."""
        return self._meshbook_agreed(op, *operands, reflected=reflected)

    def __bool__(self) -> bool:
        return bool(self._meshbook_agreed("bool"))

    def __int__(self) -> int:
        return int(self._meshbook_agreed("int"))

    def __float__(self) -> float:
        return float(self._meshbook_agreed("float"))

    def __complex__(self) -> complex:
        return complex(self._meshbook_agreed("complex"))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._meshbook_same(), digits)

    def __format__(self, spec: str) -> str:
        return format(self._meshbook_same(), spec) if spec else str(self)


def values_equal(a: Any, b: Any) -> bool:
    """Whether two values, which may be tensors or arrays, are equal."""
    if type(a) is not type(b):
        return False
    if hasattr(a, "shape") and hasattr(a, "dtype"):
        return bool(a.shape == b.shape and (a == b).all())
    try:
        return bool(a == b)
    except Exception:
        return False


def _binary(op: str, *, reflected: bool = False) -> Callable[[AgreedOperators, Any], Any]:
    return lambda self, other: self._meshbook_operate(op, other, reflected=reflected)


def _unary(op: str) -> Callable[[AgreedOperators], Any]:
    return lambda self: self._meshbook_operate(op)


for _op in BINARY:
    if _op != "contains":
        setattr(AgreedOperators, f"__{_op}__", _binary(_op))
        if _op not in ("eq", "ne", "lt", "le", "gt", "ge"):
            setattr(AgreedOperators, f"__r{_op}__", _binary(_op, reflected=True))
for _op in ("neg", "pos", "invert", "abs"):
    setattr(AgreedOperators, f"__{_op}__", _unary(_op))
