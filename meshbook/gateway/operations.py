"""What may be asked of meshes, and done with them: one table for agents (`mcp_server`) and for the web (`http_app`).

Operations of the scope `look` answer while ranks are busy or hang: they ask the supervisor and the ranks' service
threads. Each blocks; a server calls them on threads.
"""

from __future__ import annotations

import contextlib
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from meshbook.controller import past_cells, reports
from meshbook.controller.listing import list_meshes
from meshbook.controller.mesh import Mesh
from meshbook.controller.session import Session
from meshbook.controller.starting import create_mesh, generate_mesh_name
from meshbook.errors import MeshbookError, MeshNameError, MeshTimeout, UsageError
from meshbook.gateway import answers, parameters
from meshbook.gateway.answers import Answer
from meshbook.gateway.budget import RankMinutes
from meshbook.gateway.connections import MeshConnections
from meshbook.ids import CallId, Ranks, format_ranks, name_ranks
from meshbook.selections import parse_selection
from meshbook.wire import keys, messages

Scope = Literal["look", "run", "manage"]  # each allows what those before it allow
SCOPES: tuple[Scope, ...] = get_args(Scope)

_ALL_HISTORY_S = 1e9
# Seconds between two looks whether a cell of another client has ended.
_POLL_S = 0.2
# Seconds for which `start` waits. In a launcher's queue it takes longer, and goes on.
_START_WAIT_S = 60.0


@dataclass
class Caller:
    """Who asks, and what he may do.

    Attributes:
        kind: as the mesh's history and its list of clients name him: "mcp:claude-code", "http:run".
        scope: what is allowed.
        hint: how more is allowed, with {scope} for what is needed.
        budget: of the cells that he runs; None: no limit.
        starts: meshes that are being started, shared by all callers of a server.
    """

    connections: MeshConnections
    kind: str
    scope: Scope
    hint: str
    budget: RankMinutes | None = None
    starts: dict[str, Future[Any]] = field(default_factory=dict)

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(scope) <= SCOPES.index(self.scope)

    def observed(self, of: parameters.OfMesh) -> Mesh:
        session = self.connections.observer(of.mesh, self.kind)
        assert session.axes is not None
        return Mesh.of(session, session.axes)

    def joined(self, of: parameters.OfMesh) -> Mesh:
        session = self.connections.client(of.mesh, self.kind)
        assert session.axes is not None
        return Mesh.of(session, session.axes)


class NotAllowed(MeshbookError):
    """The caller's scope does not cover the operation."""


# ---------------------------------------------------------------------------------------------------------------------
# look


def _meshes(caller: Caller, _: parameters.NoParameters) -> Answer:
    """Lists the meshes of this user on this machine: name, ranks, states, who is attached."""
    now, only = time.time(), caller.connections.only
    found = [mesh for mesh in list_meshes() if only in (None, mesh.name)]
    rows = [answers.mesh_answer(mesh.name, mesh.info, mesh.trouble, now, mesh.started_at) for mesh in found]
    rows += [{"mesh": name, "states": "being started"} for name, start in caller.starts.items() if not start.done()]
    return {"meshes": answers.fit(rows, answers.MAX_CHARS)}


def _status(caller: Caller, asked: parameters.OfRanks) -> Answer:
    """Tells what each rank does now: cell, line, the collective it waits in, how it ended; ranks alike share a row."""
    mesh = caller.observed(asked)
    info, snapshot = mesh.status(), reports.fetch_mesh_snapshot(mesh.session)
    running = past_cells.fetch_unattended(mesh.session).open_calls
    return answers.status_answer(snapshot, info, running, _chosen(mesh, asked.ranks))


def _why(caller: Caller, asked: parameters.OfMesh) -> Answer:
    """Explains why a mesh hangs or is slow: which ranks cause it, at which line, who waits for them, what to do next.

    Ask this first when a cell does not end. It takes up to 3 seconds.
    """
    why = caller.observed(asked).why()
    return answers.findings_answer(why.findings, silent_hosts=list(why.silent_hosts), seconds=round(why.seconds, 2))


def _stacks(caller: Caller, asked: parameters.StacksOf) -> Answer:
    """Returns the Python stacks of ranks as one tree, also of ranks that hang: where each is, with its line."""
    stacks = caller.observed(asked).stacks(asked.ranks, twice=asked.twice, threads=asked.threads)
    return answers.stacks_answer(stacks.text, stacks.problems, stacks.moved, stacks.silent_hosts)


