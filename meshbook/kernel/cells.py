"""Cells on the ranks: each is the cell that the shell executes now, with its number, its output and its names."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from IPython.core.interactiveshell import InteractiveShell

from meshbook.controller import recording
from meshbook.controller.console import Console
from meshbook.controller.futures import MeshFuture
from meshbook.controller.mesh import Mesh
from meshbook.controller.past_cells import end_items
from meshbook.controller.project import project_of
from meshbook.controller.results import CellResult, RankValues
from meshbook.controller.running import heal_advice_for
from meshbook.controller.session import Session
from meshbook.errors import CellError, CellInterrupted, MeshbookError, NotAttached, RankLost
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.kernel import hints, transform
from meshbook.kernel.front_end import FrontEnd, OutputSink
from meshbook.kernel.handles import HandleNamespace
from meshbook.kernel.mesh_options import MeshOptions
from meshbook.kernel.meshes import NotebookMeshes
from meshbook.wire import messages
from meshbook.wire.messages import FoldedItem

# Cells about the last failure: they are not recorded, for its record is the one to keep.
_LOOKS_BACK = ("%debug", "%tb")


@dataclass(frozen=True)
class BackgroundCell:
    """A cell that runs in the background.

    Attributes:
        is_followed: it is a cell of a client that is gone.
    """

    label: str
    session: Session
    ranks: Ranks
    future: MeshFuture[CellResult]
    is_followed: bool


class CellRunner:
    """Runs cells of one shell on its meshes.

    Attributes:
        num_broadcast: number of cells sent to ranks so far.
        last_number: number of the last of them.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        front_end: FrontEnd,
        handles: HandleNamespace,
        meshes: NotebookMeshes,
    ) -> None:
        self.num_broadcast = self.last_number = 0
        self._shell, self._front_end, self._handles, self._meshes = shell, front_end, handles, meshes
        self._background_cells: list[BackgroundCell] = []
        self._known_losses: WeakKeyDictionary[Session, set[int]] = WeakKeyDictionary()  # ranks that need no report
        self._last_failure: CellError | RankLost | None = None

    def run(
        self,
        source: str,
        *,
        mesh: Mesh | None = None,
        ranks: str | Sequence[int] | None = None,
        setup: bool = False,
        background: bool = False,
        stop_first: bool = False,
        record: bool = False,
    ) -> RankValues | MeshFuture[CellResult] | None:
        """Run source on ranks as the cell that this shell executes now: its number, its output, its names.

        Starts a mesh if there is none. Waits, unless in the background; Stop and input() work meanwhile.

        Args:
            mesh: None: the current one.
            ranks: a selection (`"0,2-3"`, `"dp=0"`) or ranks; None: all live ranks.
            setup: run it again on ranks that join later.
            background: return immediately; the output continues under this cell.
            stop_first: the debugger stops at the first line.
            record: keep what a replay of it needs, also if the mesh does not record.

        Returns:
            The values of the last expression, None if there was none; in the background a future.

        Raises:
            CellError: it raised on ranks; if all ranks raised the same class, the error's class has that name.
            CellInterrupted, RankLost: as `Mesh.run`.
            MeshShapeError, NotAttached: nothing was run.
        """
        self.num_broadcast += 1
        try:
            return self._run(source, mesh, ranks, background, record, setup=setup, stop_first=stop_first)
        except MeshbookError as error:
            raise self._present_error(error) from None

    def mesh_added(self, mesh: Mesh) -> None:
        """Record a mesh that cells may run on: ranks that it lost before are not reported."""
        self._known_losses.setdefault(mesh.session, set(mesh.session.lost))

    def running_in_background(self, session: Session, ranks: Ranks) -> list[BackgroundCell]:
        """Return the cells that run in the background on any of these ranks."""
        wanted = set(ranks)
        return [cell for cell in list(self._background_cells) if cell.session is session and wanted & set(cell.ranks)]

    def _run(
        self,
        source: str,
        mesh: Mesh | None,
        ranks: str | Sequence[int] | None,
        background: bool,
        record: bool,
        **options: bool,
    ) -> RankValues | MeshFuture[CellResult] | None:
        # since IPython 9, execution_count is already the next cell's
        number = self.last_number = self._shell.displayhook.prompt_count
        source = self._fix_history(source)
        mesh = mesh or self._current_mesh()
        session = mesh.session
        if (project := project_of(session)) is not None:
            project.sync_if_changed()
        chosen_at = session.info.num_rank_changes if ranks is None else None
        chosen = mesh.resolve_ranks(ranks)
        output = self._front_end.make_sink(chosen, number)
        self._front_end.show_notices()
        label = f"cell {number}"
        lost = tuple(rank for rank in mesh.ranks if ranks is None and rank in session.lost)
        self._note_obstacles(session, chosen, lost, label, output)
        command = session.cell_command(
            source,
            chosen,
            record_bytes=0
            if source.startswith(_LOOKS_BACK)
            else session.record_bytes or (recording.DEFAULT_LIMIT if record else 0),
            chosen_at=chosen_at,
            number=number,
            filename=self._shell.compile.get_code_name(source, source, number),
            label=label,
            allow_input=not background and self._front_end.allows_input,
            **options,
        )
        if background:
            return self._show_in_background(session, command, command, output)
        finished: messages.CallFinished | None = None
        try:
            finished = session.foreground.run(
                command, on_output=output, on_input=self._front_end.prompt, keep_result=True
            )
            return self._finish(session, command, finished)
        except CellInterrupted:
            if (stuck := session.foreground.abandoned.get(command.call)) is not None:
                stuck.future.add_done_callback(lambda future: self._stuck_ranks_returned(session, command, future))
            raise
        except KeyboardInterrupt:
            # Stop arrives twice, as a message and as a signal; the second may arrive after the ranks have finished.
            if finished is None:
                raise
            return self._finish(session, command, finished)
        finally:
            output.close()

    def _current_mesh(self) -> Mesh:
        """Return the current mesh; if there is none, start one and add a notice."""
        began = time.monotonic()
        try:
            self._meshes.reattach()
            if self._meshes.current is not None:
                return self._meshes.current
            mesh = self._meshes.start(MeshOptions())
        except KeyboardInterrupt:
            raise CellInterrupted((), summary="stopped while the ranks were being started; none runs") from None
        info = mesh.session.info
        kind = f"{info.backend}, {info.ranks[0].device.partition(':')[0]}" if info.backend else info.ranks[0].device
        many = "1 rank" if len(mesh) == 1 else f"{len(mesh)} ranks"
        took = time.monotonic() - began
        self._front_end.add_notice(f"started {many} in {took:.1f} s ({kind}); %mesh status tells more")
        return mesh

    def _fix_history(self, source: str) -> str:
        """Put the user's source into `In`; return the source padded to the cell's line numbers."""
        history = self._shell.history_manager
        if history is None or not history.input_hist_raw:
            return source
        cell = history.input_hist_raw[-1]
        if history.input_hist_parsed and transform.NOTEBOOK_EXPRESSION in history.input_hist_parsed[-1]:
            history.input_hist_parsed[-1] = cell
        return transform.pad_to_cell_lines(cell, source)

    def _note_obstacles(self, session: Session, ranks: Ranks, lost: Ranks, label: str, output: OutputSink) -> None:
        """Show which ranks were lost since the last cell or are missing in it, and which calls the cell waits for."""
        known = self._known_losses.setdefault(session, set())
        news = False
        for rank in session.info.ranks:
            if rank.state == "dead" and rank.rank not in known:
                news = True
                known.add(rank.rank)
                who = f"rank {rank.rank} (pid {rank.pid} on {rank.host})"
                output.note(f"{who} {rank.exit} while no cell ran; the others go on")
        if lost and not news:
            are_lost = f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} lost"
            output.note(f"on {name_ranks(ranks)}: {are_lost}; {heal_advice_for(session, lost)}")
        for other in self.running_in_background(session, ranks):
            output.note(f"{label} waits for {other.label}, which runs in the background on {name_ranks(other.ranks)}")
        for abandoned in list(session.foreground.abandoned.values()):
            if waits_for := sorted(set(abandoned.ranks) & set(ranks)):
                of = getattr(abandoned.command, "label", "") or "a call"
                ends = f"ends {'it' if len(waits_for) == 1 else 'them'}"
                output.note(
                    f"{label} waits for {name_ranks(waits_for)}, not back from {of} since that was stopped; "
                    f"Stop pressed twice, or %mesh kill {format_ranks(waits_for)}, {ends}"
                )

    def _finish(
        self, session: Session, command: messages.RunCell, finished: messages.CallFinished
    ) -> RankValues | None:
        self._handles.update(session, finished.outcomes)
        if text := next((part.outcome.next_input for part in finished.outcomes if part.outcome.next_input), None):
            self._shell.set_next_input(text)
        if note := recording.save_failed(session, command, finished):
            self._front_end.show_note(note)
        session.raise_for_status(finished, command.ranks, label=command.label)
        values = session.rank_values(finished.outcomes)
        # An object that displays itself has already done so on its rank.
        return values if len(values) and any(values._repr_mimebundle_().values()) else None

    def _stuck_ranks_returned(
        self, session: Session, command: messages.RunCell, future: Future[messages.CallFinished]
    ) -> None:
        """Report that the last stuck rank returned from an interrupted cell, or exited."""
        with contextlib.suppress(MeshbookError):  # the mesh has ended
            finished = future.result()
            self._handles.update(session, finished.outcomes)
            if not finished.lost:
                self._front_end.add_notice(f"all ranks have come back from {command.label}, which was stopped")

    def follow(self, session: Session, call: messages.OpenCall) -> None:
        """Show a cell whose client is gone under the current cell: what it printed since then, what follows, its end.

        Does not wait.
        """
        output = self._front_end.make_sink(call.ranks, call.number or 0)
        with contextlib.suppress(NotAttached):  # the mesh has ended, which the next cell on it reports
            self._show_in_background(session, messages.FollowCall(call=call.call), call, output)

    def _show_in_background(
        self,
        session: Session,
        command: messages.RunCell | messages.FollowCall,
        shown: messages.RunCell | messages.OpenCall,
        output: OutputSink,
    ) -> MeshFuture[CellResult]:
        """Send a command whose output and end are those of the cell `shown`, and show these as they come."""
        label = shown.label or "a cell"
        console = Console(shown.ranks, echo=False)

        def take(items: tuple[FoldedItem, ...]) -> None:
            console(items)
            output(items)

        source = session.request(command, on_output=take)
        future: MeshFuture[CellResult] = session.future(
            source, shown, lambda finished: session.cell_result(shown, finished, console.text)
        )
        cell = BackgroundCell(label, session, shown.ranks, future, is_followed=shown is not command)
        self._background_cells.append(cell)

        def ended(_: MeshFuture[CellResult]) -> None:
            self._background_cells.remove(cell)
            try:
                finished: messages.CallFinished = source.result()
            except MeshbookError as error:
                output.note(f"{label} ended: {error}")
                return
            self._handles.update(session, finished.outcomes)
            output.close()
            if future.exception() is not None or cell.is_followed:  # a background cell's values are those of its future
                output(end_items(finished, shown.ranks, label))
            if future.exception() is None:
                output.note(f"{label} is done after {finished.seconds:.1f} s")

        future.add_done_callback(ended)
        return future

    # ---- failures

    def _present_error(self, error: MeshbookError) -> MeshbookError:
        """Return the error as the notebook shows it: with the class name that was raised and with next-step hints."""
        if isinstance(error, RankLost):
            for mesh in self._meshes.values():
                if set(error.ranks) <= set(mesh.session.lost):
                    self._known_losses.setdefault(mesh.session, set()).update(error.ranks)
        if isinstance(error, CellError):
            error = hints.with_raised_class_name(error)
            error.rendered = (*error.rendered, *hints.next_step_hints(error, self._handles.is_user_bound))
        if isinstance(error, CellError | RankLost):
            self._last_failure = error
        else:
            hints.hide_traceback(error)
        return error

    def show_failure(self, magic: str, how: str = "") -> Any:
        """Run `%tb` or `%debug` for the last failure shown, on the ranks that had it.

        Args:
            how: the magic's argument, such as `Verbose`.
        """
        error, mesh = self._last_failure, self._meshes.current
        is_shown = error is getattr(sys, "last_value", None)
        if error is None or mesh is None or not is_shown:
            return self._shell.run_line_magic(magic, how)
        ranks = {rank for failure in error.failures for rank in failure.ranks}
        living = mesh.session.living(tuple(sorted(ranks & set(mesh.ranks))))
        if not living:
            self._shell.showtraceback()
            return None
        if magic == "debug" or how:
            return self.run(f"%{magic} {how}".strip(), ranks=living)
        self._shell.showtraceback()
        one = living[0]
        self._front_end.show_note(
            f"%debug looks into the frames; %%mesh --ranks {one} runs code on rank {one}, where sys.last_value is the "
            "exception"
        )
        return None
