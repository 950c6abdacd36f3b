"""Has the supervisor put new processes in the place of ranks that have exited."""

from __future__ import annotations

from typing import Any

from meshbook.controller.healed import Healed
from meshbook.controller.session import Session
from meshbook.wire import messages

# Seconds in which the rest of it must end after Stop: ranks that do not come back from it are reported after two.
_STOP_TIMEOUT_S = 30.0


def heal(session: Session, *, replay: bool = True, share: bool = True) -> Healed:
    """Replace the ranks that have exited; see `Mesh.heal`. Blocks. Stop ends a cell that is being replayed.

    Raises:
        HealError: a cell runs, or the attempt failed; the message says what to do.
    """
    session.check_attached()
    command = messages.HealMesh(call=session.connection.next_call_id(), replay=replay, share=share)
    return Healed.of(run_to_its_end(session, command))


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
