"""The dashboard as a web page, and the side channel through which a widget's buttons reach a busy kernel.

Loopback only. The address with its token gives control of the mesh; a request without the token is refused. So are Host
names other than this machine's loopback names (a foreign name that resolves to this machine would carry the browser's
trust), and sockets opened by pages of other origins.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
from concurrent.futures import Future
from typing import Any

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach
from meshbook.dashboard import assets
from meshbook.dashboard.hub import DashboardClient, DashboardHub
from meshbook.errors import MeshbookError, NotAttached, UsageError

log = logging.getLogger("meshbook.dashboard")

_ALLOWED_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_START_TIMEOUT_S = 10.0
_MAX_REQUEST_BYTES = 1 << 20
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cache-Control": "no-store",
}


class DashboardServer:
    """Serves one mesh from its own thread, until `close()`.

    Attributes:
        address: the URL for a browser, with the token.
    """

    def __init__(
        self,
        hub: DashboardHub,
        mesh: Mesh,
        *,
        port: int | None = None,
        side_channel_client: DashboardClient | None = None,
    ) -> None:
        """Bind the port and start serving.

        Args:
            port: None: any free port.
            side_channel_client: serve only requests on behalf of this client, whose messages take another path; no
                pages.

        Raises:
            UsageError: the port is taken.
        """
        self._hub, self._mesh, self._side_channel_client = hub, mesh, side_channel_client
        self.token = secrets.token_urlsafe(24)
        try:
            self._listening_sockets = bind_sockets(port or 0, address="127.0.0.1", family=socket.AF_INET)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be listened on: {error.strerror}; choose another with --port"
            ) from error
        self.port: int = self._listening_sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/{self.token}/"
        self._loop: IOLoop | None = None
        self._open_sockets: set[_SocketHandler] = set()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="meshbook-page", daemon=True)
        self._thread.start()
        ready.result(_START_TIMEOUT_S)

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)  # the constructor waits for it

    async def _serve(self, ready: Future[None]) -> None:
        self._loop = IOLoop.current()
        self._closing = asyncio.Event()
        application = web.Application(
            [
                (r"/(?P<token>[^/]*)/live", _SocketHandler, {"server": self}),
                (r"/(?P<token>[^/]*)/?(?P<name>.*)", _AssetHandler, {"server": self}),
            ],
            websocket_ping_interval=20,
            websocket_max_message_size=_MAX_REQUEST_BYTES,
            log_function=lambda _handler: None,  # addresses contain the token
        )
        http = HTTPServer(application, max_buffer_size=_MAX_REQUEST_BYTES)
        http.add_sockets(self._listening_sockets)
        ready.set_result(None)
        await self._closing.wait()
        http.stop()
        for handler in tuple(self._open_sockets):
            handler.close()
        await http.close_all_connections()

    def close(self) -> None:
        """Stop serving. Waits until the port is free."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.add_callback(self._closing.set)
            self._thread.join(_START_TIMEOUT_S)

    def wait(self) -> None:
        """Wait until it is closed, the mesh has ended, or Ctrl-C."""
        while self._thread.is_alive() and self._mesh.session.ended is None:
            self._thread.join(1.0)
        self._thread.join(1.0)  # pages receive the end of the mesh meanwhile

    def is_authorized(self, request: Any, token: str) -> bool:
        host = request.headers.get("Host", "").removesuffix(f":{self.port}")
        return host in _ALLOWED_HOSTS and hmac.compare_digest(token.encode(), self.token.encode())


class _AssetHandler(web.RequestHandler):
    """Serves the page and its modules."""

    def initialize(self, server: DashboardServer) -> None:
        self._server = server

    def set_default_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.set_header(name, value)
        self.clear_header("DashboardServer")

    def prepare(self) -> None:
        if not self._server.is_authorized(self.request, self.path_kwargs.get("token") or ""):
            self.set_status(403)
            self.finish("This needs the whole address that `meshbook top --web` printed, token and all.")

    def get(self, token: str, name: str) -> None:
        name = name or "page.html"
        if self._server._side_channel_client is not None or name not in assets.asset_names():
            self.set_status(404)
            self.finish("There is nothing here.")
            return
        if not self.request.path.startswith(f"/{token}/"):
            self.redirect(f"/{token}/")
            return
        self.set_header("Content-Type", f"{assets.CONTENT_TYPES[name[name.rindex('.') :]]}; charset=utf-8")
        self.finish(assets.read_asset(name))