def _memory(caller: Caller, asked: parameters.OfRanks) -> Answer:
    """Returns the memory of each rank's process and GPU, in bytes."""
    mesh = caller.observed(asked)
    return answers.memory_answer(reports.fetch_mesh_snapshot(mesh.session), _chosen(mesh, asked.ranks))


def _logs(caller: Caller, asked: parameters.LogsOf) -> Answer:
    """Returns what cells have printed, folded by rank, with a cursor: pass it again to get only what is new.

    With rank: the last raw output of that rank, which also has what threads and C code wrote outside cells.
    """
    mesh = caller.observed(asked)
    if asked.rank is not None:
        text = mesh.logs(asked.rank)
        return {"rank": asked.rank, "untrusted_output": answers.cut(text, answers.MAX_CHARS)}
    return answers.logs_answer(fetch_output(mesh.session, asked.cursor), asked.cursor)


def _history(caller: Caller, asked: parameters.HistoryOf) -> Answer:
    """Lists the latest cells: who ran them, on which ranks, how they ended; and what agents did beside cells."""
    return answers.history_answer(caller.observed(asked).history(), asked.limit, asked.skip)


def _findings(caller: Caller, asked: parameters.OfMesh) -> Answer:
    """Returns what the supervisor itself has found in the cells that run now, without looking again (see why)."""
    return answers.findings_answer(reports.fetch_mesh_snapshot(caller.observed(asked).session).findings)


def _metrics(caller: Caller, asked: parameters.MetricsOf) -> Answer:
    """Returns the numbers that ranks passed to meshbook.log, such as the loss: the last, and a thinned curve."""
    mesh = caller.observed(asked)
    snapshot = reports.fetch_mesh_snapshot(mesh.session, history_s=_ALL_HISTORY_S)
    return answers.metrics_answer(snapshot, _chosen(mesh, asked.ranks), asked.name)


def _result(caller: Caller, asked: parameters.ResultOf) -> Answer:
    """Returns how a cell ended, or that it still runs, and what it has printed until now (since a cursor)."""
    session = caller.observed(asked).session
    deadline = time.monotonic() + asked.wait_s
    while True:
        output = fetch_output(session, asked.cursor, asked.ticket)
        if not output.cells:
            raise MeshNameError(f"the history of mesh {session.name!r} has no cell {asked.ticket} any more")
        if output.cells[0].finished is not None or time.monotonic() >= deadline:
            return answers.result_answer(output, asked.cursor)
        if caller.connections.closing.wait(_POLL_S):
            return answers.result_answer(output, asked.cursor)


def fetch_output(session: Session, since: int | None, target: str | None = None) -> messages.NewOutput:
    """Return the output of cells after a place; None: the newest. Blocks a few milliseconds.

    Raises:
        MeshNameError: there is no such cell.
        UsageError: this mesh has not come to that place.
        MeshTimeout: the supervisor does not answer.
    """
    call = session.connection.next_call_id()
    query = messages.QueryNewOutput(call=call, since=since, target=CallId(target) if target is not None else None)
    output = session.call_supervisor(query).output
    assert output is not None
    if since is not None and since > output.last_place:
        raise UsageError(
            f"the cursor {since} is of another mesh: that of {session.name!r} is at {output.last_place}; leave it out"
        )
    return output


# ---------------------------------------------------------------------------------------------------------------------
# run


