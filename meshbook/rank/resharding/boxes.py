"""Which part of a cut tensor each rank holds, and which parts move when the mesh has other axes.

Pure. A part is a box: along each dim of the tensor where it begins and ends. Ranks are numbered row by row through the
axes of the mesh, the last axis fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

Box = tuple[tuple[int, int], ...]

# Stands for the axes of a DeviceMesh of one dim that has all ranks, whatever the mesh's axes are called.
ALL_RANKS = ("",)


class Cut(Struct, frozen=True, array_like=True):
    """How a tensor is spread over a mesh.

    Attributes:
        axes: of its DeviceMesh: names of the mesh's axes, or `ALL_RANKS`.
        dims: by axis, the dim of the tensor that is cut along it; -1: all along the axis hold the same.
        late: by axis, whether it cuts what later axes have cut along the same dim (FSDP over tensor parallelism).
    """

    axes: tuple[str, ...]
    dims: tuple[int, ...]
    late: tuple[bool, ...]

    def split_factor(self, at: int, sizes: Mapping[str, int]) -> int:
        """Return in how many parts later axes have cut the dim before the axis of this number does."""
        if not self.late[at]:
            return 1
        found = 1
        for other in range(at + 1, len(self.axes)):
            if self.dims[other] == self.dims[at] and not self.late[other]:
                found *= size_of(self.axes[other], sizes)
        return found


class Copy(NamedTuple):
    """A part that one rank gives to another; `source` and `to` may be the same."""

    source: int
    to: int
    box: Box


def size_of(axis: str, sizes: Mapping[str, int]) -> int:
    if axis != ALL_RANKS[0]:
        return sizes[axis]
    total = 1
    for size in sizes.values():
        total *= size
    return total


def box_of(
    shape: Sequence[int], cut: Cut, sizes: Mapping[str, int], rank: int, at: Mapping[str, int] | None = None
) -> Box:
    """Return the part of a rank.

    Args:
        sizes: of the mesh's axes, outermost first.
        at: places on some axes instead of those of the rank.
    """
    place, rest = {ALL_RANKS[0]: rank}, rank
    for name, size in reversed(list(sizes.items())):
        rest, place[name] = divmod(rest, size)
    place |= at or {}
    found = [(0, size) for size in shape]
    for late in (False, True):
        for axis, dim, is_late in zip(cut.axes, cut.dims, cut.late, strict=True):
            if dim >= 0 and is_late == late:
                begin, end = found[dim]
                length = -(-(end - begin) // size_of(axis, sizes))  # as torch.chunk: the last parts may be empty
                first = min(begin + place[axis] * length, end)
                found[dim] = first, min(first + length, end)
    return tuple(found)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def within(box: Box, whole: Box) -> tuple[slice, ...]:
    """Return the index of a box in the memory of another that contains it."""
    return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(box, whole, strict=True))


def is_empty(box: Box) -> bool:
    return any(begin >= end for begin, end in box)


def intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def without(box: Box, taken: Box) -> Iterator[Box]:
    """Yield boxes that make up what is left of a box; `taken` lies in it."""
    rest = list(box)
    for dim, ((begin, end), (first, last)) in enumerate(zip(box, taken, strict=True)):
        for part in ((begin, first), (last, end)):
            if part[0] < part[1]:
                yield (*rest[:dim], part, *rest[dim + 1 :])
        rest[dim] = first, last


def plan_copies(
    needed: Mapping[int, Box], held: Mapping[int, Sequence[Box]]
) -> tuple[list[Copy], dict[int, list[Box]]]:
    """Return who gives which part to whom, and by rank the parts that nobody holds. Equal on all ranks.

    A rank takes what it holds itself, and the rest from the next rank above it that has it, so that replicas share
    the work.

    Args:
        needed: by rank.
        held: by rank. Parts that several hold are alike.
    """
    size = 1 + max((*needed, *held), default=0)
    copies, gone = [], {}
    for to, box in sorted(needed.items()):
        missing = [] if is_empty(box) else [box]
        for source in sorted(held, key=lambda rank: (rank - to) % size):
            for have in held[source]:
                left = []
                for part in missing:
                    common = intersection(part, have)
                    if is_empty(common):
                        left.append(part)
                    else:
                        copies.append(Copy(source, to, common))
                        left += without(part, common)
                missing = left
            if not missing:
                break
        if missing:
            gone[to] = missing
    return copies, gone


def find_gaps(shape: Sequence[int], cut: Cut, sizes: Mapping[str, int], ranks: Sequence[int]) -> bool:
    """Whether some part of a tensor is held by none of these ranks."""
    whole = tuple((0, size) for size in shape)
    _, gone = plan_copies({0: whole}, {rank: [box_of(shape, cut, sizes, rank)] for rank in ranks})
    return bool(gone)