class _SocketHandler(WebSocketHandler):
    """One page's socket: a client of its own, or the side channel of a widget's client."""

    def initialize(self, server: DashboardServer) -> None:
        self._server = server
        self._client: DashboardClient | None = None
        self._closed = False
        self._unsent_bytes = 0

    def prepare(self) -> None:
        if not self._server.is_authorized(self.request, self.path_kwargs.get("token") or ""):
            self.set_status(403)
            self.finish()

    def check_origin(self, origin: str) -> bool:
        # A side channel is opened by a notebook's page, whose origin is the notebook's server; it has the token.
        return self._server._side_channel_client is not None or super().check_origin(origin)

    def open(self, token: str) -> None:
        self._server._open_sockets.add(self)
        self._loop = IOLoop.current()
        if self._server._side_channel_client is None:
            self._client = DashboardClient(self._server._mesh, self._send_message)
            # add_client waits for the first snapshot, which must not block the event loop.
            self._loop.run_in_executor(None, self._add_client, self._client)

    def _add_client(self, client: DashboardClient) -> None:
        try:
            self._server._hub.add_client(client)
        except NotAttached as error:
            with contextlib.suppress(ConnectionError, RuntimeError):  # the page was closed, or the server
                self._send_message({"kind": "gone", "reason": str(error)})
        except MeshbookError as error:
            log.warning("a page could not be shown the mesh, and will ask again: %s", error)
            with contextlib.suppress(RuntimeError):
                self._loop.add_callback(self.close)

    def on_message(self, message: str | bytes) -> None:
        try:
            payload = json.loads(message)
        except ValueError:
            return
        if self._server._side_channel_client is not None:
            self._server._hub.on_request(self._server._side_channel_client, payload)
            if isinstance(payload, dict):
                self._send_message({"kind": "heard", "id": payload.get("id")})
        elif self._client is not None:
            self._server._hub.on_request(self._client, payload)

    def on_close(self) -> None:
        self._closed = True
        self._server._open_sockets.discard(self)
        if self._client is not None:
            self._loop.run_in_executor(None, self._server._hub.remove_client, self._client)

    def _send_message(self, message: dict[str, Any]) -> None:
        """Send a message. Any thread."""
        if self._closed:
            raise ConnectionError("the page was closed")
        text = json.dumps(message, separators=(",", ":"))
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self._loop.add_callback(self.close)
            raise ConnectionError("the page does not read")
        self._unsent_bytes += len(text)
        self._loop.add_callback(self._write, text)

    async def _write(self, text: str) -> None:
        try:
            await self.write_message(text)
        except WebSocketClosedError:
            self._closed = True
        finally:
            self._unsent_bytes -= len(text)


# Maximum unsent bytes for a page that reads slowly. A suspended page is disconnected, and reconnects when it resumes.
_MAX_UNSENT_BYTES = 8 << 20


class SideChannel:
    """A WebSocket for a widget's page that bypasses its kernel, whose main thread is busy."""

    def __init__(self, hub: DashboardHub, client: DashboardClient) -> None:
        self._server = DashboardServer(hub, client.mesh, side_channel_client=client)
        self.address = f"ws://127.0.0.1:{self._server.port}/{self._server.token}/live"

    def close(self) -> None:
        self._server.close()


def start_server(mesh: Mesh, port: int | None = None) -> DashboardServer:
    """Serve a mesh's dashboard as a page; `address` is its URL, with the token."""
    return DashboardServer(DashboardHub.of(mesh.session), mesh, port=port)


def serve(mesh_or_name: str | Mesh | None, port: int | None = None) -> None:
    """Run `meshbook top --web`: print the address and serve until Ctrl-C, or until the mesh has ended.

    Args:
        mesh_or_name: a mesh, or the name of one; None: the only one.

    Raises:
        NotAttached, MeshNameError: as `meshbook.attach`.
        UsageError: the port is taken.
    """
    owns_mesh = not isinstance(mesh_or_name, Mesh)
    mesh = mesh_or_name if isinstance(mesh_or_name, Mesh) else attach(mesh_or_name, kind="cli", observer=True)
    server = start_server(mesh, port)
    print(f"{mesh.name}: {server.address}\nWhoever has this address may steer the mesh. Ctrl-C ends it.", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
        if owns_mesh:
            mesh.session.close()
