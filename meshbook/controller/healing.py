"""Has the supervisor put new processes in the place of ranks that have exited."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from meshbook.controller import checkpoints
from meshbook.controller.healed import Healed
from meshbook.controller.session import Session
from meshbook.errors import HealError, MeshbookError
from meshbook.wire import checkpoint_folders, messages

# Seconds in which the rest of it must end after Stop: ranks that do not come back from it are reported after two.
_STOP_TIMEOUT_S = 30.0


def heal(
    session: Session, *, replay: bool = True, share: bool = True, restore: bool | str | os.PathLike[str] = False
) -> Healed:
    """Replace the ranks that have exited; see `Mesh.heal`. Blocks. Stop ends a cell that is being replayed.

    Raises:
        HealError: a cell runs, or the attempt failed; the message says what to do.
    """
    session.check_attached()
    command = messages.HealMesh(call=session.connection.next_call_id(), replay=replay, share=share)
    healed = run_to_its_end(session, command)
    saved = healed.checkpoint
    has_checkpoint = saved is not None and os.path.exists(os.path.join(saved.folder, checkpoint_folders.MANIFEST))
    found = Healed.of(healed, has_checkpoint=has_checkpoint)
    return found if restore is False else _restore(session, found, restore)


def run_to_its_end(session: Session, command: messages.HealMesh | messages.ResizeMesh) -> messages.MeshHealed:
    """Send a command that replaces ranks or adds some, and return the reply. Blocks. Stop ends what can be ended."""
    future = session.connection.request(command)
    try:
        healed: messages.MeshHealed = future.result()
    except KeyboardInterrupt:
        session.interrupt(tuple(rank.rank for rank in session.info.ranks))
        healed = future.result(_STOP_TIMEOUT_S)
    session.info = healed.info
    for hook in session.healed_hooks:
        hook()
    return healed


def _restore(session: Session, healed: Healed, path: bool | str | os.PathLike[str]) -> Healed:
    """Bring all ranks back to a checkpoint (True: the last that has what is missing), if something is missing."""
    missing = ", ".join(sorted(healed.missing_names))
    if not missing:
        return replace(healed, text=f"{healed.text}\nnothing to restore: the new ranks have what the others have")
    source = healed.checkpoint if isinstance(path, bool) else path
    why = f"this mesh has saved no checkpoint of {missing}; name one of another: %mesh heal --restore PATH"
    if source is not None:
        assert session.axes is not None
        try:
            saved = checkpoints.restore(session, tuple(sorted(session.axes.ranks)), source, (), step=None)
            return healed.after_restore(saved.folder, saved.names)
        except MeshbookError as error:
            why = f"{error}"
    raise HealError(f"{healed.text}\nThe ranks are healed, and nothing was restored: {why}")


def heal_mesh(mesh: Any) -> Any:
    """Heal a mesh after a rank was lost, print what came of it, and return the mesh.

    For a loop that catches `DeviceMeshError` (`meshbook.RankLost`) and runs the failed batch again:

        except DeviceMeshError:
            mesh = meshbook.heal_mesh(mesh)

    Raises:
        HealError: as `Mesh.heal`.
    """
    print(mesh.heal())
    return mesh
