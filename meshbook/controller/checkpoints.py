"""Saving, listing and restoring checkpoints, as `Mesh` offers them.

The ranks copy their state in a call; the supervisor reports what became of the save later, to whoever is there then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshbook.controller.background_output import background_output_of
from meshbook.controller.console import Console
from meshbook.controller.futures import MeshFuture
from meshbook.controller.running import require_living, run_command
from meshbook.controller.session import Session
from meshbook.controller.tables import Table, count_of, format_bytes
from meshbook.errors import CellError, CheckpointError, MeshShapeError, UsageError
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire import checkpoint_folders, messages

_KEY = "checkpoints"
# Seconds between two looks whether the supervisor, which reports the end of a save, answers.
_LOOK_S = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint.

    Attributes:
        folder: of this one checkpoint; torch.distributed.checkpoint reads it too.
        step: the user's; None: none was given.
        saved_at: wall clock, at the commit.
        generation: of the process groups of the ranks that saved it.
    """

    folder: str
    step: int | None
    saved_at: float
    num_bytes: int
    world_size: int
    axes: dict[str, int]
    names: tuple[str, ...]
    generation: int

    @classmethod
    def of(cls, folder: str, manifest: messages.CheckpointManifest) -> SavedCheckpoint:
        names = tuple(saved.name for saved in manifest.names)
        return cls(
            folder,
            manifest.step,
            manifest.saved_at,
            manifest.num_bytes,
            manifest.world_size,
            dict(manifest.axes),
            names,
            manifest.generation,
        )


class CheckpointSave(MeshFuture[SavedCheckpoint]):
    """A save under way. `result()` waits until it is committed; `done()` says whether it is, or was thrown away.

    `result()` raises CheckpointError if it was thrown away, with the reason. What was saved before is then as it was.

    Attributes:
        path, step: as they were given.
        ranks: all of the mesh.
        num_bytes: copied on all ranks.
        seconds: that the slowest rank took for it: for so long training stood still.
    """

    def __init__(self, session: Session, command: messages.SaveCheckpoint) -> None:
        label = f"the checkpoint {_name(command.path, command.step)}"
        super().__init__(label, interrupt=lambda: None, delivery_thread=session.connection.thread)
        self.path, self.step, self.ranks = command.path, command.step, command.ranks
        self.num_bytes, self.seconds = 0, 0.0


class _OpenSaves:
    """The saves of one session whose end is not known yet."""

    def __init__(self, session: Session) -> None:
        self._open: dict[str, CheckpointSave] = {}
        self._output = background_output_of(session)
        listeners = session.connection.listeners
        listeners.report_handlers[messages.CheckpointCommitted] = self._committed
        listeners.report_handlers[messages.CheckpointDiscarded] = lambda report: self._fail(report.save, report.reason)
        listeners.mesh_stopped.append(self._mesh_stopped)

    def open(self, session: Session, command: messages.SaveCheckpoint) -> CheckpointSave:
        save = self._open[command.call] = CheckpointSave(session, command)
        return save

    def notify(self, ranks: Ranks, text: str) -> None:
        self._output.notify(ranks, text)

    def forget(self, call: str) -> None:
        """The save's call has failed, which its caller knows."""
        self._open.pop(call, None)

    def saves(self) -> list[CheckpointSave]:
        return list(self._open.values())

    def give_up(self, session: Session) -> None:
        """Have the supervisor throw away what is being written. Does not wait."""
        for call, save in list(self._open.items()):
            session.interrupt(save.ranks, target=call)

    def _committed(self, report: messages.CheckpointCommitted) -> None:
        if (save := self._open.pop(report.save, None)) is not None:
            saved = SavedCheckpoint.of(report.folder, report.manifest)
            save.resolve(lambda: saved)

    def _fail(self, call: str, reason: str) -> None:
        save = self._open.pop(call, None)
        if save is None:
            return
        text = f"{save.label} was thrown away: {reason}. What was saved before is as it was; save again"
        is_awaited = save.is_awaited
        save.fail(CheckpointError(text))
        if not is_awaited:  # nobody may ever ask
            self._output.notify(save.ranks, text)

    def _mesh_stopped(self, reason: str) -> None:
        for call in list(self._open):
            self._fail(call, f"the mesh has ended before it was committed ({reason})")


def _open_saves(session: Session) -> _OpenSaves:
    if _KEY not in session.extras:
        session.extras[_KEY] = _OpenSaves(session)
    return cast(_OpenSaves, session.extras[_KEY])


# ---------------------------------------------------------------------------------------------------------------------


def save(
    session: Session,
    own: Ranks,
    path: str | os.PathLike[str],
    names: Sequence[str],
    *,
    step: int | None,
    asynchronous: bool,
    overwrite: bool,
) -> CheckpointSave:
    """Save names of the ranks' namespaces; see `Mesh.checkpoint`."""
    _check_names(names)
    if not names:
        raise UsageError('which names? Write it like: mesh.checkpoint("run1", "model", "opt", step=800)')
    if step is not None and (not isinstance(step, int) or step < 0):
        raise UsageError(f"step={step!r} is not a whole number from 0 on; leave it out, or give the step of training")
    ranks = _all_ranks(session, own)
    command = messages.SaveCheckpoint(
        call=session.connection.next_call_id(),
        ranks=ranks,
        path=_absolute(path),
        names=tuple(names),
        step=step,
        overwrite=overwrite,
        label=f"checkpoint {_name(path, step)}",
    )
    saves = _open_saves(session)
    opened = saves.open(session, command)
    try:
        finished = session.foreground.run(command, on_output=Console(ranks, echo=True))
        session.raise_for_status(finished, ranks, label=command.label)
    except BaseException as error:
        saves.forget(command.call)
        raise _checkpoint_error(error) from None
    replies = [(len(part.ranks), part.outcome.reply) for part in finished.outcomes]
    opened.num_bytes = sum(count * reply["num_bytes"] for count, reply in replies)
    opened.seconds = max(reply["seconds"] for _, reply in replies)
    if unlike := replies[0][1]["unlike_replicas"]:
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        where = f"mesh.diff(0, 1, {unlike[0].partition('.')[0]!r}) shows where"
        text = (
            f"the replicas of a DDP model differ: {unlike[0]}{more} ({where}). Each rank's own is saved in "
            f"{opened.label}, which goes back to {len(ranks)} ranks only"
        )
        saves.notify(ranks, text)
    if not asynchronous:
        opened.result()
    return opened


