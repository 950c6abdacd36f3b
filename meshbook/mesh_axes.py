"""The arithmetic of a mesh: named axes, points, slices and their ranks.

A mesh is a row-major grid: the last axis varies fastest, as in torch's DeviceMesh and in Monarch. A slice retains the
global ranks of its mesh. This module does not know about processes or whether a rank is alive.

Every error is a `MeshShapeError` whose message shows the calculation and what to type next.
"""

from __future__ import annotations

import difflib
import itertools
import keyword
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshbook.errors import MeshShapeError
from meshbook.ids import Ranks, format_ranks, name_ranks

# The only axis of a mesh that is given as a number of ranks.
RANK_AXIS = "rank"
# More ranks than this are a typing error, rejected before a tuple of that size is created. The largest known jobs run
# on some 100,000 GPUs.
MAX_RANKS = 1 << 17

Slice = slice  # the builtin, under a name that `MeshAxes.slice` does not hide from type checkers


@dataclass(frozen=True)
class MeshAxes:
    """Named axes in order, their sizes, and the global ranks they cover.

    Attributes:
        names: the axes, outermost first.
        shape: their sizes; `()` for a slice that is a single point.
        ranks: global ranks in grid order (row-major), without duplicates. Of a complete mesh: 0 .. size - 1.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shape):
            raise MeshShapeError(
                f"{_pluralize(len(self.shape), 'size')} {self.shape} but "
                f"{_pluralize(len(self.names), 'name')} {self.names}; give each axis one size and one name"
            )
        for name, size in zip(self.names, self.shape, strict=True):
            _check_name(name)
            _check_size(name, size)
        duplicates = [name for name in self.names if self.names.count(name) > 1]
        if duplicates:
            raise MeshShapeError(
                f"axis {duplicates[0]} is there twice in ({', '.join(self.names)}); give each its own name"
            )
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise MeshShapeError(
                f"mesh axes {_product(self.names, self.shape)} need {_pluralize(math.prod(self.shape), 'rank')}, "
                f"but {len(set(self.ranks))} are given"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # Constructors

    @classmethod
    def of(
        cls,
        axes: int | Mapping[str, int] | None = None,
        *,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        shape: Sequence[int] | int | None = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> MeshAxes:
        """Return the axes of a complete mesh, from any of the supported forms.

        `of(4)` has the one axis "rank"; `of({"dp": 2, "tp": 2})` the named ones; `of(nodes=2, gpus_per_node=2)` the
        axes "node" and "gpu" (the one not given has size 1); `of(shape=(2, 2), mesh_dim_names=("dp", "tp"))` is
        PyTorch's form, where missing names are "rank" for one axis, else "axis0", "axis1" and so on (`shape=4` is
        `shape=(4,)`).

        Raises:
            MeshShapeError: none or several of these forms at once, or names and sizes that do not match.
        """
        by_nodes = nodes is not None or gpus_per_node is not None
        ways = [axes is not None, by_nodes, shape is not None]
        if sum(ways) != 1 or (mesh_dim_names is not None and shape is None):
            raise MeshShapeError(
                "give a mesh its size in one way: a number (4), axes ({'dp': 2, 'tp': 2}), nodes and gpus_per_node, "
                "or shape and mesh_dim_names"
            )
        if shape is not None:
            sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
            names = tuple(mesh_dim_names) if mesh_dim_names is not None else _default_names(len(sizes))
            return _complete_mesh(names, sizes)
        if by_nodes:
            return _complete_mesh(
                ("node", "gpu"), (1 if nodes is None else nodes, 1 if gpus_per_node is None else gpus_per_node)
            )
        if isinstance(axes, Mapping):
            return _complete_mesh(tuple(axes), tuple(axes.values()))
        if not _is_int(axes):
            raise MeshShapeError(f"a mesh's size is a number or a dict of axes, not {axes!r}")
        return _complete_mesh((RANK_AXIS,), (axes,))  # type: ignore[arg-type]  # _is_int has seen to it

    # -----------------------------------------------------------------------------------------------------------------
    # Inspection

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> size, in order."""
        return dict(zip(self.names, self.shape, strict=True))

    def size_of(self, axis: str) -> int:
        """Return the size of one axis."""
        return self.shape[self.axis_index(axis)]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items())

    def __contains__(self, rank: object) -> bool:
        return rank in self._index_of

    @cached_property
    def _index_of(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    def index(self, rank: int) -> int:
        """Return the index of a global rank in grid order: 0 .. size - 1.

        Raises:
            MeshShapeError: the rank is not in this mesh.
        """
        self.check_ranks((rank,))
        return self._index_of[rank]

    def point(self, rank: int) -> dict[str, int]:
        """Return a global rank's coordinate along each axis.

        Raises:
            MeshShapeError: the rank is not in this mesh.
        """
        index = self.index(rank)
        return {
            name: index // stride % size
            for name, size, stride in zip(self.names, self.shape, self._strides, strict=True)
        }

    def rank_at(self, /, **point: int) -> int:
        """Return the global rank at a point. Each axis with a size above 1 must be given.

        Raises:
            MeshShapeError: an axis does not exist, is missing, or its coordinate is out of range.
        """
        coordinates = {
            self.axis_index(axis): self.normalize_coordinate(axis, coordinate) for axis, coordinate in point.items()
        }
        missing = [name for at, name in enumerate(self.names) if at not in coordinates and self.shape[at] > 1]
        if missing:
            example = ", ".join(
                [*(f"{axis}={coordinate}" for axis, coordinate in point.items()), *(f"{m}=0" for m in missing)]
            )
            raise MeshShapeError(f"{example or 'a point'} names one rank of {self}; {', '.join(missing)} is not given")
        return self.ranks[sum(coordinate * self._strides[at] for at, coordinate in coordinates.items())]

    def grid(self) -> Any:
        """Return the ranks as nested lists of this shape, as DeviceMesh accepts them; a bare int without axes."""
        rows: list[Any] = list(self.ranks)
        for size in reversed(self.shape):
            rows = [rows[start : start + size] for start in range(0, len(rows), size)]
        return rows[0]

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along `axis` only: the process groups of that axis."""
        at = self.axis_index(axis)
        stride, size = self._strides[at], self.shape[at]
        starts = (index for index in range(self.size) if index // stride % size == 0)
        return tuple(tuple(self.ranks[start + step * stride] for step in range(size)) for start in starts)

    # -----------------------------------------------------------------------------------------------------------------
    # Slicing and renaming. Each returns a new MeshAxes over the same global ranks.

    def slice(self, /, **which: int | Slice) -> MeshAxes:
        """Return a slice of the mesh: an int drops its axis, a slice keeps it, other axes are unchanged.

        Raises:
            MeshShapeError: an axis does not exist, an index is out of range, or the result is empty.
        """
        chosen: list[Sequence[int]] = [range(size) for size in self.shape]
        kept_axes = list(range(len(self.shape)))
        for axis, part in which.items():
            at = self.axis_index(axis)
            if isinstance(part, Slice):
                chosen[at] = _slice_range(axis, self.shape[at], part)
            else:
                chosen[at] = (self.normalize_coordinate(axis, part),)
                kept_axes.remove(at)
        return self.submesh(chosen, kept_axes)

    def select(self, index: int | Slice | tuple[int | Slice, ...]) -> MeshAxes:
        """Index along the first axes: `mesh[0]`, `mesh[1:3]` along the first one, `mesh[0, 1:]` along the first two.

        Raises:
            MeshShapeError: more indices than axes, an index is out of range, or the result is empty.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.names):
            raise MeshShapeError(
                f"{_pluralize(len(parts), 'index', 'indices')} for a mesh of "
                f"{_pluralize(len(self.names), 'axis', 'axes')} ({self or 'a single rank'})"
            )
        return self.slice(**dict(zip(self.names, parts, strict=False)))

    def flatten(self, name: str = RANK_AXIS) -> MeshAxes:
        """Return the same ranks along one axis."""
        return MeshAxes((name,), (self.size,), self.ranks)

    def rename(self, /, **names: str) -> MeshAxes:
        """Return the same mesh with other axis names: `rename(dp="replica")`.

        Raises:
            MeshShapeError: an axis does not exist, or a name is taken.
        """
        for axis in names:
            self.axis_index(axis)
        return MeshAxes(tuple(names.get(name, name) for name in self.names), self.shape, self.ranks)

    def split(self, axis: str, /, **sizes: int) -> MeshAxes:
        """Split one axis into several, outermost first: `split("rank", dp=2, tp=2)`. One size may be -1 (inferred).

        Raises:
            MeshShapeError: the product of the sizes is not the axis's size.
        """
        at = self.axis_index(axis)
        axis_size = self.shape[at]
        if not sizes:
            raise MeshShapeError(
                f"axis {axis} is split into named sizes, like split({axis!r}, dp=2, tp={axis_size // 2})"
            )
        open_axes = [name for name, size in sizes.items() if size == -1]
        for name, size in sizes.items():
            if size != -1:
                _check_size(name, size)
        given = math.prod(size for size in sizes.values() if size != -1)
        if len(open_axes) > 1:
            raise MeshShapeError(f"only one size may be -1, but {' and '.join(open_axes)} are; give all but one")
        if axis_size % given or (not open_axes and given != axis_size):
            raise MeshShapeError(
                f"axis {axis}={axis_size} cannot be split into {_product(tuple(sizes), tuple(sizes.values()))}"
                + (f": {axis_size} is not a multiple of {given}" if open_axes else f" = {given}")
            )
        filled = {name: axis_size // given if size == -1 else size for name, size in sizes.items()}
        return MeshAxes(
            (*self.names[:at], *filled, *self.names[at + 1 :]),
            (*self.shape[:at], *filled.values(), *self.shape[at + 1 :]),
            self.ranks,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Coordinates and ranks

    def check_ranks(self, ranks: Iterable[int]) -> Ranks:
        """Return the same ranks, sorted and without duplicates.

        Raises:
            MeshShapeError: one of them is not in this mesh, or there are none.
        """
        chosen = tuple(sorted(set(ranks)))
        unknown = [rank for rank in chosen if rank not in self._index_of]
        if unknown:
            is_are = "is" if len(unknown) == 1 else "are"
            raise MeshShapeError(f"{name_ranks(unknown)} {is_are} not in {self._describe()}")
        if not chosen:
            raise MeshShapeError(f"no ranks are chosen of {self._describe()}")
        return chosen

    def submesh(self, chosen: Sequence[Sequence[int]], kept_axes: Iterable[int]) -> MeshAxes:
        """Return the ranks at every combination of coordinates, over the axes that are kept."""
        offsets = [
            [coordinate * stride for coordinate in coordinates]
            for coordinates, stride in zip(chosen, self._strides, strict=True)
        ]
        ranks = tuple(self.ranks[sum(offset)] for offset in itertools.product(*offsets))
        order = tuple(kept_axes)
        return MeshAxes(tuple(self.names[at] for at in order), tuple(len(chosen[at]) for at in order), ranks)

    def axis_index(self, axis: str) -> int:
        """Return the position of an axis among the axes. Raises MeshShapeError."""
        if axis in self.names:
            return self.names.index(axis)
        if not self.names:
            raise MeshShapeError(f"there is no axis {axis!r}: this mesh is the single {name_ranks(self.ranks)}")
        close = difflib.get_close_matches(axis, self.names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"its axes are {', '.join(self.names)}"
        raise MeshShapeError(f"there is no axis {axis!r} in the mesh {self}; {hint}")

    def normalize_coordinate(self, axis: str, coordinate: int) -> int:
        """Return a coordinate along an axis; a negative one counts from the end. Raises MeshShapeError."""
        size = self.size_of(axis)
        if not _is_int(coordinate):
            raise MeshShapeError(f"{axis}={coordinate!r} is neither an int nor a slice")
        if not -size <= coordinate < size:
            span = f"0-{size - 1}" if size > 1 else "0"
            raise MeshShapeError(f"{axis}={coordinate} is out of range: axis {axis} has size {size} ({span})")
        return coordinate % size

    def _describe(self) -> str:
        return f"this mesh of {_pluralize(self.size, 'rank')} ({format_ranks(self.ranks)})"


def _complete_mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> MeshAxes:
    if len(names) != len(shape):
        return MeshAxes(names, shape, ())  # raises
    if not names:
        raise MeshShapeError("a mesh has at least one axis; write it like 4 or {'dp': 2, 'tp': 2}")
    for name, size in zip(names, shape, strict=True):
        _check_size(name, size)
    if math.prod(shape) > MAX_RANKS:
        raise MeshShapeError(
            f"mesh axes {_product(names, shape)} need {math.prod(shape):,} ranks; a mesh has at most {MAX_RANKS:,}"
        )
    return MeshAxes(names, shape, tuple(range(math.prod(shape))))


def _slice_range(axis: str, size: int, part: Slice) -> range:
    for bound in (part.start, part.stop, part.step):
        if bound is not None and not _is_int(bound):
            raise MeshShapeError(f"{axis}={_format_slice(part)} has a bound that is not an int")
    if part.step is not None and part.step <= 0:
        raise MeshShapeError(
            f"{axis}={_format_slice(part)} has step {part.step}; ranks keep their order: use 1 or more"
        )
    coordinates = range(size)[part]
    if not coordinates:
        raise MeshShapeError(f"{axis}={_format_slice(part)} leaves nothing of axis {axis}, which has size {size}")
    return coordinates


def _default_names(count: int) -> tuple[str, ...]:
    return (RANK_AXIS,) if count == 1 else tuple(f"axis{index}" for index in range(count))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise MeshShapeError(f"{name!r} cannot name an axis; use a Python name, like dp")


def _check_size(name: object, size: object) -> None:
    if not _is_int(size) or size < 1:  # type: ignore[operator]  # _is_int has seen to it
        raise MeshShapeError(f"axis {name} has size {size!r}; a size is an int of 1 or more")


def _product(names: Sequence[str], shape: Sequence[int]) -> str:
    return " * ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True)) or "()"


def _pluralize(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _format_slice(part: Slice) -> str:
    bounds = [part.start, part.stop] if part.step is None else [part.start, part.stop, part.step]
    return ":".join("" if bound is None else str(bound) for bound in bounds)
