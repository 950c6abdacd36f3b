"""The result of a call to a mesh: a value for each point, and folds over the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from meshbook.actors.runtime.futures import Future, resolve_after
from meshbook.actors.shape import MeshTrait, Point
from meshbook.controller.agreed import AgreedOperators, values_equal
from meshbook.errors import ValuesDiffer
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.previews.expressions import BINARY

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class _PointAndValue(tuple[Point, R]):
    """What iteration over a ValueMesh yields. What is done with it as if it were the value says what to write."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "iteration over a ValueMesh yields (point, value): for point, value in values; "
            "values.values() yields the values, as for sum(values.values())"
        )

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(tuple(self))

    __float__ = __int__ = __round__ = __abs__ = __neg__ = _refuse


for _op in BINARY:
    if _op in ("lt", "le", "gt", "ge"):  # also of two, as max() does it: points have no order
        setattr(_PointAndValue, f"__{_op}__", _PointAndValue._refuse)
    elif _op not in ("eq", "ne", "contains"):
        setattr(_PointAndValue, f"__r{_op}__", _PointAndValue._refuse)
        if _op not in ("add", "mul"):  # what a tuple has itself
            setattr(_PointAndValue, f"__{_op}__", _PointAndValue._refuse)


class ValueMesh(AgreedOperators, MeshTrait, Generic[R]):
    """Values over a mesh, in row-major order. Iteration yields (Point, value).

    Operators (`float(values)`, `if values:`, `values > 1`) take the value that all agree on, as `same()` does.
    """

    def __init__(self, axes: MeshAxes, values: Sequence[R]) -> None:
        self._axes = axes
        self._by_rank = dict(zip(axes.ranks, values, strict=True))

    def _with_axes(self, axes: MeshAxes) -> ValueMesh[R]:
        return ValueMesh(axes, [self._by_rank[rank] for rank in axes.ranks])

    def get(self, rank: int) -> R:
        """Return the value at a row-major index, 0 .. size - 1."""
        return self._by_rank[self._axes.ranks[rank]]

    def item(self, **point: int) -> R:
        """Return the value at a point, `item(gpus=2)`; for a mesh of one, without arguments.

        Raises:
            MeshShapeError: an axis is unknown, missing or out of range.
        """
        return self._by_rank[self._axes.rank_at(**point)]

    def same(self) -> R:
        """Return the value that all points agree on.

        Raises:
            ValuesDiffer: the values differ; the message shows them.
        """
        first, *others = self.values()
        if not all(values_equal(first, other) for other in others):
            place = ", ".join(f"{name}=0" for name in self._axes.names)
            raise ValuesDiffer(f"the values differ:\n{self}\ntake one, values[0] or values.item({place}), or a slice")
        return first

    def _meshbook_same(self) -> R:
        return self.same()

    def _meshbook_each(self) -> Iterator[R]:
        return self.values()

    def __getitem__(self, index: int | Point) -> R:
        return self.get(index.rank if isinstance(index, Point) else range(len(self))[index])

    def items(self) -> Iterator[tuple[Point, R]]:
        """Yield (Point, value), in row-major order."""
        extent = self.extent
        for index, value in enumerate(self._by_rank.values()):
            yield _PointAndValue((Point(index, extent), value))

    def values(self) -> Iterator[R]:
        return iter(self._by_rank.values())

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __contains__(self, thing: object) -> NoReturn:
        raise TypeError("a ValueMesh has points and values; `in values.values()` asks for a value")

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else "; values[0] is the first value, list(values.values()) are all"
        raise AttributeError(f"'ValueMesh' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return an array with the mesh's dims, and after them those of a value, for NumPy and Matplotlib."""
        import numpy

        values = numpy.asarray([numpy.asarray(value) for value in self.values()], dtype=dtype)
        return values.reshape(*self._axes.shape, *values.shape[1:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return self._meshbook_agreed("eq", other)  # type: ignore[no-any-return]
        return self.extent == other.extent and list(self.values()) == list(other.values())

    __ne__ = object.__ne__
    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return ValueMesh, (self._axes, list(self._by_rank.values()))

    def __repr__(self) -> str:
        lines = [f"  {point}: {value!r}" for point, value in self.items()]
        return "\n".join([f"ValueMesh({self.extent}):", *lines])


class Accumulator(Generic[P, R, A]):
    """Folds the replies of a mesh: `Accumulator(trainers.loss, 0.0, operator.add).accumulate(batch)`."""

    def __init__(self, endpoint: Any, identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint, self._identity, self._combine = endpoint, identity, combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call the endpoint on every rank; return a Future of the replies, folded in order of arrival."""
        futures = list(self._endpoint.stream(*args, **kwargs))
        result: Future[A] = Future("accumulate()")

        def fold() -> A:
            value = self._identity
            for future in futures:
                value = self._combine(value, future.get())
            return value

        resolve_after(futures, result, fold)
        return result