def plan_preemption(
    session: Session,
    own: Ranks,
    path: str | os.PathLike[str] | None,
    names: Sequence[str],
    *,
    grace_s: float,
    resize: bool,
) -> None:
    """Say what is done when a process of the mesh receives SIGTERM; see `Mesh.on_preemption`."""
    _check_names(names)
    if (path is None) != (not names):
        raise UsageError(
            'a path and names go together, as in mesh.on_preemption("run1", "model", "opt"); without both, cells get '
            "time to end, and nothing is saved"
        )
    if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 < grace_s < float("inf"):
        raise UsageError(f"grace_s is the number of seconds between SIGTERM and SIGKILL, not {grace_s!r}")
    _all_ranks(session, own)
    folder = "" if path is None else _absolute(path)
    call = session.connection.next_call_id()
    command = messages.PlanPreemption(call, folder, tuple(names), float(grace_s), resize)
    session.call_supervisor(command)


def restore(
    session: Session, own: Ranks, path: str | os.PathLike[str], names: Sequence[str], *, step: int | None
) -> SavedCheckpoint:
    """Restore a checkpoint into the ranks' namespaces; see `Mesh.restore`."""
    _check_names(names)
    ranks = _all_ranks(session, own)
    entry = checkpoint_folders.find_checkpoint(_absolute(path), step)
    command = messages.RestoreCheckpoint(
        call=session.connection.next_call_id(),
        ranks=ranks,
        folder=str(entry.folder),
        names=tuple(names),
        label=f"restore {_name(path, entry.manifest.step)}",
    )
    try:
        run_command(session, command, Console(ranks, echo=True))
    except CellError as error:
        raise _checkpoint_error(error) from None
    return SavedCheckpoint.of(str(entry.folder), entry.manifest)


def table(path: str | os.PathLike[str]) -> Table:
    """Return the committed checkpoints below a path, oldest first. Raises CheckpointError."""
    rows = []
    found, problems = checkpoint_folders.scan(_absolute(path))
    for folder, manifest in found:
        axes = ", ".join(f"{name}={size}" for name, size in manifest.axes.items())
        names = ", ".join(saved.name + (" (per rank)" if saved.is_per_rank else "") for saved in manifest.names)
        rows.append(
            (
                "" if manifest.step is None else str(manifest.step),
                folder.name,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at)),
                format_bytes(manifest.num_bytes),
                f"{manifest.world_size} ({axes})",
                names,
                str(manifest.generation),
            )
        )
    columns = ("step", "folder", "saved", "size", "ranks", "names", "generation")
    heading = f"{path}: {count_of(len(rows), 'checkpoint')}." if rows else f"{path} has no checkpoint yet."
    return Table(heading, columns, tuple(rows), tuple(problems.values()))


def finish_saves(session: Session, what: str) -> None:
    """Wait for this program's saves that are being written, and say so: what follows would end them.

    Not for a supervisor that does not answer.

    Args:
        what: follows, "the resize".

    Raises:
        KeyboardInterrupt: Stop, which gives the saves up: a disk may hang.
    """
    if session.ended is not None or _KEY not in session.extras:
        return
    saves = _open_saves(session)
    try:
        for save in saves.saves():
            if not save.done():
                print(f"{what} waits for {save.label}, which is being written; Stop gives it up", flush=True)
                while not save.wait_done(_LOOK_S) and not session.connection.silent:
                    pass
    except KeyboardInterrupt:
        saves.give_up(session)
        raise


def _check_names(names: Sequence[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                f"a checkpoint takes names that cells have bound on the ranks, as strings, and not a "
                f'{type(name).__name__}. For a module or tensor of the controller: bind it there (mesh["w"] = handle)'
            )
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not a name that a cell has bound; save the whole object, by its name")
    if len(set(names)) != len(names):
        raise UsageError(f"a name is there twice: {', '.join(names)}")


def _all_ranks(session: Session, own: Ranks) -> Ranks:
    session.check_attached()
    assert session.axes is not None
    ranks = tuple(sorted(session.axes.ranks))
    if tuple(sorted(own)) != ranks:
        raise MeshShapeError(
            f"a checkpoint is saved and restored by all ranks ({format_ranks(ranks)}), and this slice has "
            f"{name_ranks(own)}; use the whole mesh"
        )
    return require_living(session, ranks, ranks)


def _checkpoint_error(error: BaseException) -> BaseException:
    """Return the ranks' CheckpointError as one of this process, where nothing else has failed."""
    if not isinstance(error, CellError) or isinstance(error, KeyboardInterrupt) or not error.failures:
        return error
    if {failure.ename for failure in error.failures} != {"CheckpointError"}:
        return error
    failures = error.failures
    if len(failures) == 1:
        return CheckpointError(failures[0].evalue)
    return CheckpointError("\n".join(f"{name_ranks(failure.ranks)}: {failure.evalue}" for failure in failures))


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _name(path: str | os.PathLike[str], step: int | None) -> str:
    name = Path(path).name
    return name if step is None else f"{name}, step {step}"
