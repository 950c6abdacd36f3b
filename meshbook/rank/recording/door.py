"""The way to the recorder from the rank's main thread, which may have no torch; and `save`, which clients call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from meshbook.errors import message_of
from meshbook.rank import actor_hooks
from meshbook.wire.messages import CallFunction, RunCell

if TYPE_CHECKING:  # they import torch, which a mesh may not have, and IPython, which clients need not
    from meshbook.rank.cells.code_runner import CellRun
    from meshbook.rank.cells.shell import RankShell
    from meshbook.rank.process_groups.rank_groups import RankGroups
    from meshbook.rank.recording.actors import ActorRecords
    from meshbook.rank.recording.recorder import CellRecorder

# What is run in the replay of a function that a client has called.
CALL = "_function(*_args, **_kwargs)"

_doors: list[RecordingDoor] = []  # of this process


class RecordingDoor:
    """Records the cells that ask for it, and keeps the last record. Main thread."""

    def __init__(self, rank: int, device: str, shell: RankShell, groups: RankGroups) -> None:
        self._rank, self._device, self._shell, self._groups = rank, device, shell, groups
        self._recorder: CellRecorder | None = None
        self._actors: ActorRecords | None = None
        _doors[:] = [self]

    def recording(self, cell: RunCell) -> Callable[[Sequence[CodeType], str], None] | None:
        """Return what is to be called with a cell's code and file name before it runs; None: it is not recorded."""
        if not cell.record_bytes:
            return None
        self._recorder = None  # first, so that two records never take memory at once
        from meshbook.rank.recording.recorder import CellRecorder

        recorder = self._recorder = CellRecorder(cell, self._shell.user_ns, self._groups.process_groups)
        return lambda codes, file: recorder.begin(codes, file, self._shell.user_names(), self._shell.user_ns_hidden)

    def recording_call(self, call: CallFunction, function: Any, args: Any, kwargs: Any) -> Callable[[], None] | None:
        """Return what is to be called before a function runs; None: it is not recorded."""
        if not call.record_bytes:
            return None
        cell = RunCell(call.call, call.ranks, CALL, label=call.label, record_bytes=call.record_bytes)
        before = self.recording(cell)
        if before is None or self._recorder is None:
            return None
        recorder = self._recorder
        return lambda: recorder.begin_call(function, args, kwargs)

    def ended(self, run: CellRun) -> None:
        """Note how the recorded cell ended."""
        assert self._recorder is not None
        self._recorder.end(run.status, run.error)

    def arm(self, limit: int) -> None:
        """Record actors from their next message on; 0: no longer, and what was recorded is dropped."""
        if not limit:
            self._recorder = None
        if self._actors is not None:
            self._actors.close()
            self._actors = None
        if limit:
            from meshbook.rank.recording.actors import ActorRecords

            self._actors = ActorRecords(limit, lambda: self._groups.process_groups)
        actor_hooks.record_messages(self._actors)

    def save(self, folder: str, call: str | None) -> dict[str, Any]:
        """See the function `save`."""
        place = Path(folder), self._rank, self._groups.world_size, self._device
        saved = self._save_cell(folder, call)
        if call is None and self._actors is not None:
            try:
                actors = {name: nbytes for name, _, nbytes in self._actors.save(*place)}
            except Exception as error:
                return {"missing": f"{type(error).__name__}: {message_of(error)}"}
            if actors:
                if self._recorder is None:
                    saved = {}
                saved = {"left_out": {}, **saved, "nbytes": saved.get("nbytes", 0) + sum(actors.values())}
        return saved

    def _save_cell(self, folder: str, call: str | None) -> dict[str, Any]:
        recorder = self._recorder
        if recorder is None or (call is not None and recorder.record.cell.call != call):
            return {"missing": "no cell was recorded" if call is None else "another cell was recorded since"}
        if recorder.record.missing:
            return {"missing": recorder.record.missing}
        try:
            path, nbytes = recorder.save(Path(folder), self._rank, self._groups.world_size, self._device)
        except Exception as error:
            return {"missing": f"{type(error).__name__}: {message_of(error)}"}
        return {"path": str(path), "nbytes": nbytes, "left_out": recorder.record.left_out}


def arm(limit: int) -> None:
    """Have this rank's actors recorded, up to so many bytes each. Called by clients.

    Args:
        limit: 0: no longer, and what was recorded of cells and actors is dropped.
    """
    _doors[0].arm(limit)


def save(folder: str, call: str | None) -> dict[str, Any]:
    """Write this rank's last record into a folder, and those of its actors. Called by clients, on the main thread.

    Args:
        folder: relative to the rank's working directory.
        call: of the recorded cell, and no actors; None: whichever it was.

    Returns:
        "path" and "nbytes" of the file and what is "left_out"; or "missing", why there is none.
    """
    return _doors[0].save(folder, call)
