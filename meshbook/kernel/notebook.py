"""One notebook and its meshes: every path by which a cell runs on ranks.

The kernel, the magics and the rewritten cells all call this module. It depends on IPython's shell, in a kernel or in a
terminal, and on the controller; `transform` decides what runs where, `sink` renders the output.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from IPython.core import page
from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell

from meshbook.axes_text import parse_axes, parse_selection
from meshbook.controller import mesh as meshes
from meshbook.controller.background_output import background_output_of
from meshbook.controller.config import Defaults, read_defaults
from meshbook.controller.console import Console, prompt_on_terminal
from meshbook.controller.futures import MeshFuture
from meshbook.controller.launch import launch_supervisor
from meshbook.controller.mesh import Mesh, generate_mesh_name, make_spec
from meshbook.controller.results import CellResult, RankValues
from meshbook.controller.session import Session
from meshbook.controller.tables import describe_size
from meshbook.errors import (
    CellError,
    CellInterrupted,
    Failure,
    MeshbookError,
    MeshInUse,
    MeshNameError,
    NotAttached,
    RankLost,
    UsageError,
)
from meshbook.ids import CallId, Ranks, format_ranks, name_ranks
from meshbook.kernel import completion, hints, sink, transform
from meshbook.kernel.handles import PRESET_MODULES, HandleNamespace
from meshbook.kernel.hook import CellHook
from meshbook.kernel.warm_start import WarmStarter, mesh_name_stem, open_session, owner_key
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import keys, messages
from meshbook.wire.messages import Display, FoldedItem

# Seconds that completion and inspection wait for a rank. A longer delay looks like a hang to the user, and a rank that
# holds the GIL may not reply for minutes.
QUERY_TIMEOUT_S = 0.3
# Number of front-end display ids to store, so that a later cell's update finds its display.
_MAX_DISPLAY_IDS = 10_000
_MAX_NAMES_LISTED = 8


class OutputSink(Protocol):
    """The destination of a cell's output."""

    def __call__(self, items: tuple[FoldedItem, ...], /) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class TerminalSink:
    """An `OutputSink` that writes to a terminal's standard streams."""

    def __init__(self, ranks: Ranks) -> None:
        self._console = Console(ranks, echo=True)

    def __call__(self, items: tuple[FoldedItem, ...]) -> None:
        self._console(items)

    def note(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        """Do nothing: no output is pending."""


@dataclass(frozen=True)
class BackgroundCell:
    """A cell that runs in the background."""

    label: str
    session: Session
    ranks: Ranks
    future: MeshFuture[CellResult]


class Notebook:
    """A shell's meshes, and the cells that run on them. `Notebook.of(shell)` returns a shell's notebook.

    Attributes:
        shell: IPython's shell, of any kind.
        mesh: the mesh that cells run on; None: none was started, or it was stopped or detached.
        meshes: this notebook's meshes, by name.
        auto: whether a cell without a magic runs on the ranks.
        num_broadcast: number of cells sent to ranks so far.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.mesh: Mesh | None = None
        self.meshes: dict[str, Mesh] = {}
        self.auto = False
        self.num_broadcast = 0
        self._kernel = getattr(shell, "kernel", None)
        self._kind = "ipython" if self._kernel is None else "kernel"
        self._owner = owner_key()
        self._warm_starter: WarmStarter | None = None
        self._handles = HandleNamespace(
            cast("dict[str, Any]", shell.user_ns), cast("dict[str, Any]", shell.user_ns_hidden), self._warn_bound_twice
        )
        self._notices: list[str] = []  # to show with the next cell
        self._reported_lost: dict[str, set[int]] = {}  # mesh -> lost ranks that were reported to the user
        self._persistent_meshes: set[str] = set()  # meshes that do not end with this notebook
        self._background_cells: list[BackgroundCell] = []
        self._last_failure: CellError | RankLost | None = None  # the last failure of a cell
        self._display_ids: OrderedDict[tuple[int, str], str] = OrderedDict()
        self._omitted_displays = sink.OmittedDisplays()
        self._hook = CellHook(shell, lambda: self.auto)
        self._hook.install()
        shell.events.register("pre_run_cell", self._pre_run_cell)
        shell.set_custom_exc((NameError,), self._explain_missing_name)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, shell: InteractiveShell) -> Notebook:
        """Return the notebook of this shell, creating it on the first call."""
        found = getattr(shell, "meshbook", None)
        if not isinstance(found, Notebook):
            found = cls(shell)
            shell.meshbook = found  # type: ignore[attr-defined]  # where rewritten cells find it
        return found

    # ---- starting, attaching and stopping meshes

    def begin_warm_start(self, *, warm: bool) -> None:
        """Search for this notebook's existing meshes in the background.

        Args:
            warm: launch a supervisor for the first cell if there are none.
        """
        if self._warm_starter is None:
            ttl = _lenient_defaults().orphan_ttl_s
            self._warm_starter = WarmStarter(self._owner, kind=self._kind, orphan_ttl_s=ttl, warm=warm)

    def reattach(self) -> None:
        """Attach to the existing meshes that the search found. Waits for the search to finish."""
        if self._warm_starter is None:
            return
        for session in self._warm_starter.pop_sessions():
            assert session.axes is not None
            if not session.living(session.axes.ranks):
                session.stop()
                self._notices.append(
                    f"every rank of this notebook's mesh {session.name} had died; the mesh was stopped"
                )
                continue
            self._add_mesh(Mesh.of(session, session.axes), persistent=_lenient_defaults().keep)
            self._notices += _reattach_notices(session, "from before the kernel's restart")

    def start(
        self,
        *,
        ranks: int | None = None,
        axes: str | Mapping[str, int] | None = None,
        engine: str | None = None,
        name: str | None = None,
        num_hosts: int | None = None,
        start_method: str | None = None,
        device: str | None = None,
        end_on_error: bool | None = None,
        keep: bool | None = None,
        orphan_ttl_s: float | None = None,
    ) -> Mesh:
        """Start a mesh and make it current. Waits until its process group is ready.

        If the notebook's mesh already runs and matches the arguments, it is returned, so a cell with `%mesh start` may
        run again. Otherwise a new mesh starts.

        Args:
            ranks, axes, engine, num_hosts, start_method, device, end_on_error: as `meshbook.create_mesh`; None: the
                defaults, or for a running mesh its own values.
            name: None: derived from the notebook. A name makes it an additional mesh beside the notebook's others.
            keep: it outlives the notebook's kernel, for `orphan_ttl_s`.
            orphan_ttl_s: seconds that it may live without any client.

        Raises:
            MeshInUse: the notebook's mesh differs from the arguments; or the name is taken.
            MeshShapeError, UsageError, StartError: as `create_mesh`.
        """
        self.reattach()
        defaults = read_defaults()
        running = self._find_running(name)
        if running is not None and not running.session.living(running.ranks):
            running.stop()  # no live rank holds any state
            self._remove_mesh(running)
        elif running is not None:
            wanted = _resolve_axes(ranks, axes, lambda: len(running)) if ranks is not None or axes is not None else None
            self._check_matches(
                running, wanted, axes is not None, engine, num_hosts, start_method, device, end_on_error
            )
            self._apply_lifetime(running, keep, orphan_ttl_s)
            self.use(running.name)
            return running
        grid = _resolve_axes(ranks, axes, defaults.num_ranks)
        spec = make_spec(
            grid,
            engine=engine or defaults.engine,
            num_hosts=num_hosts or 1,
            start_method=start_method or defaults.start_method,
            device=device or defaults.device,
            end_on_error=defaults.end_on_error if end_on_error is None else end_on_error,
        )
        return self._start(grid, spec, name, defaults.keep if keep is None else keep, orphan_ttl_s)

    def restart(
        self,
        name: str | None = None,
        *,
        ranks: int | None = None,
        axes: str | Mapping[str, int] | None = None,
        engine: str | None = None,
        num_hosts: int | None = None,
        start_method: str | None = None,
        device: str | None = None,
        end_on_error: bool | None = None,
        keep: bool | None = None,
        orphan_ttl_s: float | None = None,
    ) -> Mesh:
        """Replace a mesh's ranks by new ones; the old ranks' state is lost. Waits until the process group is ready.

        Args:
            name: None: the current mesh. The name does not change.
            ranks, axes, ...: as `start`; None: as the mesh has it.

        Raises:
            NotAttached: there is no mesh to restart.
            MeshNameError, MeshShapeError, UsageError: the options are invalid; the mesh keeps running unchanged.
            StartError: the old ranks have exited, and the new ones did not start.
        """
        self.reattach()
        mesh = self._get_mesh(name)
        old = mesh.session.info.spec
        assert old is not None
        grid = (
            MeshAxes.of(dict(old.axes))
            if ranks is None and axes is None
            else _resolve_axes(ranks, axes, lambda: len(mesh))
        )
        spec = make_spec(
            grid,
            engine=engine or old.engine,
            num_hosts=num_hosts or old.num_hosts,
            start_method=start_method or old.start_method,
            device=device or old.device,
            end_on_error=old.end_on_error if end_on_error is None else end_on_error,
            process_group=old.process_group,
            torch=old.torch,
        )
        persistent = mesh.name in self._persistent_meshes if keep is None else keep
        mesh.stop()
        self._remove_mesh(mesh)
        return self._start(grid, spec, mesh.name, persistent, orphan_ttl_s)

    def _start(
        self, grid: MeshAxes, spec: messages.MeshSpec, name: str | None, persistent: bool, orphan_ttl_s: float | None
    ) -> Mesh:
        defaults = read_defaults()
        session, environment = self._obtain_supervisor(name, orphan_ttl_s)
        session.start(grid, _with_environment(spec, environment), timeout_s=defaults.start_timeout_s)
        mesh = Mesh.of(session, grid)
        self._add_mesh(mesh, persistent=persistent)
        return mesh

    def _find_running(self, name: str | None) -> Mesh | None:
        """Return the running mesh that `start` refers to, or None if it must be started.

        With a name: the mesh of that name. Without: this notebook's mesh with a generated name, else the current mesh.
        """
        alive = {mesh.name: mesh for mesh in self.meshes.values() if mesh.session.ended is None}
        if name is not None:
            return alive.get(name)
        unnamed = re.compile(re.escape(mesh_name_stem(self._owner)) + "-[0-9a-f]{4}")
        found = [mesh for mesh in alive.values() if unnamed.fullmatch(mesh.name)]
        return found[-1] if found else alive.get(self.mesh.name) if self.mesh is not None else None

    def _check_matches(
        self,
        mesh: Mesh,
        grid: MeshAxes | None,
        by_axes: bool,
        engine: str | None,
        num_hosts: int | None,
        start_method: str | None,
        device: str | None,
        end_on_error: bool | None,
    ) -> None:
        """Check that a running mesh matches the arguments; None matches anything.

        Raises:
            MeshInUse: it does not.
        """
        info = mesh.session.info
        spec = info.spec
        assert spec is not None
        differences = []
        if grid is not None and (grid.axes != dict(spec.axes) if by_axes else grid.size != len(info.ranks)):
            asked_for = f"axes {grid}" if by_axes else str(grid.size)
            differences.append(f"it has {describe_size(spec)}, and {asked_for} are asked for")
        for what, requested, actual in (
            ("engine", engine, spec.engine),
            ("start method", start_method, spec.start_method),
            ("number of hosts", num_hosts, spec.num_hosts),
        ):
            if requested is not None and requested != actual:
                differences.append(f"its {what} is {actual}, and {requested} is asked for")
        if end_on_error not in (None, spec.end_on_error):
            differences.append(f"it has end_on_error={spec.end_on_error}, and {end_on_error} is asked for")
        kinds = {rank.device.partition(":")[0] for rank in info.ranks}
        if device not in (None, "auto", spec.device) and kinds != {device}:
            differences.append(f"its ranks are on {' and '.join(sorted(kinds))}, and {device} is asked for")
        if lost := mesh.session.lost:
            differences.append(f"of its ranks {format_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone")
        if differences:
            raise MeshInUse(
                f"this notebook's mesh {mesh.name!r} is running already, but {'; '.join(differences)}. %mesh "
                "restart, with the same options, replaces it by fresh ranks (what the old ones hold is lost); "
                "%mesh start --name OTHER starts one beside it"
            )

    def _apply_lifetime(self, mesh: Mesh, keep: bool | None, orphan_ttl_s: float | None) -> None:
        """Apply `keep` and `orphan_ttl_s` of `start` to a running mesh."""
        if keep:
            mesh.session.disable_stop_at_exit()
            self._persistent_meshes.add(mesh.name)
        if orphan_ttl_s is not None:
            mesh.session.connection.send(messages.SetOrphanTtl(orphan_ttl_s=orphan_ttl_s))

    def use(self, name: str) -> None:
        """Make this one of the notebook's meshes current. Raises MeshNameError."""
        mesh = self._get_mesh(name)
        self.mesh = mesh
        self._handles.switch_mesh(mesh)

    def attach(self, name: str | None = None) -> Mesh:
        """Attach to a running mesh, whoever started it, and make it current; it does not end with this notebook.

        Args:
            name: None: the only mesh besides this notebook's.

        Raises:
            NotAttached, MeshNameError, VersionMismatch: as `meshbook.attach`.
        """
        self.reattach()
        if name is not None and name in self.meshes and self.meshes[name].session.ended is None:
            self.use(name)
            return self.meshes[name]
        mesh = meshes.attach(name if name is not None else self._only_other(), kind=self._kind)
        self._add_mesh(mesh, persistent=True)
        self._notices += _reattach_notices(mesh.session, "of another client")[1:]
        return mesh

    def detach(self, name: str | None = None, orphan_ttl_s: float | None = None) -> None:
        """Leave a mesh running without this notebook.

        Args:
            name: None: the current one.
            orphan_ttl_s: seconds that it may live without any client; None: until it is stopped.
        """
        mesh = self._get_mesh(name)
        mesh.detach(orphan_ttl_s)
        self._remove_mesh(mesh)

    def stop(self, name: str | None = None, now: bool = False) -> None:
        """Stop a mesh and everything on it. Waits until it has exited.

        Args:
            name: None: the current one.
            now: do not wait for cells that run in the background.
        """
        mesh = self._get_mesh(name)
        if not now:
            for cell in self._running_in_background(mesh.session, mesh.ranks):
                self._show_note(f"waiting for {cell.label}, which runs in the background; %mesh stop --now does not")
                cell.future.exception()
        mesh.stop()
        self._remove_mesh(mesh)

    def close(self, *, restart: bool) -> None:
        """Handle an orderly shutdown of the kernel: stop its meshes, except persistent ones and before a restart.

        Args:
            restart: the kernel will start again; its running cell is interrupted and its meshes stay.
        """
        if self._warm_starter is not None:
            self._warm_starter.close()
        if restart:
            for mesh in list(self.meshes.values()):
                mesh.session.interrupt_foreground(may_escalate=False)
        for mesh in list(self.meshes.values()):
            if restart:
                mesh.session.disable_stop_at_exit()
            elif mesh.name not in self._persistent_meshes:
                mesh.stop()

    def interrupt_foreground(self) -> bool:
        """Interrupt the foreground cells, as the Stop button does. Thread-safe.

        Returns:
            Whether ranks were running anything for this notebook's foreground.
        """
        sessions = [mesh.session for mesh in list(self.meshes.values())]
        interrupted = [
            session.interrupt_foreground(expect_sigint=True) for session in sessions
        ]  # a list, so that every session is interrupted, not only the first
        return any(interrupted)

    def _obtain_supervisor(self, name: str | None, ttl: float | None) -> tuple[Session, Mapping[str, str]]:
        """Return a session of a supervisor without ranks, and the environment that its ranks will inherit."""
        warm_starter = self._warm_starter
        if warm_starter is not None and name is None and ttl is None:
            standby = warm_starter.pop_standby()
            if standby is not None:
                return standby, warm_starter.inherited_environment
        elif warm_starter is not None and not self.meshes:
            warm_starter.close()
        found = launch_supervisor(name or generate_mesh_name(mesh_name_stem(self._owner)), owner=self._owner)
        orphan_ttl_s = read_defaults().orphan_ttl_s if ttl is None else ttl
        return open_session(found, kind=self._kind, orphan_ttl_s=orphan_ttl_s), dict(os.environ)

    def _add_mesh(self, mesh: Mesh, *, persistent: bool) -> None:
        """Add a mesh and make it current; `persistent`: it does not end with this notebook."""
        if persistent:
            mesh.session.disable_stop_at_exit()
            self._persistent_meshes.add(mesh.name)
        for name in [name for name, other in self.meshes.items() if other.session.ended is not None]:
            self._remove_mesh(self.meshes[name])
        background_output_of(mesh.session)
        self.meshes[mesh.name] = mesh
        self._reported_lost[mesh.name] = set(mesh.session.lost)
        self.use(mesh.name)

    def _remove_mesh(self, mesh: Mesh) -> None:
        self.meshes.pop(mesh.name, None)
        self._reported_lost.pop(mesh.name, None)
        self._persistent_meshes.discard(mesh.name)
        if self.mesh is not None and self.mesh.session is mesh.session:
            self.mesh = next(reversed(self.meshes.values()), None)
            self._handles.switch_mesh(self.mesh)

    def _get_mesh(self, name: str | None) -> Mesh:
        if name is None:
            if self.mesh is None:
                raise NotAttached("this notebook has no mesh; start one with %mesh start -n 4")
            return self.mesh
        if name not in self.meshes:
            own_names = ", ".join(self.meshes) or "none"
            raise MeshNameError(f"no mesh of this notebook is named {name!r}; its own: {own_names}")
        return self.meshes[name]

    def _only_other(self) -> str | None:
        """Return the name of the only mesh that is not this notebook's; None: there is not exactly one."""
        others = [found.name for found in keys.list_connections() if found.owner != self._owner]
        return others[0] if len(others) == 1 else None

    # ---- cells

    def run_cell(
        self,
        source: str,
        *,
        mesh: Mesh | None = None,
        ranks: str | Sequence[int] | None = None,
        setup: bool = False,
        background: bool = False,
    ) -> RankValues | MeshFuture[CellResult] | None:
        """Run source on ranks as the cell that this shell executes now: its number, its output, its names.

        Starts a mesh if there is none. Waits, unless in the background; Stop and input() work meanwhile.

        Args:
            mesh: None: the current one.
            ranks: a selection (`"0,2-3"`, `"dp=0"`) or ranks; None: all live ranks.
            setup: run it again on ranks that join later.
            background: return immediately; the output continues under this cell.

        Returns:
            The values of the last expression, None if there was none; in the background a future.

        Raises:
            CellError: it raised on ranks; if all ranks raised the same class, the error's class has that name.
            CellInterrupted, RankLost: as `Mesh.run`.
            MeshShapeError, NotAttached: nothing was run.
        """
        self.num_broadcast += 1
        try:
            return self._run_cell(source, mesh, ranks, setup, background)
        except MeshbookError as error:
            raise self._present_error(error) from None

    def _run_cell(
        self, source: str, mesh: Mesh | None, ranks: str | Sequence[int] | None, setup: bool, background: bool
    ) -> RankValues | MeshFuture[CellResult] | None:
        number = self.shell.displayhook.prompt_count  # since IPython 9, execution_count is already the next cell's
        source = self._fix_history(source)
        mesh = mesh or self._mesh_for_cell()
        session = mesh.session
        chosen = mesh.resolve_ranks(ranks)
        output = self._make_sink(chosen, number)
        self.show_notices()
        self._report_lost_ranks(session, output)
        label = f"cell {number}"
        for other in self._running_in_background(session, chosen):
            output.note(f"{label} waits for {other.label}, which runs in the background on {name_ranks(other.ranks)}")
        for abandoned in list(session.abandoned_calls.values()):
            if waits_for := sorted(set(abandoned.ranks) & set(chosen)):
                of = getattr(abandoned.command, "label", "") or "a call"
                ends = f"ends {'it' if len(waits_for) == 1 else 'them'}"
                output.note(
                    f"{label} waits for {name_ranks(waits_for)}, not back from {of} since that was stopped; "
                    f"Stop pressed twice, or %mesh kill {format_ranks(waits_for)}, {ends}"
                )
        command = session.cell_command(
            source,
            chosen,
            number=number,
            filename=self.shell.compile.get_code_name(source, source, number),
            label=label,
            allow_input=not background and self._allows_input(),
            setup=setup,
            background=background,
        )
        if background:
            return self._run_in_background(session, command, output)
        finished: messages.CallFinished | None = None
        try:
            finished = session.run_foreground(command, on_output=output, on_input=self._prompt_user)
            return self._finish_cell(session, command, finished)
        except CellInterrupted:
            if (stuck := session.abandoned_calls.get(command.call)) is not None:
                stuck.future.add_done_callback(lambda future: self._stuck_ranks_returned(session, command, future))
            raise
        except KeyboardInterrupt:
            # Stop arrives twice, as a message and as a signal; the second may arrive after the ranks have finished.
            if finished is None:
                raise
            return self._finish_cell(session, command, finished)
        finally:
            output.close()

    def _finish_cell(
        self, session: Session, command: messages.RunCell, finished: messages.CallFinished
    ) -> RankValues | None:
        self._handles.update(session, finished.outcomes)
        session.raise_for_status(finished, command.ranks, label=command.label)
        values = session.rank_values(finished.outcomes)
        # An object that displays itself has already done so on its rank.
        return values if values and any(values._repr_mimebundle_().values()) else None

    def _stuck_ranks_returned(
        self, session: Session, command: messages.RunCell, future: Future[messages.CallFinished]
    ) -> None:
        """Report that the last stuck rank returned from an interrupted cell, or exited."""
        with contextlib.suppress(MeshbookError):  # the mesh has ended
            finished = future.result()
            self._handles.update(session, finished.outcomes)
            if not finished.lost:
                self._notices.append(f"all ranks have come back from {command.label}, which was stopped")

    def _run_in_background(
        self, session: Session, command: messages.RunCell, output: OutputSink
    ) -> MeshFuture[CellResult]:
        console = Console(command.ranks, echo=False)

        def take(items: tuple[FoldedItem, ...]) -> None:
            console(items)
            output(items)

        source = session.request(command, on_output=take)

        def finish(finished: messages.CallFinished) -> CellResult:
            session.raise_for_status(finished, command.ranks, label=command.label)
            return session.cell_result(finished, console.text)

        future: MeshFuture[CellResult] = session.future(source, command, finish)
        cell = BackgroundCell(command.label, session, command.ranks, future)
        self._background_cells.append(cell)

        def ended(_: MeshFuture[CellResult]) -> None:
            self._background_cells.remove(cell)
            try:
                finished: messages.CallFinished = source.result()
            except MeshbookError as error:
                output.note(f"{command.label} ended: {error}")
                return
            self._handles.update(session, finished.outcomes)
            output.close()
            failure = future.exception()
            if failure is None:
                output.note(f"{command.label} is done after {finished.seconds:.1f} s")
            else:
                text = "\n".join(getattr(failure, "rendered", ()) or [f"{type(failure).__name__}: {failure}"])
                output((messages.Line(command.ranks, "stderr", text),))

        future.add_done_callback(ended)
        return future

    def bind_names(self, result: CellResult) -> None:
        """Create handles for the names that a result's cell bound on the ranks; remove those that it deleted."""
        if self.mesh is None:
            return
        outcome = messages.Outcome(status="ok", bound_names=result.bound, deleted_names=result.unbound)
        self._handles.update(self.mesh.session, (messages.OutcomeGroup(self.mesh.ranks, outcome),))

    def _mesh_for_cell(self) -> Mesh:
        """Return the current mesh; if there is none, start one and add a notice."""
        began = time.monotonic()
        try:
            self.reattach()
            if self.mesh is not None:
                return self.mesh
            mesh = self.start()
        except KeyboardInterrupt:
            raise CellInterrupted((), summary="stopped while the ranks were being started; none runs") from None
        info = mesh.session.info
        kind = f"{info.backend}, {info.ranks[0].device.partition(':')[0]}" if info.backend else info.ranks[0].device
        many = "1 rank" if len(mesh) == 1 else f"{len(mesh)} ranks"
        self._notices.append(f"started {many} in {time.monotonic() - began:.1f} s ({kind}); %mesh status tells more")
        return mesh

    def _fix_history(self, source: str) -> str:
        """Put the user's source into `In`; return the source padded to the cell's line numbers."""
        history = self.shell.history_manager
        if history is None or not history.input_hist_raw:
            return source
        cell = history.input_hist_raw[-1]
        if history.input_hist_parsed and transform.NOTEBOOK_EXPRESSION in history.input_hist_parsed[-1]:
            history.input_hist_parsed[-1] = cell
        return transform.pad_to_cell_lines(cell, source)

    def show_notices(self) -> None:
        """Show the notices since the previous cell, under the current cell."""
        notices, self._notices = self._notices, []
        for text in notices:
            self._show_note(text)

    def _report_lost_ranks(self, session: Session, output: OutputSink) -> None:
        known = self._reported_lost.setdefault(session.name, set())
        for rank in session.info.ranks:
            if rank.state == "dead" and rank.rank not in known:
                known.add(rank.rank)
                who = f"rank {rank.rank} (pid {rank.pid} on {rank.host})"
                output.note(f"{who} {rank.exit} while no cell ran; the others go on")

    def _running_in_background(self, session: Session, ranks: Ranks) -> list[BackgroundCell]:
        wanted = set(ranks)
        return [cell for cell in list(self._background_cells) if cell.session is session and wanted & set(cell.ranks)]

    # ---- output

    def _make_sink(self, ranks: Ranks, number: int) -> OutputSink:
        if self._kernel is None:
            return TerminalSink(ranks)
        while len(self._display_ids) > _MAX_DISPLAY_IDS:
            self._display_ids.popitem(last=False)
        publish = sink.jupyter_publisher(self._kernel)
        return sink.CellSink(
            publish,
            ranks,
            display_ids=self._display_ids,
            on_omitted=lambda shown: self._omitted_displays.add(number, shown),
        )

    def show_displays(self, ranks: str | Sequence[int] | None = None) -> None:
        """Show the omitted displays of these ranks, from the last cell with too many different displays.

        Raises:
            UsageError: nothing was omitted, or nothing of these ranks.
        """
        mesh = self._get_mesh(None)
        wanted = parse_selection(ranks, mesh.grid) if isinstance(ranks, str) else tuple(ranks or mesh.ranks)
        for number, shown in self._omitted_displays.for_ranks(wanted):
            self._show_note(f"{name_ranks(shown.ranks)}, cell {number}:")
            item = cast(Display, shown.item)
            self.shell.display_pub.publish(dict(item.data), dict(item.metadata))

    def _show_note(self, text: str) -> None:
        """Show a note under the current cell."""
        if self._kernel is None:
            print(text)
        else:
            sink.jupyter_publisher(self._kernel)("display_data", sink.note_content(text))

    def _pre_run_cell(self, info: Any) -> None:
        """Promote the handles that a local cell reads to remote tensors, before the cell runs."""
        # older IPythons lack the attribute
        source = getattr(info, "transformed_cell", None) or self._hook.last_rewritten
        self._handles.promote_to_tensors(transform.names_read(source))

    def _warn_bound_twice(self, name: str) -> None:
        self._show_note(
            f"{name} is bound here and on the ranks: in %%controller cells it stays the notebook's own, and "
            f'mesh["{name}"] is the ranks\'; after `del {name}` in a %%controller cell it is theirs here too'
        )

    # ---- input() requests

    def _allows_input(self) -> bool:
        if self._kernel is None:
            return sys.stdin is not None and sys.stdin.isatty()
        return bool(getattr(self._kernel, "_allow_stdin", True))

    def _prompt_user(self, request: messages.InputRequest) -> str | None:
        if self._kernel is None:
            return prompt_on_terminal(request)
        prompt = f"[rank {request.rank}] {request.prompt}"
        try:
            reply = self._kernel.getpass(prompt) if request.password else self._kernel.raw_input(prompt)
        except StdinNotImplementedError:
            return None
        return str(reply)

    # ---- failures

    def _present_error(self, error: MeshbookError) -> MeshbookError:
        """Return the error as the notebook shows it: with the class name that was raised and with next-step hints."""
        if isinstance(error, RankLost):
            for mesh in self.meshes.values():
                if set(error.ranks) <= set(mesh.session.lost):
                    self._reported_lost.setdefault(mesh.name, set()).update(error.ranks)
        if isinstance(error, CellError):
            error = hints.with_raised_class_name(error)
            error.rendered = (*error.rendered, *hints.next_step_hints(error, self._handles.is_user_bound))
        if isinstance(error, CellError | RankLost):
            self._last_failure = error
        else:
            hints.hide_traceback(error)
        return error

    def _explain_missing_name(
        self,
        shell: InteractiveShell,
        kind: type[BaseException],
        error: BaseException,
        tb: Any,
        tb_offset: int | None = None,
    ) -> None:
        """Add a note to a NameError whose name exists on the ranks."""
        name = getattr(error, "name", None)
        if self.mesh is not None and name in PRESET_MODULES:
            error.add_note(
                f"`{name}` is there on the ranks. Import it to use it in this process, or leave out %%controller to "
                "run the cell on the ranks."
            )
        shell.showtraceback((kind, error, tb), tb_offset=tb_offset)

    def show_failure(self, magic: str, how: str = "") -> Any:
        """Run `%tb` or `%debug` for the last failure shown, on the ranks that had it.

        Args:
            how: the magic's argument, such as `Verbose`.
        """
        error = self._last_failure
        if error is None or self.mesh is None or getattr(sys, "last_value", None) is not error:
            return self.shell.run_line_magic(magic, how)
        found: Sequence[Failure] = error.failures  # type: ignore[union-attr]  # it is `error`, compared above
        ranks = [rank for failure in found for rank in failure.ranks]
        living = self.mesh.session.living(tuple(sorted(set(ranks) & set(self.mesh.ranks))))
        if not living:
            self.shell.showtraceback()
            return None
        if magic == "debug" or how:
            return self.run_cell(f"%{magic} {how}".strip(), ranks=living)
        self.shell.showtraceback()
        one = living[0]
        self._show_note(
            f"%tb Verbose shows the variables of each frame; %%mesh --ranks {one} runs code on rank {one}, where "
            "sys.last_value is the exception"
        )
        return None

    # ---- completion and inspection

    def complete(self, local: dict[str, Any], code: str, cursor: int) -> dict[str, Any]:
        """Return a `complete_reply`'s content: this process's matches, and a rank's if it replies in time."""
        if code.lstrip().startswith(("%mesh", "%%mesh")) and "\n" not in code[:cursor]:
            return local
        remote = self._query_rank(
            completion.root_name(code, cursor), lambda call, ranks: messages.Complete(call, ranks, code, cursor)
        )
        return completion.merge_completions(local, remote, code, remote_first=transform.is_for_ranks(code))

    def hidden_handles(self) -> contextlib.AbstractContextManager[None]:
        """Hide the handles from the shell's own completer during this block, so that it sends no queries to ranks."""
        return completion.completer_namespace(self.shell.Completer, self._handles.without_handles())

    def inspect(self, code: str, cursor: int, detail: int = 0) -> dict[str, Any] | None:
        """Return a rank's inspection of the name at the cursor, as a MIME bundle; None: not found or no reply."""
        root = completion.root_name(code, cursor)
        reply = self._query_rank(root, lambda call, ranks: messages.Inspect(call, ranks, code, cursor, detail))
        if not reply or not reply["found"]:
            return None
        data: dict[str, Any] = reply["data"]
        return data

    def is_handle(self, name: str | None) -> bool:
        """Whether this name is a handle here, so that inspecting it would query the ranks."""
        return name is not None and self._handles.get_handle(name) is not None

    def show_help(self, name: str, detail: int = 0) -> None:
        """Show the help for `x?` and `x??`: a rank's reply, else this process's."""
        self.reattach()
        found = self.inspect(name, len(name), detail)
        if found is None and not self.is_handle(completion.root_name(name, len(name))):
            with contextlib.suppress(KeyError):
                found = self.shell.object_inspect_mime(name, detail_level=detail)  # type: ignore[no-untyped-call]
        if found is None:
            print(f"Object `{name}` not found.")
        else:
            page.page(found)

    def _query_rank(self, name: str | None, make_command: Callable[[CallId, Ranks], Any]) -> dict[str, Any] | None:
        """Send a query to one rank, one that has the name if it is a handle, and return the reply."""
        mesh = self.mesh
        if mesh is None or mesh.session.ended is not None:
            return None
        handle = self._handles.get_handle(name) if name is not None else None
        living = mesh.session.living(handle._meshbook_ranks if handle is not None else mesh.ranks)
        if not living:
            return None
        try:
            parts = mesh.session.query(
                make_command(mesh.session.connection.next_call_id(), living[:1]), QUERY_TIMEOUT_S
            )
        except MeshbookError:
            return None
        return next((part.outcome.reply for part in parts if part.outcome.reply), None)


# ---------------------------------------------------------------------------------------------------------------------


def _resolve_axes(ranks: int | None, axes: str | Mapping[str, int] | None, default: Callable[[], int]) -> MeshAxes:
    if axes is None:
        return MeshAxes.of(default() if ranks is None else ranks)
    grid = parse_axes(axes) if isinstance(axes, str) else MeshAxes.of(axes)
    if ranks is not None:
        grid.require(ranks)
    return grid


def _lenient_defaults() -> Defaults:
    """Return the defaults, without raising on an invalid file: starting a mesh reports that error."""
    try:
        return read_defaults()
    except UsageError:
        return Defaults()


def _with_environment(spec: messages.MeshSpec, inherited: Mapping[str, str]) -> messages.MeshSpec:
    """Return the spec with the environment variables set in this process since the supervisor was launched."""
    changed = {name: value for name, value in os.environ.items() if inherited.get(name) != value}
    return msgspec.structs.replace(spec, env={**changed, **spec.env}) if changed else spec


def _reattach_notices(session: Session, origin: str) -> list[str]:
    """Return the notices for a reattached mesh: first the reattachment, then the calls that still run there."""
    assert session.axes is not None
    living = session.living(session.axes.ranks)
    names_held = format_names(session.info.names)
    lines = [
        f"back on mesh {session.name}: {name_ranks(living)} kept what they hold{names_held}; "
        "%mesh restart gives fresh ranks"
    ]
    for call in session.connection.welcome.open_calls:
        lines.append(
            f"{call.label or 'a cell'} {origin} still runs on {name_ranks(call.ranks)}, for {call.seconds:.0f} s now; "
            "%mesh interrupt stops it"
        )
    return lines


def format_names(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:_MAX_NAMES_LISTED])
    return f" ({shown}{f' and {len(names) - _MAX_NAMES_LISTED} more' if len(names) > _MAX_NAMES_LISTED else ''})"
