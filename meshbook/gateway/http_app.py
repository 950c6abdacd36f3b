"""The operations over HTTP: routes from their table, a token for each scope, errors as JSON."""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from meshbook import errors
from meshbook.gateway import events, openapi, operations
from meshbook.gateway.connections import MeshConnections
from meshbook.gateway.operations import OPERATIONS, SCOPES, Caller, NotAllowed, Operation, Scope
from meshbook.gateway.tokens import Tokens

_MAX_BODY_BYTES = 4 << 20
# Requests that wait for ranks have threads of their own, so that those that look never wait for them.
_WAITING = frozenset(("result", "start", "heal", "stop"))
_MAX_WAITING = 64
_HINT = "use the {scope} token, which `meshbook serve` has printed"

# The first class that an error is of says its status.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (NotAllowed, 403),
    (errors.MeshNameError, 404),
    (errors.UsageError, 422),
    (errors.MeshShapeError, 422),
    (errors.MeshTimeout, 504),
    (errors.MeshbookError, 409),
)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class JSONResponse(Response):
    """A response of msgspec's JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class HttpApi:
    """The handlers of one server.

    Attributes:
        closing: set when the server ends: streams end then.
    """

    def __init__(self, connections: MeshConnections, tokens: Tokens) -> None:
        self._connections, self._tokens = connections, tokens
        starts: dict[str, Any] = {}
        self._callers = {scope: Caller(connections, f"http:{scope}", scope, _HINT, starts=starts) for scope in SCOPES}
        self._waiting = anyio.CapacityLimiter(_MAX_WAITING)
        self.closing = asyncio.Event()

    def application(self) -> Starlette:
        routes = [
            Route(operation.path, self._endpoint(operation), methods=[operation.method])
            for operation in OPERATIONS.values()
        ]
        return Starlette(
            routes=[
                Route("/", _page),
                Route("/openapi.json", _openapi),
                Route(openapi.EVENTS_PATH, self._events),
                *routes,
            ],
            exception_handlers={
                HTTPException: _http_error,
                errors.MeshbookError: _meshbook_error,
                Exception: _unexpected_error,
            },
        )

    def _endpoint(self, operation: Operation) -> Any:
        async def endpoint(request: Request) -> Response:
            caller = self._caller(request, operation.scope, operation.name)
            arguments = await _arguments(request, operation)
            answer = await anyio.to_thread.run_sync(
                lambda: operations.call(caller, operation, arguments, strict=operation.method == "POST"),
                abandon_on_cancel=True,
                limiter=self._waiting if operation.name in _WAITING else None,
            )
            headers = {}
            if operation.name == "run":
                headers["Location"] = f"/meshes/{answer['mesh']}/results/{answer['ticket']}"
            return JSONResponse(answer, openapi.CREATED.get(operation.name, 200), headers)

        return endpoint

    async def _events(self, request: Request) -> Response:
        caller = self._caller(request, "look", "events")
        text = request.headers.get("last-event-id") or request.query_params.get("cursor")
        if text is not None and not text.isdecimal():
            raise errors.UsageError(f"events: the cursor {text!r:.40} is not a number that an event had as its id")
        name = request.path_params["mesh"]
        session = await anyio.to_thread.run_sync(self._connections.observer, name, caller.kind)
        stream = events.stream(session, self.closing, int(text) if text is not None else None)
        first = await anext(stream)  # errors until here are JSON with their status
        return StreamingResponse(
            _prepend(first, stream), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    def _caller(self, request: Request, needed: Scope, name: str) -> Caller:
        """Return who asks, by his token. Raises HTTPException 401, NotAllowed."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        scope = self._tokens.scope_of(token.strip()) if kind.lower() == "bearer" else None
        if scope is None:
            what = "the token is none of this server's" if token else "a token is needed"
            raise HTTPException(
                401,
                f"{what}; send the header Authorization: Bearer TOKEN with one that `meshbook serve` has printed",
                {"WWW-Authenticate": "Bearer"},
            )
        caller = self._callers[scope]
        if not caller.may(needed):
            raise NotAllowed(
                f"{name} needs the scope {needed}, and this token's is {scope}; {_HINT.format(scope=needed)}"
            )
        return caller


async def _arguments(request: Request, operation: Operation) -> dict[str, Any]:
    """Return an operation's arguments: those of the path, and of the body or the query."""
    if operation.method != "POST":
        return {**request.query_params, **request.path_params}
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {_MAX_BODY_BYTES:,} bytes; have the ranks read a file")
    try:
        content = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
    except msgspec.DecodeError as error:
        raise errors.UsageError(f"{operation.name}: the body is not a JSON object: {error}") from None
    for name, value in request.path_params.items():
        if content.get(name, value) != value:
            raise errors.UsageError(f"{operation.name}: {name} is {value!r} in the path, {content[name]!r} in the body")
    return {**content, **request.path_params}


async def _prepend(first: bytes, stream: Any) -> Any:
    try:
        yield first
        async for event in stream:
            yield event
    finally:
        await stream.aclose()


async def _page(_: Request) -> Response:
    page = resources.files("meshbook.gateway").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers=_PAGE_HEADERS)


async def _openapi(_: Request) -> Response:
    return JSONResponse(openapi.document())


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed"}.get(error.status_code, "HTTPError")
    text = error.detail
    if error.status_code == 404:
        text = "there is nothing at this path; /openapi.json has all that there are"
    return _error(kind, text, error.status_code, error.headers)


async def _meshbook_error(_: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUSES if isinstance(error, kind))
    return _error(type(error).__name__, str(error), status)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    return _error("InternalError", f"{type(error).__name__}: {error}; the server's log has more", 500)


def _error(kind: str, text: str, status: int, headers: Any = None) -> Response:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return JSONResponse({"error": {"type": kind, "message": plain}}, status, headers)