def _run(caller: Caller, asked: parameters.CellToRun) -> Answer:
    """Runs a cell on the ranks and returns a ticket at once; result(ticket) tells what came of it.

    It has its turn after what the ranks run now. What it binds stays on the ranks, as for a person's cell.
    """
    mesh = caller.joined(asked)
    session, chosen_at = mesh.session, mesh.session.info.num_rank_changes
    ranks = mesh.resolve_ranks(asked.ranks)
    if caller.budget is not None:
        caller.budget.check(len(ranks))
    command = session.cell_command(
        textwrap.dedent(asked.source), ranks, chosen_at=chosen_at if asked.ranks is None else None
    )
    label = f"cell {command.execution_count} by {caller.kind}"
    command = msgspec.structs.replace(command, label=label)
    future = session.request(command, on_output=lambda _: None)  # the supervisor keeps it for `result`
    if caller.budget is not None:
        caller.budget.began(session, command, future)
    earlier: list[str] = []
    with contextlib.suppress(MeshTimeout):  # the cell was sent: its ticket must not be lost
        earlier = [
            call.label
            for call in past_cells.fetch_unattended(session).open_calls
            if call.call != command.call and not set(call.ranks).isdisjoint(ranks)
        ]
    if future.done():
        future.result()  # raises what it was refused for
    return answers.without_empty(
        {
            "mesh": session.name,
            "ticket": command.call,
            "cell": command.execution_count,
            "ranks": format_ranks(ranks),
            "waits_for": earlier,
            "budget": caller.budget.describe() if caller.budget is not None else None,
            "next": "result(ticket) returns its output and how it ended; wait_s waits for the end",
        }
    )


def _interrupt(caller: Caller, asked: parameters.ToInterrupt) -> Answer:
    """Stops a cell, or whatever ranks run, as a notebook's Stop button: the ranks keep their variables."""
    if (asked.ticket is None) == (asked.ranks is None):
        raise UsageError('say what to stop: ticket="…" for one cell (status lists those that run), or ranks="all"')
    mesh = caller.joined(asked)
    if asked.ranks is not None:
        ranks = _chosen(mesh, asked.ranks)
        mesh.session.interrupt(ranks)
        return {"interrupted": name_ranks(ranks), "next": "status tells whether they have come back"}
    running = {call.call: call for call in past_cells.fetch_unattended(mesh.session).open_calls}
    if asked.ticket not in running:
        raise MeshNameError(f"no running cell has the ticket {asked.ticket}; running: {', '.join(running) or 'none'}")
    call = running[CallId(asked.ticket)]
    mesh.session.interrupt(call.ranks, target=call.call)
    return {"interrupted": call.label, "next": f"result({call.call}) tells how it ended"}


# ---------------------------------------------------------------------------------------------------------------------
# manage


def _start(caller: Caller, asked: parameters.MeshToStart) -> Answer:
    """Starts a mesh and waits for it, for a minute at most. It ends half an hour after its last client has left."""
    name = caller.connections.check_name(asked.mesh) or generate_mesh_name("agent")
    if asked.num_ranks is not None and asked.axes is not None:
        raise UsageError(f"num_ranks={asked.num_ranks} and axes={asked.axes} are two answers; leave one out")
    own: Future[Any] = Future()
    start = caller.starts.setdefault(name, own)
    if start is own:
        _in_background(start, lambda: _create(caller, asked, name))
    try:
        session: Session = start.result(_START_WAIT_S)
    except TimeoutError:
        return {"mesh": name, "state": "being started", "next": "meshes lists it; start again tells how it ended"}
    except BaseException:
        caller.starts.pop(name, None)
        raise
    caller.starts.pop(name, None)
    assert session.axes is not None
    return {"mesh": name, "axes": session.axes.axes, "num_ranks": session.axes.size, "state": "ready"}


def _create(caller: Caller, asked: parameters.MeshToStart, name: str) -> Session:
    axes = asked.axes if asked.axes is not None else asked.num_ranks
    mesh = create_mesh(axes, name=name, on=asked.on, nodes=asked.nodes, gpus_per_node=asked.per_node, kind=caller.kind)
    mesh.session.disable_stop_at_exit()
    caller.connections.add(mesh.session, caller.kind)
    return mesh.session


def _in_background(future: Future[Any], act: Callable[[], Any]) -> None:
    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="meshbook-start", daemon=True).start()


def _heal(caller: Caller, asked: parameters.MeshToHeal) -> Answer:
    """Puts new processes in the place of ranks that have exited; the others keep all they have."""
    healed = caller.joined(asked).heal(copy=asked.copy or False)
    return {
        "new_ranks": format_ranks(healed.ranks),
        "seconds": round(healed.seconds, 2),
        "complete": healed.complete,
        "untrusted_output": answers.cut(healed.text, answers.MAX_CHARS),
    }


def _stop(caller: Caller, asked: parameters.OfMesh) -> Answer:
    """Ends a mesh and all that its ranks hold. There is no way back."""
    mesh = caller.joined(asked)
    mesh.stop()
    if any(found.token == mesh.session.connection.connection_info.token for found in keys.list_connections()):
        raise MeshTimeout(f"the mesh {mesh.name!r} has not ended; `meshbook stop {mesh.name}` in a terminal ends it")
    return {"stopped": mesh.name}


