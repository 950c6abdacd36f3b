"""Has the supervisor change the number of a mesh's ranks."""

from __future__ import annotations

from collections.abc import Mapping

from meshbook.controller.checkpoints import finish_saves
from meshbook.controller.healed import Resized
from meshbook.controller.healing import run_to_its_end
from meshbook.controller.session import Session
from meshbook.errors import MeshShapeError, UsageError
from meshbook.host.gpus import count_free_gpus
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages


def resize(session: Session, size: int | Mapping[str, int] | None, axes: Mapping[str, int]) -> Resized:
    """Change the number of ranks; see `Mesh.resize`. Blocks.

    Raises:
        MeshShapeError, UsageError: the new axes are none, or need more GPUs than there are. Nothing has changed.
        ResizeError: a cell runs, or something is cut for the present ranks; the message says what to do.
        CellInterrupted: as `healing.run_to_its_end`.
    """
    session.check_attached()
    before = session.axes
    if before is None:
        raise UsageError(f"the mesh {session.name!r} has no ranks yet; start them first: %mesh start -n 4")
    after = new_axes(before, size, axes)
    if any(rank.device.startswith("cuda") for rank in session.info.ranks):
        num_hosts = 1 if session.info.spec is None else session.info.spec.num_hosts
        check_gpus(before.size, after.size, count_free_gpus() * num_hosts)
    finish_saves(session, "the resize")
    command = messages.ResizeMesh(call=session.connection.next_call_id(), axes=after.axes)
    return Resized.of(run_to_its_end(session, command))


def new_axes(before: MeshAxes, size: int | Mapping[str, int] | None, changed: Mapping[str, int]) -> MeshAxes:
    """Return the axes of a mesh after a resize: a number changes its first axis, a name the axis of that name. Pure.

    Raises:
        MeshShapeError: the number is no multiple of the other axes; the message shows the sum.
        UsageError: neither was given, or both.
    """
    if (size is None) == (not changed):
        raise UsageError(
            f"give the new number of ranks, or axes and their sizes: resize({before.size}), resize({_some(before)})"
        )
    if isinstance(size, Mapping):
        return MeshAxes.of(size)
    if size is None:
        if unknown := [name for name in changed if name not in before.names]:
            raise MeshShapeError(
                f"this mesh has no axis {unknown[0]!r}, but {before}; give all axes as a dict to have others: "
                "mesh.resize({'dp': 2, 'tp': 2})"
            )
        return MeshAxes.of({**before.axes, **changed})
    after = MeshAxes.of(size)  # checks the number
    first, *others = before.names
    rest = before.size // before.shape[0]
    if after.size % rest:
        product = " * ".join(f"{name}={before.size_of(name)}" for name in others)
        raise MeshShapeError(
            f"{size} ranks are no multiple of {product}{f' = {rest}' if len(others) > 1 else ''}; take "
            f"{size // rest * rest or rest} or {(size // rest + 1) * rest} ranks, or give the axes"
        )
    return MeshAxes.of({**before.axes, first: after.size // rest})


def _some(axes: MeshAxes) -> str:
    return f"{axes.names[0]}={axes.shape[0]}"


def check_gpus(before: int, after: int, num_gpus: int) -> None:
    """Refuse more ranks than GPUs, where each rank has one. Pure. Raises MeshShapeError.

    Ranks that share GPUs already may be joined by others.
    """
    if before <= num_gpus < after:
        raise MeshShapeError(
            f"each rank has a GPU, and {after} ranks need {after}: there are {num_gpus}, {after - num_gpus} too few; "
            f"resize to {num_gpus} at most"
        )
