"""`meshbook serve`: the operations over HTTP, until Ctrl-C."""

from __future__ import annotations

import ipaddress
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from meshbook.errors import UsageError
from meshbook.gateway.connections import MeshConnections
from meshbook.gateway.http_app import HttpApi
from meshbook.gateway.tokens import Tokens

# Seconds that answers in flight may take when the server ends.
_GRACE_S = 3


class _Server(uvicorn.Server):
    """Ends streams as soon as it is to end."""

    def __init__(self, config: uvicorn.Config, api: HttpApi, connections: MeshConnections) -> None:
        super().__init__(config)
        self._api, self._connections = api, connections

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._api.closing.set()
        self._connections.closing.set()
        super().handle_exit(sig, frame)


def serve(host: str, port: int, *, certfile: Path | None = None, keyfile: Path | None = None) -> None:
    """Print the addresses with their tokens, and serve until Ctrl-C. Blocks.

    Args:
        port: 0: any that is free.
        certfile, keyfile: of TLS.

    Raises:
        UsageError: the address cannot be listened on, or the certificate cannot be read.
        StartError: the tokens cannot be written.
    """
    if keyfile is not None and certfile is None:
        raise UsageError("--keyfile is the key of a certificate; add --certfile")
    for file in filter(None, (certfile, keyfile)):
        if not file.is_file():
            raise UsageError(f"there is no file {file}")
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if certfile else 'http'}://{shown}:{port}"
    connections = MeshConnections()
    try:
        with listener, Tokens(url, port) as tokens:
            api = HttpApi(connections, tokens)
            config = uvicorn.Config(
                api.application(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
            )
            try:
                config.load()
            except OSError as error:  # ssl.SSLError is one
                raise UsageError(f"{certfile} is no certificate that can be served: {error}") from None
            _print_addresses(url, tokens)
            if certfile is None and not _is_loopback(host):
                print(
                    f"meshbook: {host} is not this machine's own address, and without TLS whoever is on the way reads "
                    "the tokens, which allow to run code here; add --certfile, or listen on 127.0.0.1 behind a proxy "
                    "or ssh",
                    file=sys.stderr,
                )
            _Server(config, api, connections).run(sockets=[listener])
    finally:
        connections.close()


def _print_addresses(url: str, tokens: Tokens) -> None:
    lines = [f"  {scope:<7} {url}/#token={token}" for scope, token in tokens.by_scope.items()]
    print(
        "\n".join(
            [
                f"Meshbook serves {url} (docs/http.md). Open one of these, or send the header",
                "Authorization: Bearer TOKEN with its token:",
                *lines,
                "Whoever has the run or the manage token may run code as you.",
                f"The tokens are also in {tokens.path}, until this ends. Ctrl-C ends it.",
            ]
        ),
        flush=True,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{host} cannot be listened on: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} of {host} cannot be listened on: {error.strerror}; choose another with --port, 0 for any"
        ) from None
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
