"""Reports about a mesh: why it hangs, the ranks' stacks, their health and memory.

Each is a plain call that blocks briefly, from any thread and while cells run. The result displays itself in a notebook
and is text elsewhere. No query goes to the ranks' main threads, so reports also work with a mesh that hangs.
"""

from __future__ import annotations

import html
import linecache
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from meshbook.controller import subscription
from meshbook.controller.session import Session
from meshbook.controller.subscription import MeshSnapshot
from meshbook.controller.tables import STATES, Table, TextReport, describe_activity, format_age, format_bytes
from meshbook.data import dataframes
from meshbook.diagnose import findings as diagnose
from meshbook.diagnose import stack_tree as stack_tree
from meshbook.diagnose.findings import Finding
from meshbook.errors import UsageError
from meshbook.ids import Ranks, format_ranks
from meshbook.wire import messages
from meshbook.wire.messages import RankSnapshot, ThreadStack

# Seconds for a reply: the supervisor gives its hosts 2.5.
_REPLY_TIMEOUT_S = 6.0
# Seconds between two samples, whose difference shows which ranks move.
RESAMPLE_INTERVAL_S = 0.5
# Maximum seconds for `why`; a second sample that would exceed them is omitted.
_WHY_BUDGET_S = 2.8
# Maximum number of cells run in a mesh for which sources are fetched; above it, stacks show no cell source lines.
_MAX_CELLS_FETCHED = 2_000
_LEADING_BLANK_LINES = re.compile(r"\A(?:[ \t]*\n)+")
# History that `memory` and `metrics` request: all of it.
_ALL_HISTORY_S = 1e9


