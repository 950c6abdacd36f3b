"""A mesh's spares: processes that wait to become ranks, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.controller.session import Session
from meshbook.controller.tables import Table, TableOf, count_of, format_bytes, format_seconds, format_some
from meshbook.errors import UsageError
from meshbook.wire import messages
from meshbook.wire.messages import SpareInfo

_MAX_LEFT_OUT = 5  # that are shown


class Spares(TableOf[SpareInfo]):
    """The spares of a mesh. Displays itself as a table."""

    @property
    def num_ready(self) -> int:
        return sum(info.state == "ready" for info in self.infos)


def spare(session: Session, num: int | None) -> Spares:
    """Have each machine keep this many spares, or only return those there are (None); see `Mesh.spare`.

    Raises:
        UsageError, MeshShapeError: the number is none, or more than there are ranks.
    """
    session.check_attached()
    if num is None:
        return Spares(spares_table(session.name, infos := session.status().spares), infos)
    if isinstance(num, bool) or not isinstance(num, int) or num < 0:
        raise UsageError(f"how many processes are to be kept ready? {num!r} is no such number; write mesh.spare(1)")
    session.call_supervisor(messages.KeepSpares(call=session.connection.next_call_id(), num=num))
    infos = session.status().spares
    if num and not infos:  # other machines have yet to report theirs
        return Spares(Table(f"Mesh {session.name} keeps {num} on each machine; they are being started."), infos)
    return Spares(spares_table(session.name, infos), infos)


def spares_table(mesh: str, infos: Sequence[SpareInfo]) -> Table:
    """Return a row for each spare. Pure."""
    if not infos:
        return Table(f"Mesh {mesh} keeps no spares.", notes=("%mesh spare 1 keeps one ready for a heal or a resize.",))
    rows = tuple(
        (
            info.state,
            str(info.num_modules or ""),
            format_seconds(info.import_s) if info.import_s else "",
            format_bytes(info.private_bytes) if info.private_bytes else "",
            info.hostname,
            str(info.pid or ""),
        )
        for info in infos
    )
    notes = [f"The one before {former}." for former in dict.fromkeys(info.former for info in infos) if former]
    left_out = dict(pair for info in infos for pair in info.left_out)
    if left_out:
        shown = format_some([f"{name} ({why})" for name, why in left_out.items()], _MAX_LEFT_OUT)
        notes.append(f"A rank imports these itself: {shown}.")
    return Table(
        describe_spares(mesh, infos),
        ("state", "modules", "imported in", "memory of its own", "host", "pid"),
        rows,
        tuple(notes),
    )


def describe_spares(mesh: str, infos: Sequence[SpareInfo]) -> str:
    num_ready = sum(info.state == "ready" for info in infos)
    ready = "ready" if num_ready == len(infos) else f"{num_ready} ready"
    return f"Mesh {mesh} keeps {count_of(len(infos), 'spare')}: {ready}."
