"""Meshes, ranks and cells as tables: aligned text for a terminal, HTML for a notebook.

Pure: data in, text out. `%mesh status`, `meshbook list` and `mesh.status()` share the format.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from meshbook.fold.heal_advice import heal_advice
from meshbook.ids import format_ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import HistoryEntry, MeshInfo, MeshSpec, RankInfo

T = TypeVar("T", int, float)
Info = TypeVar("Info")

# Maximum number of ranks with a row each; above it, ranks with equal cells share a row. 16 rows fit a screen with room
# for the cell.
_MAX_RANK_ROWS = 16
_MAX_SOURCE_CHARS = 60
_MAX_NAMES_SHOWN = 20

# Display text of a rank's state.
STATES = {
    "starting": "starting",
    "idle": "idle",
    "busy": "busy",
    "silent": "no sign of life",
    "dead": "dead",
}


@dataclass(frozen=True)
class Table:
    """Rows under column names, with a heading before and notes after them.

    A row has as many cells as there are columns; a column that is empty in every row is left out.
    """

    heading: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns, rows = self._drop_empty_columns()
        lines = [self.heading] if self.heading else []
        if rows:
            widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
            for row in (columns, *rows):
                lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns, rows = self._drop_empty_columns()
        parts = [f"<p>{html.escape(self.heading)}</p>"] if self.heading else []
        if rows:
            parts.append(
                "<table><thead>"
                + _html_row(columns, "th")
                + "</thead><tbody>"
                + "".join(_html_row(row, "td") for row in rows)
                + "</tbody></table>"
            )
        parts += [f"<p>{html.escape(note)}</p>" for note in self.notes]
        return "".join(parts)

    def _drop_empty_columns(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return column names and rows without the columns that are empty in every row."""
        nonempty = [at for at in range(len(self.columns)) if any(row[at] for row in self.rows)]
        return tuple(self.columns[at] for at in nonempty), tuple(tuple(row[at] for at in nonempty) for row in self.rows)


class TextReport:
    """A report that displays itself: its text, on a terminal and in a notebook."""

    @property
    def text(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True, repr=False)
