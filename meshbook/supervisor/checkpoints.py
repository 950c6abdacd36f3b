"""Saves under way: what each rank has written, and whether a save becomes a checkpoint or is thrown away.

A save is open from its command to its end. When all ranks have copied their state they begin to write it. Every rank
reports that its files are on the disk (`written`); then one of them writes `.metadata`, and with its report the folder
is committed by the driver, in one rename. A rank that fails or dies, or groups that are formed anew meanwhile, end the
save without a checkpoint. Client connections do not matter. Pure: events in, effects out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from meshbook.ids import CallId, Ranks, format_ranks, name_ranks
from meshbook.supervisor.call_table import ActiveCall
from meshbook.supervisor.effects import CommitCheckpoint, Effect, RemoveCheckpoint, SendToClient
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages
from meshbook.wire.checkpoint_folders import FORMAT
from meshbook.wire.messages import (
    CheckpointManifest,
    CheckpointWritten,
    MeshSpec,
    OutcomeGroup,
    RankExited,
    SavedFolder,
)


@dataclass
class _OpenSave:
    command: messages.SaveCheckpoint
    written: dict[int, CheckpointWritten] = field(default_factory=dict)  # by rank
    is_copied: bool = False  # the ranks' main threads are done with it
    is_committing: bool = False  # the driver renames it; nothing can end it any more

    @property
    def missing(self) -> Ranks:
        """The ranks that have not written their files."""
        return tuple(rank for rank in self.command.ranks if rank not in self.written)


class CheckpointSaves:
    """The saves of one mesh that have not ended, and where its last checkpoints are.

    Attributes:
        end_listeners: called at the end of each save: its call, its folder ("": there is none), why there is none.
    """

    def __init__(
        self,
        ranks: RankTable,
        groups: GroupState,
        get_spec: Callable[[], MeshSpec | None],
        wall_time: Callable[[float], float],
    ) -> None:
        """
        Args:
            get_spec: returns the mesh's.
            wall_time: returns the wall clock at a time of the supervisor's.
        """
        self._ranks, self._groups, self._get_spec, self._wall_time = ranks, groups, get_spec, wall_time
        self._saves: dict[CallId, _OpenSave] = {}
        self._committed: list[SavedFolder] = []  # by this mesh, oldest first; one of each set of names
        self.end_listeners: list[Callable[[CallId, str, str], list[Effect]]] = []

    def __len__(self) -> int:
        return len(self._saves)

    # ---- events

    def began(self, command: messages.SaveCheckpoint) -> str:
        """A client asks for a save, whose call is about to be opened. Return why it is refused; "" if it is not."""
        if command.ranks != self._ranks.all:
            return (
                f"a checkpoint is saved by all ranks of the mesh ({format_ranks(self._ranks.all)}), and was asked of "
                f"{name_ranks(command.ranks)}; save it with the mesh itself, not with a slice of it"
            )
        self._saves[command.call] = _OpenSave(command)
        return ""

    def call_ended(self, call: ActiveCall, parts: Iterable[OutcomeGroup]) -> list[Effect]:
        """The ranks' main threads are done with a call, perhaps a save's: all have copied their state, or it failed."""
        save = self._saves.get(call.id)
        failed = [part for part in parts if part.outcome.status != "ok"]
        if save is None or save.is_committing:
            return []
        if not failed:
            save.is_copied = True
            return [self._ranks.send(call.ranks, messages.WriteCheckpoint(ranks=call.ranks, save=call.id))]
        error = failed[0].outcome.error
        text = f"{error.ename}: {error.evalue}" if error is not None else failed[0].outcome.status
        return self._discard(save, f"{name_ranks(failed[0].ranks)}: {text}")

    def stopped(self, call: CallId | None) -> list[Effect]:
        """A client gives up a save that is being written. One that ranks still copy ends with its call."""
        save = None if call is None else self._saves.get(call)
        if save is None or not save.is_copied or save.is_committing:
            return []
        return self._discard(save, "it was stopped while it was written")

    def written(self, host: int, report: CheckpointWritten, now: float) -> list[Effect]:
        """A rank has written its files, or `.metadata`, or has failed."""
        save = self._saves.get(report.save)
        if save is None or save.is_committing:
            return []
        if report.error:
            return self._discard(save, f"rank {report.rank}: {report.error}")
        if report.generation != (generation := self._groups.generation):
            return self._discard(
                save,
                f"the process groups were formed anew (generation {generation}) while it was saved in generation "
                f"{report.generation}",
            )
        if report.is_metadata:
            save.is_committing = True
            spec = self._get_spec()
            axes = {} if spec is None else dict(spec.axes)
            return [CommitCheckpoint(save.command, _manifest(save, report, axes, self._wall_time(now)))]
        save.written[report.rank] = report
        if save.missing:
            return []
        writer = save.command.ranks[:1]
        return [self._ranks.send(writer, messages.WriteCheckpointMetadata(ranks=writer, save=report.save))]

    def rank_lost(self, report: RankExited) -> list[Effect]:
        """A rank has exited: the saves end in which it has yet to write something; rank 0 writes last."""
        saves = [
            save
            for save in self._saves.values()
            if not save.is_committing and report.rank in (*save.missing, save.command.ranks[0])
        ]
        return [effect for save in saves for effect in self._discard(save, f"rank {report.rank} {report.description}")]

    def commit_ended(self, call: CallId, folder: str, manifest: CheckpointManifest, error: str) -> list[Effect]:
        """The driver has committed a save to this folder, or could not (`error`)."""
        save = self._saves.get(call)
        if save is None:
            return []
        if error:
            return self._discard(save, error)
        committed = messages.CheckpointCommitted(save=call, folder=folder, manifest=manifest)
        names = tuple(saved.name for saved in manifest.names)
        earlier = [entry for entry in self._committed if entry.names != names]
        self._committed = [*earlier, SavedFolder(folder, manifest.step, manifest.saved_at, names)]
        return [*self._end(save), SendToClient(None, committed), *self._call_listeners(call, folder, "")]

    # ---- queries

    def last_committed(self, names: Collection[str]) -> SavedFolder | None:
        """Return the checkpoint that this mesh has committed last of those that have most of these names."""
        wanted = set(names)
        found = max(enumerate(self._committed), key=lambda at: (len(wanted & set(at[1].names)), at[0]), default=None)
        return found[1] if found is not None and wanted & set(found[1].names) else None

    def age_s(self, saved: SavedFolder, now: float) -> float:
        return self._wall_time(now) - saved.saved_at

    # ---- ends

    def _discard(self, save: _OpenSave, reason: str) -> list[Effect]:
        discarded = messages.CheckpointDiscarded(save=save.command.call, reason=reason)
        ended = [*self._end(save), RemoveCheckpoint(save.command), SendToClient(None, discarded)]
        return [*ended, *self._call_listeners(save.command.call, "", reason)]

    def _call_listeners(self, call: CallId, folder: str, error: str) -> list[Effect]:
        return [effect for listener in self.end_listeners for effect in listener(call, folder, error)]

    def _end(self, save: _OpenSave) -> list[Effect]:
        del self._saves[save.command.call]
        living = tuple(rank for rank in save.command.ranks if rank not in self._ranks.exited)
        if not living:
            return []
        return [self._ranks.send(living, messages.DropCheckpoint(ranks=living, save=save.command.call))]


def _manifest(
    save: _OpenSave, metadata: CheckpointWritten, axes: dict[str, int], wall_time: float
) -> CheckpointManifest:
    first = save.written[save.command.ranks[0]]
    files = [file for rank in save.command.ranks for file in save.written[rank].files]
    return CheckpointManifest(
        format=FORMAT,
        step=save.command.step,
        generation=first.generation,
        world_size=len(save.command.ranks),
        axes=axes,
        saved_at=wall_time,
        torch=first.torch,
        names=first.names,
        files=(*files, *metadata.files),
    )
