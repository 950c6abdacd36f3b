"""`Mesh.scatter` and `Mesh.gather`: pieces of a batch on the ranks along one axis, and back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.controller import remote
from meshbook.controller.remote import RemoteValue
from meshbook.controller.results import RankValues
from meshbook.controller.session import Session
from meshbook.data import batches
from meshbook.mesh_axes import MeshAxes
from meshbook.placement import shard_spans
from meshbook.rank.previews import expressions


def scatter(session: Session, axes: MeshAxes, batch: Any, axis: str, dim: int) -> RemoteValue:
    """Split a normalized batch along `dim`, one piece per coordinate of `axis`; return a handle to the pieces."""
    spans = [shard_spans(length, axes.size_of(axis)) for length in batches.cut_lengths(batch, dim)]
    pieces = {
        rank: batches.slice_batch(batch, dim, [span[axes.point(rank)[axis]] for span in spans])
        for rank in session.living(axes.ranks)
    }
    key = RemoteValue(session, expressions.Expression(expressions.NameRef("rank")), tuple(pieces))
    command = session.call_command(
        operator.getitem, (pieces, key), {}, tuple(pieces), always_retain=True, label="scatter", inline_limit=0
    )
    return remote.result_handle(session, command.call, command.ranks, session.run_for_values(command), "scattered")


def gather(axes: MeshAxes, axis: str, dim: int, pull: Callable[[Sequence[int]], RankValues]) -> Any:
    """Concatenate the pieces along `axis`, each from the first rank at its coordinate.

    Args:
        pull: returns the pieces of these ranks.
    """
    first: dict[int, int] = {}
    for rank in axes.ranks:
        first.setdefault(axes.point(rank)[axis], rank)
    values = pull(list(first.values()))
    return _concatenate([values[first[position]] for position in sorted(first)], dim)


def _concatenate(pieces: list[Any], dim: int) -> Any:
    first = pieces[0]
    if type(first).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(pieces, dim)
    if hasattr(first, "shape"):
        import numpy

        return numpy.concatenate(pieces, axis=dim)
    return [item for piece in pieces for item in piece]
