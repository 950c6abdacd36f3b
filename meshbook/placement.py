"""How a tensor is placed on a mesh: `Shard(dim)`, `Replicate()`, `Partial(op)`, one placement per mesh axis.

Only the placements and their arithmetic, with PyTorch's notation and its division rule, so that a tensor sharded here
and a DTensor sharded by torch have the same pieces. `axis` refers to the mesh, `dim` to the tensor. Does not import
torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshbook.errors import PlacementError


@dataclass(frozen=True)
class Shard:
    """Sharded along tensor dim `dim`, one piece per coordinate of the axis. Negative dims count from the end."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Complete and equal at each coordinate of the axis."""


@dataclass(frozen=True)
class Partial:
    """Of full size at each coordinate; the tensor is the reduction by `op`: "sum", "avg", "max", "min"."""

    op: str = "sum"

    def __repr__(self) -> str:
        return f"Partial({self.op})"


Placement = Shard | Replicate | Partial
Span = tuple[int, int]  # start and stop along one dim; equal where a piece is empty

_OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")
_PLACEMENT_PATTERN = re.compile(
    r"(?:Shard|S)\((?:dim=)?(?P<dim>-?\d+)\)|(?P<whole>Replicate\(\)|R\b)|(?:Partial|P)(?:\((?P<op>\w*)\)|\b)"
)


def shard_spans(length: int, num_shards: int) -> tuple[Span, ...]:
    """Return where each piece of a dim of `length` starts and stops.

    As torch.chunk and DTensor do: ceil(length / num_shards) for each piece; the last ones may be shorter, or empty.
    """
    step = -(-length // num_shards)
    return tuple((min(index * step, length), min((index + 1) * step, length)) for index in range(num_shards))


def local_spans(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], point: Sequence[int]
) -> tuple[Span, ...]:
    """Return the part of a tensor of global `shape` that the rank at `point` holds: one span per tensor dim.

    Placements apply in the order of the mesh's axes, outermost first, so two axes may shard the same dim.

    Args:
        placements: one per mesh axis.
        mesh_shape: size of each mesh axis.
        point: the rank's coordinate along each mesh axis.

    Raises:
        PlacementError: the placements do not match the tensor or the mesh.
    """
    if not len(placements) == len(mesh_shape) == len(point):
        raise PlacementError(
            f"{len(placements)} placements for a mesh of {len(mesh_shape)} axes {tuple(mesh_shape)}; give one per axis"
        )
    spans = [(0, length) for length in shape]
    for placement, num_shards, coordinate in zip(placements, mesh_shape, point, strict=True):
        if isinstance(placement, Shard):
            dim = check_dim(placement.dim, shape)
            start, stop = spans[dim]
            low, high = shard_spans(stop - start, num_shards)[coordinate]
            spans[dim] = (start + low, start + high)
    return tuple(spans)


def check_dim(dim: int, shape: Sequence[int]) -> int:
    """Return a tensor dim counted from the start.

    Raises:
        PlacementError: a tensor of this shape has no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        span = f"dims 0-{len(shape) - 1}" if len(shape) > 1 else "dim 0" if shape else "no dims"
        raise PlacementError(f"Shard(dim={dim}) needs dim {dim}, but a tensor of shape {tuple(shape)} has {span}")
    return dim % len(shape)


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Parse a DTensor's placements, `(Shard(dim=0), Replicate())`, long or short (`S(0)`, `R`, `P(sum)`).

    Raises:
        PlacementError: a placement is none of these three, such as a strided shard.
    """
    body = text.strip()
    if body.startswith("("):
        body = body[1:].removesuffix(")")
    placements: list[Placement] = []
    at = 0
    while at < len(body):
        match = _PLACEMENT_PATTERN.match(body, at)
        if match is None:
            raise PlacementError(f"{text} has a placement other than Shard, Replicate and Partial: {body[at:]}")
        if match["dim"] is not None:
            placements.append(Shard(int(match["dim"])))
        elif match["whole"]:
            placements.append(Replicate())
        else:
            op = match["op"] or "sum"
            if op not in _OPS:
                raise PlacementError(f"Partial({op}) is not a reduction; use one of {', '.join(_OPS)}")
            placements.append(Partial(op))
        at = match.end()
        while at < len(body) and body[at] in ", ":
            at += 1
    return tuple(placements)
