"""Runs complete marimo cells on the ranks: those whose first line is `# mesh`.

marimo finds this class by its internal entry point `marimo.cell.executor`, and then runs every cell of every notebook
in the environment through it. So a cell without the marker is passed unchanged to marimo's own executor. Names that a
marked cell binds become handles in the notebook, so marimo's dependency graph stays correct.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from marimo._runtime.exceptions import MarimoRuntimeException
from marimo._runtime.executor import DefaultExecutor

from meshbook.controller.console import Console
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.results import CellResult
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, MeshbookError, MeshNameError
from meshbook.marimo import meshes, page
from meshbook.wire import messages

MARKER = re.compile(r"#\s*mesh\s*")
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_LABEL = "the cell"


class MeshExecutor:
    """Runs a notebook's cells, in the notebook's process or on its mesh.

    marimo creates one instance; if its internals have changed, that fails and marimo runs every cell itself.
    """

    name = "meshbook"

    def __init__(self) -> None:
        self._default_executor = DefaultExecutor()

    def execute_cell(self, cell: Any, glbls: dict[str, Any]) -> Any:
        """Run a cell and return its value; called by marimo. Blocks; the Stop button reaches the ranks."""
        if not is_marked(cell.code):
            return self._default_executor.execute_cell(cell, glbls)
        try:
            mesh = _mesh_for_cell(cell, glbls)
            return _bind_names(cell, glbls, mesh, mesh.run(cell.code))
        except BaseException as error:
            _raise_for_marimo(error, glbls)

    async def execute_cell_async(self, cell: Any, glbls: dict[str, Any]) -> Any:
        """Run a cell on marimo's event loop.

        A cell with `await` must not block that loop: marimo stops such a cell by cancelling its task, any other by
        raising KeyboardInterrupt in it.
        """
        if not is_marked(cell.code):
            return await self._default_executor.execute_cell_async(cell, glbls)
        if not cell.is_coroutine():
            return self.execute_cell(cell, glbls)
        try:
            mesh = _mesh_for_cell(cell, glbls)
            return _bind_names(cell, glbls, mesh, await _run_async(mesh, cell.code))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _raise_for_marimo(error, glbls)


def is_marked(code: str) -> bool:
    """Whether a cell's first line is `# mesh`."""
    return MARKER.fullmatch(code.lstrip().partition("\n")[0].rstrip()) is not None


async def _run_async(mesh: Mesh, source: str) -> CellResult:
    """Run source as `mesh.run` does, in a coroutine.

    The cell's own task prints the output, so that marimo attributes it to the cell.
    """
    session, chosen_at = mesh.session, mesh.session.info.num_rank_changes
    ranks = mesh.resolve_ranks(None)
    console = Console(ranks, echo=True)
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[messages.FoldedItem, ...] | None] = asyncio.Queue()
    command = session.cell_command(source, ranks, chosen_at=chosen_at, label=_LABEL)
    future = session.request(command, on_output=lambda items: loop.call_soon_threadsafe(inbox.put_nowait, items))
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(inbox.put_nowait, None))
    cancelled = False
    while True:
        try:
            items = await inbox.get()
        except asyncio.CancelledError:
            cancelled = True
            session.interrupt(ranks, target=command.call)
            continue  # until the ranks have returned
        if items is None:
            break
        console(items)
    if cancelled:
        raise asyncio.CancelledError
    return session.cell_result(command, future.result(), console.text)


def _mesh_for_cell(cell: Any, glbls: Mapping[str, Any]) -> Mesh:
    """Return the mesh that the cell names, or whose handles it uses; else the notebook's latest; else a new one."""
    for name in sorted(cell.refs):
        value = glbls.get(name)
        if isinstance(value, Mesh):
            return value
        if isinstance(value, RemoteValue):
            session = value._meshbook_session
            if session.axes is not None and session.ended is None:  # a handle may belong to an ended mesh
                return Mesh.of(session, session.axes)
    running = page.running_cell()
    latest_session = meshes.latest_session(running.owner) if running is not None else None
    return (
        Mesh.of(latest_session, latest_session.axes)
        if latest_session is not None and latest_session.axes is not None
        else create_mesh()
    )


def _bind_names(cell: Any, glbls: dict[str, Any], mesh: Mesh, result: CellResult) -> Any:
    """Bind the names that marimo lists as the cell's definitions; return the value that the cell shows."""
    for name in sorted(cell.defs):
        try:
            glbls[name] = mesh[name]
        except MeshNameError:
            glbls.pop(name, None)  # bound in a branch that no rank took
    if not len(result.values):
        return None
    # marimo replaces a cell's displays by its value; if there are displays, append the value below them instead.
    if page.has_output() and page.append_output(result.values._mime_(), None):
        return None
    return result.values


def _raise_for_marimo(error: BaseException, glbls: Mapping[str, Any]) -> NoReturn:
    """Raise an error in the form that marimo expects for a cell's own errors."""
    if isinstance(error, MeshbookError):
        error.__traceback__ = None  # no frame is the user's; the ranks' tracebacks are in its notes
    if isinstance(error, CellError):
        running = page.running_cell()
        if running is not None and running.mode != "script":
            # marimo runs an error's notes together in one paragraph; of what is printed it keeps the lines
            print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            error.__notes__ = []
        for failure in error.failures:
            found = _UNDEFINED.search(failure.evalue) if failure.ename == "NameError" else None
            if found is not None and found[1] in glbls and not isinstance(glbls[found[1]], RemoteValue):
                name = found[1]
                error.add_note(f"`{name}` lives in the notebook, not on the ranks; mesh.push({name}={name}) copies it")
    raise MarimoRuntimeException from error
