"""What each operation takes: a struct whose docstring and field descriptions are the tool's, and the page's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

# The mesh of a server that was started for one may be left out.
_Mesh = Annotated[str | None, Meta(description="name of the mesh; not needed when only one runs")]
_Ranks = Annotated[str | None, Meta(description='some of the ranks: "0,2-3", or by axis "dp=0"; all if left out')]
_Ticket = Annotated[str, Meta(description="what run returned, or status and history list")]
_Cursor = Annotated[
    int | None,
    Meta(description="the cursor of the last answer: returns what was printed since; the newest output if left out"),
]


class NoParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing."""


class OfMesh(Struct, frozen=True, forbid_unknown_fields=True):
    """A mesh."""

    mesh: _Mesh = None


class OfRanks(OfMesh, frozen=True, forbid_unknown_fields=True):
    """Some ranks of a mesh."""

    ranks: _Ranks = None


class StacksOf(OfRanks, frozen=True, forbid_unknown_fields=True):
    """Which stacks."""

    twice: Annotated[bool, Meta(description="look again half a second later, and tell which ranks have moved")] = False
    threads: Annotated[bool, Meta(description="all threads, not only the main ones")] = False


class LogsOf(OfMesh, frozen=True, forbid_unknown_fields=True):
    """Which output."""

    cursor: _Cursor = None
    rank: Annotated[
        int | None, Meta(description="the last raw output of this rank, also of a dead one, instead of folded cells")
    ] = None


class HistoryOf(OfMesh, frozen=True, forbid_unknown_fields=True):
    """Which cells."""

    limit: Annotated[int, Meta(description="how many of the latest cells", ge=1, le=500)] = 20
    skip: Annotated[int, Meta(description="how many of the latest to leave out", ge=0)] = 0


class MetricsOf(OfRanks, frozen=True, forbid_unknown_fields=True):
    """Which numbers."""

    name: Annotated[str | None, Meta(description='one of them, such as "loss"; all if left out')] = None


class CellToRun(OfMesh, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell."""

    source: Annotated[
        str, Meta(description="Python source; on each rank rank, world_size, device, torch, dist and mesh exist")
    ]
    ranks: _Ranks = None


class ResultOf(OfMesh, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which cell."""

    ticket: _Ticket
    cursor: _Cursor = None
    wait_s: Annotated[float, Meta(description="seconds to wait for its end", ge=0, le=60)] = 0.0


class ToInterrupt(OfMesh, frozen=True, forbid_unknown_fields=True):
    """What to stop: one cell, or whatever ranks run."""

    ticket: Annotated[str | None, Meta(description="this cell")] = None
    ranks: Annotated[str | None, Meta(description='whatever these ranks run: "0,2-3", "dp=0" or "all"')] = None


class MeshToHeal(OfMesh, frozen=True, forbid_unknown_fields=True):
    """What to copy, beside what is proven."""

    copy: Annotated[
        list[str],
        Meta(description="names that are the same on all ranks, as the last heal lists them; also after it"),
    ] = []


class MeshToStart(Struct, frozen=True, forbid_unknown_fields=True):
    """A new mesh. Without ranks and axes: one rank per visible GPU, else 2 to 4 by cores."""

    mesh: Annotated[str | None, Meta(description="its name; made up if left out")] = None
    num_ranks: Annotated[int | None, Meta(description="number of ranks")] = None
    axes: Annotated[dict[str, int] | None, Meta(description='named axes and their sizes: {"dp": 2, "tp": 2}')] = None
    on: Annotated[str | None, Meta(description="machines: ssh://gpu1,gpu2, slurm://PARTITION, or a cluster's name")] = (
        None
    )
    nodes: Annotated[int | None, Meta(description="number of machines of `on`")] = None
    per_node: Annotated[int | None, Meta(description="ranks on each of these machines")] = None