@dataclass(frozen=True, repr=False)
class Why(TextReport):
    """Why a mesh hangs. Displays itself.

    Attributes:
        findings: the most important first; never empty, because "nothing is wrong" is a finding too.
        snapshots: what each rank was doing.
        silent_hosts: machines that did not reply.
        seconds: how long the analysis took.
    """

    findings: tuple[Finding, ...]
    snapshots: tuple[RankSnapshot, ...] = ()
    silent_hosts: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The output of `%mesh why`, without colours."""
        return diagnose.as_text(self.findings, color=False)

    def _repr_html_(self) -> str:
        parts = []
        for one in self.findings:
            evidence = "".join(f"<li>{html.escape(line)}</li>" for line in one.evidence)
            parts.append(
                f"<p style='margin:.6em 0 .2em'><b>{html.escape(one.sentence)}.</b></p>"
                + (f"<ul style='margin:0;opacity:.8'>{evidence}</ul>" if evidence else "")
                + (f"<p style='margin:.2em 0'>Next: {html.escape(one.next_step)}</p>" if one.next_step else "")
            )
        return "<div class='meshbook-why'>" + "".join(parts) + "</div>"


@dataclass(frozen=True, repr=False)
class Stacks(TextReport, Mapping[int, tuple[ThreadStack, ...]]):
    """The Python stacks of ranks. Displays itself as one tree; `stacks[3]` is rank 3's threads, the main one first.

    Attributes:
        snapshots: what each rank was doing, stacks included.
        before: the snapshots half a second earlier, if requested.
        silent_hosts: machines that did not reply.
        threads: whether the tree has all threads, or only the main ones.
    """

    snapshots: tuple[RankSnapshot, ...]
    before: tuple[RankSnapshot, ...] = ()
    silent_hosts: tuple[str, ...] = ()
    threads: bool = False
    seconds: float = 0.0
    _source_by_file: Mapping[str, str] = field(default_factory=dict)  # cell sources, by the file names of their frames
    _by_rank: dict[int, tuple[ThreadStack, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for snapshot in self.snapshots:
            self._by_rank[snapshot.rank] = tuple(sorted(snapshot.stacks, key=lambda stack: not stack.is_main))

    @cached_property
    def tree(self) -> stack_tree.StackTree:
        """All stacks merged: common frames once, with the set of ranks at each branch."""
        return stack_tree.merge(self.snapshots, main_only=not self.threads)

    @property
    def moved(self) -> dict[int, bool]:
        """Rank -> whether its stack differs between the two samples; empty with one sample."""
        return stack_tree.moved_by_rank(self.before, self.snapshots) if self.before else {}

    @property
    def problems(self) -> dict[int, str]:
        """Rank -> why its stack is missing or incomplete, and what would help."""
        return {seen.rank: seen.problem for seen in self.snapshots if seen.problem}

    @property
    def text(self) -> str:
        """The output of `%mesh stacks`, without colours."""
        return self.as_text()

    def as_text(self, *, color: bool = False) -> str:
        """Return the tree as text, outermost frame first."""
        return stack_tree.as_text(self.tree, color=color, moved=self.moved or None, source_of=self.source_of)

    def source_of(self, file: str, line: int) -> str | None:
        """Return a source line of a cell, or of a file that also exists on this machine."""
        source = self._source_by_file.get(file)
        if source is not None:
            lines = source.splitlines()
            return lines[line - 1].strip() if 0 < line <= len(lines) else None
        return linecache.getline(file, line).strip() or None

    def __getitem__(self, rank: int) -> tuple[ThreadStack, ...]:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)


# ---------------------------------------------------------------------------------------------------------------------
# Queries


def take_snapshots(session: Session, ranks: Ranks) -> messages.SnapshotReply:
    """Return what these ranks are doing now. Blocks, at most 3 s; milliseconds if all ranks reply.

    Ranks that reply are sampled from inside, the others from outside the process.

    Raises:
        NotAttached: the mesh has ended.
        MeshTimeout: the supervisor does not reply.
    """
    _check_not_listener_thread(session)
    command = messages.TakeSnapshots(call=session.connection.next_call_id(), ranks=ranks)
    return cast(messages.SnapshotReply, session.call_supervisor(command, _REPLY_TIMEOUT_S))


def why(session: Session, ranks: Ranks) -> Why:
    """Explain why the mesh hangs. Samples twice if one sample is not conclusive. Blocks, at most 3 s.

    Samples all ranks, because any of them may be the cause; returns the findings that concern `ranks`.
    """
    assert session.axes is not None
    started = time.monotonic()
    all_ranks = tuple(sorted(session.axes.ranks))
    reply = take_snapshots(session, all_ranks)
    found = _explain(session, reply)
    took = time.monotonic() - started
    if not all(one.sure for one in found) and 2 * took + RESAMPLE_INTERVAL_S < _WHY_BUDGET_S:
        time.sleep(RESAMPLE_INTERVAL_S)
        first, reply = reply, take_snapshots(session, all_ranks)
        found = _explain(session, reply, first)
    mine = set(ranks)
    relevant = tuple(one for one in found if not one.ranks or mine & {*one.ranks, *one.others})
    return Why(relevant or (_nothing_found(ranks),), reply.snapshots, reply.silent_hosts, time.monotonic() - started)


def stacks(session: Session, ranks: Ranks, *, twice: bool = False, threads: bool = False) -> Stacks:
    """Return the stacks of these ranks. Blocks, at most 3 s; with `twice` half a second and one sample longer.

    Args:
        twice: sample again after half a second, and report which ranks moved.
        threads: all threads, not only the main ones.
    """
    started = time.monotonic()
    before: tuple[RankSnapshot, ...] = ()
    reply = take_snapshots(session, ranks)
    if twice:
        time.sleep(RESAMPLE_INTERVAL_S)
        before, reply = reply.snapshots, take_snapshots(session, ranks)
    took = time.monotonic() - started
    return Stacks(
        reply.snapshots, before, reply.silent_hosts, threads, took, _fetch_cell_sources(session, reply.snapshots)
    )


def fetch_mesh_snapshot(session: Session, *, history_s: float = 0.001) -> MeshSnapshot:
    """Return the supervisor's current state of the mesh. Blocks a few milliseconds."""
    session.check_attached()
    _check_not_listener_thread(session)
    return subscription.fetch_snapshot(session.connection, history_s=history_s)


def _explain(
    session: Session, reply: messages.SnapshotReply, earlier: messages.SnapshotReply | None = None
) -> tuple[Finding, ...]:
    return diagnose.explain(
        reply.snapshots,
        axes=session.axes.axes if session.axes is not None else None,
        silent_hosts=reply.silent_hosts,
        earlier=earlier.snapshots if earlier is not None else (),
    )


def _fetch_cell_sources(session: Session, snapshots: tuple[RankSnapshot, ...]) -> dict[str, str]:
    """Return the sources of the cells that these ranks run, by the file names of their frames."""
    running = {seen.file: seen.cell for seen in snapshots if seen.file and seen.cell}
    if not running or session.info.cells_run > _MAX_CELLS_FETCHED:
        return {}
    by_label = {entry.label: entry.source for entry in session.history()}
    # Without leading empty lines, as IPython runs a cell: the frames' line numbers count from there.
    return {file: _LEADING_BLANK_LINES.sub("", by_label[cell]) for file, cell in running.items() if cell in by_label}


def _nothing_found(ranks: Ranks) -> Finding:
    return Finding(kind="idle", ranks=ranks, title=f"Nothing that was found concerns ranks {format_ranks(ranks)}")


