"""The dashboard as a widget: JupyterLab, Notebook, VS Code, marimo.

Python holds the state and pushes it; the page draws it. Custom messages only: widget state would be saved with the
notebook, and in marimo it would run cells. Pushing does not need the kernel's main thread. The page's requests would
wait behind a running cell, so they are routed to a subshell of the kernel if it supports subshells; otherwise
(ipykernel 6, marimo) they use a side channel of this process (`web_server.SideChannel`), if the page can reach it.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future
from typing import Any

import anywidget

from meshbook.controller.mesh import Mesh
from meshbook.dashboard import assets
from meshbook.dashboard.hub import DashboardClient, DashboardHub
from meshbook.dashboard.web_server import SideChannel
from meshbook.errors import MeshbookError
from meshbook.marimo import page

log = logging.getLogger("meshbook.dashboard")

_SUBSHELL_TIMEOUT_S = 5.0


class Dashboard(anywidget.AnyWidget):
    """A live view of a mesh. `close()` ends it; so does the end of the session."""

    _esm = assets.bundle("anywidget.js")
    _css = assets.read_asset("dashboard.css")

    def __init__(self, mesh: Mesh) -> None:
        """Show a mesh. Waits a few milliseconds for the first snapshot.

        Raises:
            NotAttached: the mesh has ended.
        """
        mesh.session.check_attached()
        super().__init__()
        self._client = DashboardClient(mesh, self._send_message, resends=True)
        self._hub = DashboardHub.of(mesh.session)
        self._side_channel: SideChannel | None = None
        self._reader = page.reader()
        self._hub.add_client(self._client)
        self.on_msg(self._on_request)
        if not _route_to_subshell(self.comm):
            self._side_channel = SideChannel(self._hub, self._client)

    @property
    def is_open(self) -> bool:
        """Whether a page can still be reached: marimo closes a widget's comm when its cell runs again."""
        if self._reader is not None and not self._reader.is_alive():
            return False
        return self.comm is not None and not getattr(self.comm, "_closed", False)

    def close(self) -> None:
        """Close the widget; closing a session's last client ends the subscription. Idempotent."""
        self._hub.remove_client(self._client)
        self._close_side_channel()
        super().close()

    def _close_side_channel(self) -> None:
        side_channel, self._side_channel = self._side_channel, None
        if side_channel is not None:
            side_channel.close()

    def _send_message(self, message: dict[str, Any]) -> None:
        if not self.is_open:
            self._close_side_channel()
            raise ConnectionError("the widget was closed")
        if self._side_channel is not None and message["kind"] == "layout":
            message = {**message, "door": self._side_channel.address}
        self.send(message)
        if message["kind"] == "gone":
            self._close_side_channel()

    def _on_request(self, _widget: Any, content: Any, _buffers: Any) -> None:
        self._hub.on_request(self._client, content)

    def __repr__(self) -> str:
        name = self._client.mesh.name
        return f"The dashboard of mesh {name} needs a page; in a terminal: meshbook top {name} [--web]"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the live view; for readers of the saved notebook, and on GitHub, what ranks did when it was shown."""
        live = super()._repr_mimebundle_(**options)
        data = live[0] if isinstance(live, tuple) else live
        if data is not None:
            with contextlib.suppress(MeshbookError):  # it has ended, or does not answer
                data["text/html"] = self._client.mesh.health()._repr_html_()
        return live


def dashboard(mesh: Mesh) -> Dashboard:
    """Return the widget of this mesh, or of this slice, on this page; the same one while it is open."""
    widgets: dict[Any, Dashboard] = mesh.session.extras.setdefault("dashboard widgets", {})
    for key, widget in list(widgets.items()):
        if not widget.is_open:
            widget.close()
            widgets.pop(key, None)
    key = page.reader(), tuple(mesh.ranks), tuple(mesh.axes.items())
    if key not in widgets:
        widgets[key] = Dashboard(mesh)
    return widgets[key]


def _route_to_subshell(comm: Any) -> bool:
    """Route this comm's messages to a subshell, beside running cells; return whether that succeeded.

    ipykernel 7.4 sends a message to the subshell that sent last on its comm, which is the main one for a comm that a
    cell opened. All of it is private to ipykernel and checked first; if it differs, messages wait.
    """
    kernel = getattr(comm, "kernel", None)
    if kernel is None:
        with contextlib.suppress(ImportError, AttributeError):
            from ipykernel.kernelbase import Kernel

            kernel = Kernel.instance() if Kernel.initialized() else None
    if kernel is None or not hasattr(comm, "_reply_subshell_for"):
        return False
    try:
        subshell = _get_subshell(kernel)
    except Exception as error:
        log.info("the dashboard's buttons will wait for running cells: %r", error)
        return False
    comm._reply_subshell_for = lambda _data, _default: subshell
    return True


def _get_subshell(kernel: Any) -> str:
    """Return a subshell of the kernel: the Meshbook kernel's, or one that all dashboards share."""
    quick = getattr(kernel, "quick_subshell", None)
    known: str | None = getattr(kernel, "_meshbook_subshell", None)
    if known is None:
        created: Future[str] = Future()
        thread = kernel.shell_channel_thread

        def create() -> None:
            try:
                created.set_result(quick() if quick is not None else thread.manager._create_subshell())
            except Exception as error:
                created.set_exception(error)

        thread.io_loop.add_callback(create)
        known = created.result(_SUBSHELL_TIMEOUT_S)
        kernel._meshbook_subshell = known
    return known