class TableOf(Sequence[Info]):
    """Infos that display themselves as a table."""

    table: Table
    infos: tuple[Info, ...]

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.infos[index]

    def __len__(self) -> int:
        return len(self.infos)

    def __str__(self) -> str:
        return str(self.table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


class MeshStatus(MeshInfo, frozen=True, gc=False):
    """What the supervisor says of a mesh, which displays itself as `%mesh status` does."""

    @classmethod
    def of(cls, info: MeshInfo) -> MeshStatus:
        return cls(**{name: getattr(info, name) for name in info.__struct_fields__})

    def __repr__(self) -> str:
        return str(status_table(self))

    def _repr_html_(self) -> str:
        return status_table(self)._repr_html_()


def status_table(info: MeshInfo, *, now: float | None = None) -> Table:
    """Return the status of one mesh: a row per rank, or per group of equal ranks if there are many.

    Args:
        now: wall clock, seconds since the epoch; None: the present.
    """
    now = time.time() if now is None else now
    if info.spec is None:
        return Table(
            f"Mesh {info.name}: no ranks yet, up {format_age(now - info.started_at)}.",
            notes=("Start them with %mesh start -n 4.",),
        )
    ranks = info.ranks
    rows: Iterable[tuple[str, ...]]
    if len(ranks) <= _MAX_RANK_ROWS:
        rows = (_rank_row(str(rank.rank), rank, (rank,)) for rank in ranks)
    else:
        groups: dict[tuple[str, ...], list[RankInfo]] = {}
        for rank in ranks:
            key = (*describe_activity(rank), rank.host, rank.device.partition(":")[0])
            groups.setdefault(key, []).append(rank)
        rows = (_rank_row(format_ranks(rank.rank for rank in group), group[0], group) for group in groups.values())
    notes = []
    if info.names:
        notes.append(f"Names on the ranks: {format_some(info.names, _MAX_NAMES_SHOWN)}.")
    if info.ends_at is not None:
        end = datetime.fromtimestamp(info.ends_at)
        at = f"{end:%H:%M:%S}" if end.date() == datetime.fromtimestamp(now).date() else f"{end:%a %d %b %H:%M}"
        notes.append(f"Time left: {format_age(info.ends_at - now)}; its job comes to its time limit at {at}.")
    if info.clients:
        notes.append(f"Attached: {', '.join(info.clients)}.")
    if lost := [rank for rank in ranks if rank.state == "dead"]:
        notes.append(_describe_lost(lost, [rank.rank for rank in ranks if rank.state != "dead"]))
    if broken := [rank.rank for rank in ranks if rank.problem]:
        notes.append(f"%mesh heal {format_ranks(broken)} has new processes where a GPU cannot be used any more.")
    if info.spares:
        num_ready = sum(spare.state == "ready" for spare in info.spares)
        notes.append(f"Spares: {len(info.spares)}, of which {num_ready} ready (%mesh spare).")
    heading = (
        f"Mesh {info.name}: {describe_size(info.spec)}, {_describe_process_group(info)}, "
        f"up {format_age(now - info.started_at)}, {count_of(info.cells_run, 'cell')} run."
    )
    return Table(heading, ("rank", "state", "device", "memory", "peak", "host", "pid"), tuple(rows), tuple(notes))


def _describe_lost(lost: Sequence[RankInfo], alive: Sequence[int]) -> str:
    return (
        f"{name_ranks(rank.rank for rank in lost).capitalize()} {'is' if len(lost) == 1 else 'are'} gone; "
        + (f"cells run on the others (%%mesh --ranks {format_ranks(alive)}), " if alive else "")
        + f"{heal_advice(len(lost), (rank.heals_when for rank in lost))}."
    )


def _rank_row(shown: str, rank: RankInfo, group: Sequence[RankInfo]) -> tuple[str, ...]:
    alive = [other for other in group if other.state != "dead"]
    rss = [other.rss_bytes for other in alive if other.rss_bytes]
    peak = [other.peak_rss_bytes for other in alive if other.peak_rss_bytes]
    return (
        shown,
        ", ".join([*describe_activity(rank), *_describe_heartbeat(rank)]),
        rank.device if len(group) == 1 else rank.device.partition(":")[0],
        format_spread(rss, format_bytes),
        format_spread(peak, format_bytes),
        rank.host,
        str(rank.pid or "") if len(group) == 1 else "",
    )


def describe_activity(rank: RankInfo) -> list[str]:
    """Return a rank's state, and the cell and line it is at, or how it ended."""
    parts = [STATES.get(rank.state, rank.state)]
    if rank.state == "dead" and rank.exit:
        parts.append(rank.exit)
    elif rank.state in ("busy", "silent") and rank.cell:
        parts.append(rank.cell + (f" line {rank.line}" if rank.line else ""))
    if rank.problem:
        parts.append(rank.problem)
    return parts


def _describe_heartbeat(rank: RankInfo) -> list[str]:
    silent = rank.state == "silent" and rank.beat_age_s is not None
    return [f"last heard of {rank.beat_age_s:.0f} s ago"] if silent else []


def _describe_process_group(info: MeshInfo) -> str:
    assert info.spec is not None
    if info.spec.process_group is False or not info.spec.torch:
        return "no process group"
    backend = f" ({info.backend})" if info.backend else ""
    return {
        "none": "no process group yet",
        "forming": "the process group is being formed",
        "ready": f"process group ready{backend}",
        "broken": f"process group broken{backend}",
    }[info.groups]


def describe_size(spec: MeshSpec) -> str:
    """Return the size of a mesh as text: `4 ranks`, or `8 ranks (dp=4, tp=2) on 2 hosts`."""
    axes = MeshAxes.of(dict(spec.axes))
    text = count_of(axes.size, "rank")
    if axes.names != ("rank",):
        text += f" ({', '.join(f'{name}={size}' for name, size in axes.axes.items())})"
    if spec.on:
        return f"{text} on {count_of(spec.num_hosts, 'machine')}"
    return text + (f" on {spec.num_hosts} simulated hosts" if spec.num_hosts > 1 else "")


def history_table(entries: Sequence[HistoryEntry], *, now: float | None = None) -> Table:
    """Return the cells that ran, oldest first."""
    if not entries:
        return Table("No cell has run on this mesh.")
    now = time.time() if now is None else now
    by_others = len({entry.by for entry in entries}) > 1
    rows = []
    for entry in entries:
        seconds = now - entry.started_at if entry.seconds is None else entry.seconds
        rows.append(
            (
                "" if entry.number is None else str(entry.number),
                time.strftime("%H:%M:%S", time.localtime(entry.started_at)),
                format_seconds(seconds) + (" so far" if entry.seconds is None else ""),
                format_ranks(entry.ranks) if entry.ranks else "",
                entry.status + (", setup" if entry.setup else ""),
                _describe_kept(entry.num_lines),
                entry.by if by_others else "",
                first_line(entry.source),
            )
        )
    return Table("", ("cell", "began", "took", "ranks", "ended", "output", "by", "source"), tuple(rows))


def _describe_kept(num_lines: int | None) -> str:
    """Return what `%mesh history N` shows of a cell; "" if it has nothing."""
    if num_lines is None:
        return ""
    return format_lines(num_lines) if num_lines else "kept"


def first_line(source: str) -> str:
    """Return a cell's first line of code, truncated to fit a table row."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    if not lines:
        return ""
    chosen = next((line for line in lines if not line.startswith(("#", "%%"))), lines[0])
    return chosen if len(chosen) <= _MAX_SOURCE_CHARS else chosen[: _MAX_SOURCE_CHARS - 1] + "…"


def format_age(seconds: float) -> str:
    """Format a duration: `100 s`, `7 min`, `3 h 05 min`, `2 days 4 h`."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 120:
        return f"{max(0, int(seconds))} s"
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60:02} min"
    return f"{hours // 24} days {hours % 24} h"


def format_lines(count: int) -> str:
    """Format a number of lines: `1 line`, `1,312 lines`."""
    return count_of(count, "line")


def format_seconds(seconds: float) -> str:
    """Format how long something took: `4 ms`, `1.3 s`, `7 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else format_age(seconds)


def format_bytes(count: float) -> str:
    """Format a size: `812 KiB`, `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("GiB is the last unit")


def format_spread(values: Sequence[T], format_value: Callable[[T], str]) -> str:
    """Format the range of some values: `812 KiB to 1.4 GiB`; one value if they look alike, "" if there are none."""
    if not values:
        return ""
    low, high = format_value(min(values)), format_value(max(values))
    return low if low == high else f"{low} to {high}"


def format_some(names: Sequence[str], limit: int) -> str:
    """List names, of many the first ones: `model, opt and 3 more`."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def count_of(count: int, one: str) -> str:
    """Return `1 rank`, `1,312 ranks`."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag} style='text-align: left'>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
