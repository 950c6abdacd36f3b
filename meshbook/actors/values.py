"""The result of a call to a mesh: a value for each point, and folds over the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from meshbook.actors.runtime.futures import Future, resolve_after
from meshbook.actors.shape import MeshTrait, Point
from meshbook.mesh_axes import MeshAxes

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class ValueMesh(MeshTrait, Generic[R]):
    """Values over a mesh, in row-major order. Iteration yields (Point, value)."""

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

    def __getitem__(self, index: int | Point) -> R:
        return self.get(index.rank if isinstance(index, Point) else range(len(self))[index])

    def items(self) -> Iterator[tuple[Point, R]]:
        """Yield (Point, value), in row-major order."""
        extent = self.extent
        for index, value in enumerate(self._by_rank.values()):
            yield Point(index, extent), value

    def values(self) -> Iterator[R]:
        return iter(self._by_rank.values())

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return an array with the mesh's dims, and after them those of a value, for NumPy and Matplotlib."""
        import numpy

        values = numpy.asarray([numpy.asarray(value) for value in self.values()], dtype=dtype)
        return values.reshape(*self._axes.shape, *values.shape[1:])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ValueMesh) and self.extent == other.extent and list(self.values()) == list(other.values())
        )

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
