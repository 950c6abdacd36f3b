"""Points, extents, and the slicing API that meshes of actors, processes, hosts and values share.

A thin layer with Monarch's names over `meshbook.mesh_axes.MeshAxes`. Independent of what the points hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Self

from meshbook.errors import MeshShapeError
from meshbook.mesh_axes import MeshAxes


class Extent(Mapping[str, int]):
    """Axis names and their sizes, in order."""

    __slots__ = ("labels", "sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        self.labels, self.sizes = tuple(labels), tuple(sizes)

    @property
    def nelements(self) -> int:
        return prod(self.sizes)

    def __getitem__(self, label: str) -> int:
        if label not in self.labels:
            raise KeyError(f"there is no axis {label!r} in {self}")
        return self.sizes[self.labels.index(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __hash__(self) -> int:
        return hash((self.labels, self.sizes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and list(self.items()) == list(other.items())

    def __reduce__(self) -> Any:
        return Extent, (self.labels, self.sizes)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{label}: {size}' for label, size in zip(self.labels, self.sizes, strict=True))}}}"


class Point(Mapping[str, int]):
    """A position in an extent: a mapping from axis to index; `rank` is its number in row-major order."""

    __slots__ = ("extent", "rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        self.rank, self.extent = rank, extent

    def __getitem__(self, label: str) -> int:
        stride = 1
        for name, size in zip(reversed(self.extent.labels), reversed(self.extent.sizes), strict=True):
            if name == label:
                return self.rank // stride % size
            stride *= size
        raise KeyError(f"there is no axis {label!r} in {self.extent}")

    def size(self, label: str) -> int:
        return self.extent[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent)

    def __len__(self) -> int:
        return len(self.extent)

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self.rank == other.rank and self.extent == other.extent
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __reduce__(self) -> Any:
        return Point, (self.rank, self.extent)

    def __repr__(self) -> str:
        places = ", ".join(f"{label!r}: {self[label]}/{self.extent[label]}" for label in self.extent)
        return f"{{{places}}}"


class MeshTrait:
    """The mesh API (slice, split, flatten, rename, size, sizes, extent) for classes with `_axes` and `_with_axes`."""

    _axes: MeshAxes

    def _with_axes(self, axes: MeshAxes) -> Self:
        raise NotImplementedError

    def slice(self, **which: Any) -> Self:
        """Return the part at these indices: an int drops the axis, a slice keeps it. Raises MeshShapeError."""
        return self._with_axes(self._axes.slice(**which))

    def flatten(self, name: str) -> Self:
        """Return the same points along one axis."""
        return self._with_axes(self._axes.flatten(name))

    def rename(self, **names: str) -> Self:
        """Return the same points with other axis names: `rename(gpus="tp")`."""
        return self._with_axes(self._axes.rename(**names))

    def split(self, **how: Any) -> Self:
        """Split axes into several: `split(gpus=("dp", "tp"), tp=2)`; one size of each may be omitted.

        Raises:
            MeshShapeError: the product of the sizes does not match.
        """
        parts = {axis: tuple(names) for axis, names in how.items() if not isinstance(names, (int, str))}
        sizes = {name: size for name, size in how.items() if isinstance(size, int)}
        for axis, names in how.items():
            if isinstance(names, str):
                raise MeshShapeError(f"{axis}={names!r} is one name; write {axis}=({names!r}, …), or rename()")
        new = {name for names in parts.values() for name in names}
        if unused := [name for name in sizes if name not in new]:
            raise MeshShapeError(f"{unused[0]}={sizes[unused[0]]} is the size of no axis that is made here")
        axes = self._axes
        for axis, names in parts.items():
            size = axes.size_of(axis)
            given = prod(sizes.get(name, 1) for name in names)
            unknown = [name for name in names if name not in sizes]
            if len(unknown) > 1:
                raise MeshShapeError(f"the sizes of {' and '.join(unknown)} are both unknown; give {unknown[0]}=…")
            if size % given or (not unknown and given != size):
                cut = " * ".join(f"{name}={sizes.get(name, '?')}" for name in names)
                raise MeshShapeError(f"axis {axis} has size {size}, and cannot be cut into {cut}")
            full = {name: sizes.get(name, size // given) for name in names}
            axes = axes.rename(**{axis: names[0]}) if len(names) == 1 else axes.split(axis, **full)
        return self._with_axes(axes)

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the number of points; with `dim`, along one axis, or the product along several."""
        if dim is None:
            return self._axes.size
        return prod(self._axes.size_of(name) for name in ((dim,) if isinstance(dim, str) else dim))

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, outermost first."""
        return self._axes.axes

    @property
    def extent(self) -> Extent:
        return Extent(self._axes.names, self._axes.shape)

    def __len__(self) -> int:
        return self._axes.size

    def __bool__(self) -> bool:
        return True