def _check_not_listener_thread(session: Session) -> None:
    if threading.current_thread() is session.connection.thread:
        raise UsageError(
            "this runs in the thread that would have to bring the answer (a callback of the mesh's news); ask from "
            "another thread"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Tables and DataFrames


def health_table(snapshot: MeshSnapshot, ranks: Ranks) -> Table:
    """Return a table with a row per rank: state, waits, load and memory."""
    shown = [rank for rank in snapshot.ranks if rank.rank in set(ranks)]
    rows = tuple(
        (
            str(rank.rank),
            ", ".join([*describe_activity(rank), *(["waits for somebody to type"] if rank.awaiting_input else [])]),
            f"{rank.waits_in} since {format_age(snapshot.at - rank.waits_since)}"
            if rank.waits_in and rank.waits_since is not None
            else "",
            _format_number(rank.cpu_percent, " %"),
            _format_size(rank.rss_bytes),
            _format_number(rank.gpu_utilisation, " %"),
            _format_size(rank.gpu_allocated_bytes),
            _format_number(rank.collectives_per_s, "/s") if rank.num_collectives else "",
            _format_number(rank.steps_per_s, "/s") if rank.num_steps else "",
            f"{rank.gil_lag_s:.1f} s" if rank.gil_lag_s is not None and rank.gil_lag_s >= 0.5 else "",
            f"{rank.beat_age_s} s ago" if rank.beat_age_s else "",
        )
        for rank in shown
    )
    names = (
        "rank", "state", "waits in", "cpu", "memory", "gpu", "gpu memory", "collectives", "steps", "gil kept",
        "last beat",
    )  # fmt: skip
    notes = tuple(dict.fromkeys(one.title + "." for one in snapshot.findings))
    states = [rank.state for rank in shown]
    counted = ", ".join(f"{states.count(state)} {STATES[state]}" for state in STATES if state in states)
    return Table(f"Mesh {snapshot.name}: {counted or 'no ranks'}.", names, rows, notes)


def memory_table(snapshot: MeshSnapshot, ranks: Ranks) -> Table:
    """Return a table with a row per rank: memory of the process and of its GPU."""
    rows = tuple(
        (
            str(rank.rank),
            rank.host,
            _format_size(rank.rss_bytes),
            _format_size(rank.peak_rss_bytes),
            rank.device if rank.gpu_name is None else f"{rank.device} ({rank.gpu_name})",
            _format_size(rank.gpu_allocated_bytes),
            _format_size(rank.gpu_reserved_bytes),
            _format_size(rank.gpu_peak_bytes),
            _format_size(rank.gpu_used_bytes),
            _format_size(rank.gpu_total_bytes),
        )
        for rank in snapshot.ranks
        if rank.rank in set(ranks)
    )
    names = (
        "rank", "host", "memory", "peak", "device", "gpu allocated", "gpu reserved", "gpu peak", "gpu used", "gpu size",
    )  # fmt: skip
    return Table(f"Mesh {snapshot.name}: memory of each rank.", names, rows)


def memory_dataframe(session: Session, ranks: Ranks, *, history: bool, kind: str | None) -> Any:
    """Return the columns of `Mesh.memory`."""
    snapshot = fetch_mesh_snapshot(session, history_s=_ALL_HISTORY_S if history else 0.001)
    mine = [rank for rank in snapshot.ranks if rank.rank in set(ranks)]
    if history:
        table: dict[str, list[Any]] = {"rank": [], "time": [], "rss_bytes": [], "gpu_allocated_bytes": []}
        for rank in mine:
            gpu = dict(snapshot.series.points("gpu_allocated_bytes", rank.rank))
            for at, value in snapshot.series.points("rss_bytes", rank.rank):
                for name, cell in zip(table, (rank.rank, at, int(value), gpu.get(at)), strict=True):
                    table[name].append(cell)
        return dataframes.make_dataframe(table, kind)
    fields = (
        "rank", "host", "device", "rss_bytes", "peak_rss_bytes", "gpu_allocated_bytes", "gpu_reserved_bytes",
        "gpu_peak_bytes", "gpu_used_bytes", "gpu_total_bytes",
    )  # fmt: skip
    return dataframes.make_dataframe({name: [getattr(rank, name) for rank in mine] for name in fields}, kind)


def metrics_dataframe(session: Session, ranks: Ranks, *, kind: str | None) -> Any:
    """Return the columns of `Mesh.metrics`."""
    names = ("name", "rank", "step", "value", "time")
    mine = set(ranks)
    rows = [row for row in fetch_mesh_snapshot(session, history_s=_ALL_HISTORY_S).scalars.rows() if row[1] in mine]
    return dataframes.make_dataframe({name: [row[at] for row in rows] for at, name in enumerate(names)}, kind)


def _format_number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g}{unit}"


def _format_size(count: int | None) -> str:
    return "" if count is None else format_bytes(count)
