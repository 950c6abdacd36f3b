"""One notebook: a shell, its meshes, and what Meshbook adds to the shell.

The kernel, the magics and the rewritten cells all begin here. It depends on IPython's shell, in a kernel or in a
terminal; `transform` decides what runs where.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from meshbook.actors.runtime.faults import with_source
from meshbook.controller.mesh import Mesh
from meshbook.diagnose.source_files import is_user_file
from meshbook.errors import CellError, RankLost
from meshbook.kernel import transform
from meshbook.kernel.cells import CellRunner
from meshbook.kernel.front_end import FrontEnd, JupyterFrontEnd, TerminalFrontEnd
from meshbook.kernel.handles import PRESET_MODULES, HandleNamespace
from meshbook.kernel.hook import CellHook
from meshbook.kernel.meshes import NotebookMeshes
from meshbook.kernel.queries import RankQueries
from meshbook.rank.cells.tracebacks import strip_meshbook_frames


class Notebook:
    """What Meshbook adds to one shell. `Notebook.of(shell)` returns a shell's notebook.

    Attributes:
        shell: IPython's shell, of any kind.
        auto: whether a cell without a magic runs on the ranks.
        front_end: what the user sees.
        meshes: this notebook's meshes, by name.
        cells: runs cells on them.
        queries: completion and help from ranks.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.auto = False
        kernel = getattr(shell, "kernel", None)
        self.front_end: FrontEnd = TerminalFrontEnd() if kernel is None else JupyterFrontEnd(kernel, shell.display_pub)
        self._handles = HandleNamespace(
            cast("dict[str, Any]", shell.user_ns), cast("dict[str, Any]", shell.user_ns_hidden), self._warn_bound_twice
        )
        self.meshes = NotebookMeshes(
            self.front_end.kind,
            on_switch=self._mesh_switched,
            on_notice=self.front_end.add_notice,
            on_orphan=lambda session, call: self.cells.follow(session, call),
        )
        self.cells = CellRunner(shell, self.front_end, self._handles, self.meshes)
        self.queries = RankQueries(shell, self._handles, self.meshes)
        # Rewritten cells call these (`transform.NOTEBOOK_EXPRESSION`).
        self.run_cell, self.show_failure = self.cells.run, self.cells.show_failure
        self.show_help = self.queries.show_help
        self._hook = CellHook(shell, lambda: self.auto)
        self._hook.install()
        shell.ast_transformers.append(transform.ShowMeshMagics())
        shell.events.register("pre_run_cell", self._pre_run_cell)
        shell.events.register("post_run_cell", self._post_run_cell)
        self._get_exc_info: Callable[[Any], Any] = shell._get_exc_info
        shell._get_exc_info = self._exc_info_for_user  # type: ignore[method-assign]  # of `%%time` and `%tb` too

    @classmethod
    def of(cls, shell: InteractiveShell) -> Notebook:
        """Return the notebook of this shell, creating it on the first call."""
        found = getattr(shell, "meshbook", None)
        if not isinstance(found, Notebook):
            found = cls(shell)
            shell.meshbook = found  # type: ignore[attr-defined]  # where rewritten cells find it
        return found

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that cells run on."""
        return self.meshes.current

    def run_shown(self, magic: str, arguments: str) -> None:
        """Run a line magic and display its value, for `transform.ShowMeshMagics`."""
        user_frame = 2  # whose names `%mesh pull $name` may take
        value = self.shell.run_line_magic(magic, arguments, _stack_depth=user_frame)
        if value is not None:
            display(value)  # type: ignore[no-untyped-call]

    def run_setting(self, magic: str, arguments: str) -> None:
        """Run a line magic that sets something in the shell, in this process. The ranks run it too, and print."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                self.shell.run_line_magic(magic, arguments)
        except Exception as error:
            line = f"%{magic} {arguments}".rstrip()
            self.front_end.show_note(f"{line} failed in the notebook's own process: {type(error).__name__}: {error}")

    def stop(self, name: str | None = None, *, now: bool = False) -> None:
        """Stop a mesh and everything on it. Waits until it has exited.

        Args:
            name: None: the current one.
            now: do not wait for cells that run in the background.
        """
        mesh = self.meshes.get_mesh(name)
        if not now:
            for cell in self.cells.running_in_background(mesh.session, mesh.ranks):
                if cell.is_followed:
                    continue  # nobody here asked for it
                self.front_end.show_note(
                    f"waiting for {cell.label}, which runs in the background; %mesh stop --now does not"
                )
                cell.future.exception()
        self.meshes.stop(mesh.name)

    def _mesh_switched(self, mesh: Mesh | None) -> None:
        if mesh is not None:
            self.cells.mesh_added(mesh)
        self._handles.switch_mesh(mesh)

    def _pre_run_cell(self, info: Any) -> None:
        """Promote the handles that a local cell reads to remote tensors, before the cell runs."""
        # older IPythons lack the attribute
        source = getattr(info, "transformed_cell", None) or self._hook.last_rewritten
        self._handles.promote_to_tensors(transform.names_read(source))

    def _post_run_cell(self, result: Any) -> None:
        """Bind `mesh` and the handles again after `%reset`; update live actors whose class the cell redefined."""
        if self.mesh is not None:
            if "mesh" not in self.shell.user_ns:
                self._handles.switch_mesh(self.mesh)
            if self.auto and transform.installs(getattr(result.info, "raw_cell", None) or ""):
                self.front_end.show_note("ranks keep what they have imported; %mesh restart gives fresh ones")
        if "meshbook.actors.procs" not in sys.modules:
            return  # no actor was spawned from this process; avoids the import
        from meshbook.actors.redefine import redefine_from

        for message in redefine_from(self.shell.user_ns):
            print(message)

    def _warn_bound_twice(self, name: str) -> None:
        self.front_end.show_note(
            f"{name} is bound here and on the ranks: in %%controller cells it stays the notebook's own, and "
            f'mesh["{name}"] is the ranks\'; after `del {name}` in a %%controller cell it is theirs here too'
        )

    def _exc_info_for_user(self, exc_tuple: Any = None) -> Any:
        """Return the exception that the shell shows: without Meshbook's frames, a NameError with its advice."""
        kind, error, tb = self._get_exc_info(exc_tuple)
        strip_meshbook_frames(error)
        if isinstance(error, CellError | RankLost) and tb is not error.__traceback__ and not _is_from_kernel(tb):
            lines, of_ranks = _lines_of_user(error), error._render_traceback_()
            error._render_traceback_ = lambda: [*lines, *of_ranks]  # type: ignore[method-assign]
        sys.last_traceback = error.__traceback__
        note = self._advice_for(error.name) if isinstance(error, NameError) and error.name else ""
        if note and note not in getattr(error, "__notes__", ()):  # `%tb` shows it again
            error.add_note(note)
        return kind, error, error.__traceback__

    def _advice_for(self, name: str) -> str:
        """Return where a name is that is not defined in this process; "" if it is not on the ranks either."""
        if self.mesh is None and name == "mesh":
            return "there is no mesh yet: %mesh start starts one, and a cell for the ranks does"
        if self.mesh is not None and name in PRESET_MODULES:
            return (
                f"`{name}` is there on the ranks. Import it to use it in this process, or leave out %%controller to "
                "run the cell on the ranks."
            )
        others = [mesh for mesh in self.meshes.values() if mesh is not self.mesh]
        having = [mesh.name for mesh in others if self._handles.is_on_ranks(mesh.session, name)]
        return f"`{name}` is a name on the ranks of {having[0]}: %mesh use {having[0]}" if having else ""


def _is_from_kernel(tb: TracebackType | None) -> bool:
    """Whether a cell for the ranks or a magic has raised an exception."""
    frames = (frame for frame, _ in traceback.walk_tb(tb))
    return any(str(frame.f_globals.get("__name__")).startswith("meshbook.kernel.") for frame in frames)


def _lines_of_user(error: BaseException) -> list[str]:
    """Return the user's lines in this process that have led to an exception, outermost first."""
    found = [entry for entry in traceback.extract_tb(error.__traceback__) if is_user_file(entry.filename)]
    return with_source("".join(traceback.format_list(found))).split("\n")