# ---------------------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One thing that may be asked for. Its description is the docstring of `act`."""

    name: str
    scope: Scope
    parameters: type[Any]
    act: Callable[[Caller, Any], Answer]
    method: str
    path: str  # with {mesh} and {ticket}, which are parameters too

    @property
    def description(self) -> str:
        return textwrap.dedent(f"        {self.act.__doc__}").strip()

    @property
    def has_output(self) -> bool:
        """Whether its answer quotes what programs on the ranks have written."""
        return self.name in _WITH_OUTPUT


_WITH_OUTPUT = frozenset(("status", "why", "stacks", "logs", "findings", "result", "heal"))

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("meshes", "look", parameters.NoParameters, _meshes, "GET", "/meshes"),
        Operation("status", "look", parameters.OfRanks, _status, "GET", "/meshes/{mesh}"),
        Operation("why", "look", parameters.OfMesh, _why, "GET", "/meshes/{mesh}/why"),
        Operation("stacks", "look", parameters.StacksOf, _stacks, "GET", "/meshes/{mesh}/stacks"),
        Operation("memory", "look", parameters.OfRanks, _memory, "GET", "/meshes/{mesh}/memory"),
        Operation("logs", "look", parameters.LogsOf, _logs, "GET", "/meshes/{mesh}/logs"),
        Operation("history", "look", parameters.HistoryOf, _history, "GET", "/meshes/{mesh}/history"),
        Operation("findings", "look", parameters.OfMesh, _findings, "GET", "/meshes/{mesh}/findings"),
        Operation("metrics", "look", parameters.MetricsOf, _metrics, "GET", "/meshes/{mesh}/metrics"),
        Operation("result", "look", parameters.ResultOf, _result, "GET", "/meshes/{mesh}/results/{ticket}"),
        Operation("run", "run", parameters.CellToRun, _run, "POST", "/meshes/{mesh}/run"),
        Operation("interrupt", "run", parameters.ToInterrupt, _interrupt, "POST", "/meshes/{mesh}/interrupt"),
        Operation("start", "manage", parameters.MeshToStart, _start, "POST", "/meshes"),
        Operation("heal", "manage", parameters.MeshToHeal, _heal, "POST", "/meshes/{mesh}/heal"),
        Operation("stop", "manage", parameters.OfMesh, _stop, "DELETE", "/meshes/{mesh}"),
    )
}


def call(caller: Caller, operation: Operation, arguments: dict[str, Any], *, strict: bool = True) -> Answer:
    """Carry out an operation. Blocks.

    Args:
        strict: False: numbers may be text, as in a URL.

    Raises:
        NotAllowed: it is beyond the caller's scope.
        UsageError: an argument is missing, unknown or of the wrong type; the message names it.
        MeshbookError: as the operation.
    """
    if not caller.may(operation.scope):
        raise NotAllowed(
            f"{operation.name} needs the scope {operation.scope}, and here only {caller.scope} is allowed; "
            + caller.hint.format(scope=operation.scope)
        )
    try:
        asked = msgspec.convert(arguments, operation.parameters, strict=strict)
    except msgspec.ValidationError as error:
        raise UsageError(f"{operation.name}: {error}") from None
    return operation.act(caller, asked)


def input_schema(operation: Operation) -> dict[str, Any]:
    """Return the JSON Schema of an operation's parameters."""
    _, components = msgspec.json.schema_components([operation.parameters])
    schema: dict[str, Any] = components[operation.parameters.__name__]
    properties = {name: _plain(field) for name, field in schema["properties"].items()}
    return {"type": "object", "properties": properties, "required": schema["required"], "additionalProperties": False}


def _plain(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without null, which says the same as leaving the field out."""
    if field.get("default", 0) is not None:
        return field
    (kind,) = [one for one in field["anyOf"] if one != {"type": "null"}]
    return {**kind, "description": field["description"]}


def _chosen(mesh: Mesh, ranks: str | None) -> Ranks:
    """Return the selected ranks, alive or not; None: all."""
    return tuple(sorted(mesh.ranks)) if ranks is None else parse_selection(mesh.grid, ranks)
