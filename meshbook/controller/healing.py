"""Has the supervisor put new processes in the place of ranks that have exited, or that are to be replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from meshbook.controller import checkpoints
from meshbook.controller.call_errors import render_error
from meshbook.controller.healed import Healed
from meshbook.controller.session import Session
from meshbook.errors import CellInterrupted, HealError, MeshbookError, UsageError
from meshbook.ids import Ranks, name_ranks
from meshbook.wire import checkpoint_folders, messages, stop_timing

# Seconds after a Stop in which the rest of a heal is waited for: as long as for ranks that do not come back from one.
AFTER_STOP_S = stop_timing.STUCK_AFTER_S
# Seconds until a rank that is killed has ended. The driver may take some to free the memory of its GPU.
_END_TIMEOUT_S = 30.0


def heal(
    session: Session,
    ranks: Ranks = (),
    *,
    replay: bool = True,
    share: bool = True,
    copy: bool | str | Sequence[str] = False,
    restore: bool | str | os.PathLike[str] = False,
) -> Healed:
    """Replace the ranks that have exited, that cannot use their GPU any more, and these; see `Mesh.heal`. Blocks.

    Raises:
        UsageError: what is to be copied is no name.
        HealError: a cell runs, or the attempt failed; the message says what to do.
        CellInterrupted: as `run_to_its_end`.
    """
    session.check_attached()
    names = _names_to_copy(copy)
    broken = {rank.rank for rank in session.status().ranks if rank.problem}
    _end(session, session.living(tuple(sorted(broken.union(ranks)))))
    checkpoints.finish_saves(session, "the heal")
    command = messages.HealMesh(call=session.connection.next_call_id(), replay=replay, share=share, copy=names)
    healed = run_to_its_end(session, command)
    saved = healed.checkpoint
    has_checkpoint = saved is not None and os.path.exists(os.path.join(saved.folder, checkpoint_folders.MANIFEST))
    found = Healed.of(healed, has_checkpoint=has_checkpoint)
    return found if restore is False else _restore(session, found, restore)


def _names_to_copy(copy: bool | str | Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of objects in what the user has written: of `net.tau` it is `net`. None: all."""
    if isinstance(copy, bool):
        return None if copy else ()
    parts = copy.replace(",", " ").split() if isinstance(copy, str) else copy
    names = dict.fromkeys(str(part).partition(".")[0] for part in parts)
    if not names or not all(map(str.isidentifier, names)):
        raise UsageError(f"copy={copy!r}: which names? Write it like copy='step losses'; True: all that are alike")
    return tuple(names)


def _end(session: Session, ranks: Ranks) -> None:
    """End ranks that live, and wait until that is known here.

    Raises:
        HealError: they have not ended.
    """
    if not ranks:
        return
    ended = threading.Event()

    def check(_: tuple[messages.RankExited, ...]) -> None:
        if not session.living(ranks):
            ended.set()

    session.lost_listeners.append(check)
    try:
        session.kill(ranks, signal.SIGKILL)
        check(())
        if not ended.wait(_END_TIMEOUT_S):
            raise HealError(f"{name_ranks(session.living(ranks))} did not end within {_END_TIMEOUT_S:.0f} s of SIGKILL")
    finally:
        session.lost_listeners.remove(check)


def run_to_its_end(session: Session, command: messages.HealMesh | messages.ResizeMesh) -> messages.MeshHealed:
    """Send a command that replaces ranks or adds some, and return the reply. Blocks.

    Raises:
        CellInterrupted: Stop was pressed. It ends a cell that is being replayed, and the waiting here; the supervisor
            does the rest. The message says whether it has.
    """
    future: Future[messages.MeshHealed] | None = None
    try:
        future = session.connection.request(command)
        healed = future.result()
        for hook in session.healed_hooks:
            hook()
    except KeyboardInterrupt:
        what = "the resize" if isinstance(command, messages.ResizeMesh) else "the heal"
        raise render_error(CellInterrupted((), summary=_stop(session, command.call, future, what))) from None
    return healed


def _stop(session: Session, call: str, future: Future[messages.MeshHealed] | None, what: str) -> str:
    """Interrupt what a heal or a resize runs, and return what becomes of it. Waits for two seconds at most."""
    try:
        if future is not None:
            if not future.done():
                session.interrupt(tuple(rank.rank for rank in session.info.ranks), target=call)
            healed = future.result(AFTER_STOP_S)
            return f"{what} was stopped, and was completed all the same:\n{Healed.of(healed)}"
    except (TimeoutError, KeyboardInterrupt):
        pass
    except MeshbookError as error:
        return f"{what} was stopped, and has failed: {error}"
    return f"{what} was stopped here, and goes on in the mesh; cells wait until it is done (%mesh status)"


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
        except CellInterrupted as error:
            stopped = f"{healed.text}\nThe ranks are healed; the restore was stopped: {error}"
            raise render_error(CellInterrupted((), summary=stopped)) from None
        except MeshbookError as error:
            why = f"{error}"
    raise HealError(f"{healed.text}\nThe ranks are healed, and nothing was restored: {why}")


def heal_mesh(mesh: Any, *, copy: bool | str | Sequence[str] = False) -> Any:
    """Heal a mesh after a rank was lost, print what came of it, and return the mesh.

    For a loop that catches `DeviceMeshError` (`meshbook.RankLost`) and runs the failed batch again:

        except DeviceMeshError:
            mesh = meshbook.heal_mesh(mesh, copy="step")

    Args:
        copy: names that are the same on all ranks, as for `Mesh.heal`.

    Raises:
        HealError: as `Mesh.heal`.
    """
    print(mesh.heal(copy=copy))
    return mesh
