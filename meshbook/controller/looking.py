"""What a mesh says of itself when it is asked: why it does not get on, where its ranks are, how they are.

Each is a plain call that waits a moment, from any thread and while cells run. It shows itself in a notebook and reads
as text elsewhere. Nothing is asked of the ranks' main threads, so it works with a mesh that hangs.
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
from typing import Any

from meshbook.controller import columns, onlooker
from meshbook.controller.onlooker import Picture
from meshbook.controller.session import Session
from meshbook.controller.tables import STATES, Table, doing, format_age, format_bytes
from meshbook.diagnose import findings as diagnose
from meshbook.diagnose import tree as stack_tree
from meshbook.diagnose.findings import Finding
from meshbook.errors import MeshTimeout, UsageError
from meshbook.ids import Ranks, format_ranks
from meshbook.wire import messages
from meshbook.wire.messages import RankSnapshot, ThreadStack

# Seconds for an answer: the supervisor gives its hosts 2.5.
_ANSWER_TIMEOUT_S = 6.0
# Seconds between two looks, from which it shows who moves.
MOVES_IN_S = 0.5
# Seconds that an answer may take at most; a second look that would not come in time is left out.
_WHY_WITHIN_S = 2.8
# Cells whose sources are fetched, to show the lines that ranks are at; of a mesh that ran more, the lines go without.
_CELLS_READ = 2_000
_LEADING_EMPTY = re.compile(r"\A(?:[ \t]*\n)+")
# What `memory` and `metrics` ask for: all there is.
_EVER_S = 1e9


@dataclass(frozen=True, repr=False)
class Why:
    """Why a mesh does not get on. Shows itself.

    Attributes:
        findings: the most important first; never empty, for that nothing is wrong is news too.
        snapshots: what each rank was doing.
        silent_hosts: machines that did not answer.
        seconds: how long it took to find out.
    """

    findings: tuple[Finding, ...]
    snapshots: tuple[RankSnapshot, ...] = ()
    silent_hosts: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """What `%mesh why` prints, without colours."""
        return diagnose.as_text(self.findings, color=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

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
class Stacks(Mapping[int, tuple[ThreadStack, ...]]):
    """The Python stacks of ranks. Shows itself as one tree; `stacks[3]` are rank 3's threads, the main one first.

    Attributes:
        snapshots: what each rank was doing, stacks included.
        before: the same half a second earlier, if that was asked for.
        silent_hosts: machines that did not answer.
        threads: whether the tree has all threads, or the main ones alone.
    """

    snapshots: tuple[RankSnapshot, ...]
    before: tuple[RankSnapshot, ...] = ()
    silent_hosts: tuple[str, ...] = ()
    threads: bool = False
    seconds: float = 0.0
    _sources: Mapping[str, str] = field(default_factory=dict)  # of cells, by the file names of their frames
    _by_rank: dict[int, tuple[ThreadStack, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seen in self.snapshots:
            self._by_rank[seen.rank] = tuple(sorted(seen.stacks, key=lambda stack: not stack.main))

    @cached_property
    def tree(self) -> stack_tree.StackTree:
        """All stacks merged: what ranks have in common once, with the set of ranks at each fork."""
        return stack_tree.merge(self.snapshots, main_only=not self.threads)

    @property
    def moved(self) -> dict[int, bool]:
        """With two looks: which ranks were somewhere else the second time."""
        return stack_tree.moved(self.before, self.snapshots) if self.before else {}

    @property
    def problems(self) -> dict[int, str]:
        """Of ranks whose stacks could not be had, or only in part: why, and what would help."""
        return {seen.rank: seen.problem for seen in self.snapshots if seen.problem}

    @property
    def text(self) -> str:
        """What `%mesh stacks` prints, without colours."""
        return self.as_text()

    def as_text(self, *, color: bool = False) -> str:
        """The tree, outermost frame first."""
        return stack_tree.as_text(self.tree, color=color, moved=self.moved or None, source_of=self.source_of)

    def source_of(self, file: str, line: int) -> str | None:
        """A line of a cell, or of a file that is here as well as there."""
        source = self._sources.get(file)
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

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre class='meshbook-stacks'>{html.escape(self.text)}</pre>"


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def look(session: Session, ranks: Ranks, *, stacks: bool = True) -> messages.SnapshotsTaken:
    """What these ranks are doing now, from inside where they answer, from outside where they do not. Blocks, at most
    3 s; milliseconds where all answer.

    Raises:
        NotAttached: the mesh has ended.
        MeshTimeout: the supervisor does not answer.
    """
    session.check()
    _not_while_listening(session)
    command = messages.TakeSnapshots(call=session.connection.next_call(), ranks=ranks, stacks=stacks)
    try:
        taken: messages.SnapshotsTaken = session.connection.request(command).result(_ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise MeshTimeout(f"the supervisor of {session.name!r} did not answer within {_ANSWER_TIMEOUT_S:g} s") from None
    return taken


def why(session: Session, ranks: Ranks) -> Why:
    """Why the mesh does not get on. Looks twice where one look does not tell. Blocks, at most 3 s.

    All ranks are looked at, for the guilty one may be any; findings are told of those that concern `ranks`.
    """
    assert session.axes is not None
    started = time.monotonic()
    everyone = tuple(sorted(session.axes.ranks))
    taken = look(session, everyone)
    found = _explained(session, taken)
    took = time.monotonic() - started
    if not all(one.sure for one in found) and 2 * took + MOVES_IN_S < _WHY_WITHIN_S:
        threading.Event().wait(MOVES_IN_S)
        first, taken = taken, look(session, everyone)
        found = _explained(session, taken, first)
    mine = set(ranks)
    about_us = tuple(one for one in found if not one.ranks or mine & {*one.ranks, *one.others})
    return Why(about_us or (_nothing(ranks),), taken.snapshots, taken.silent_hosts, time.monotonic() - started)


def stacks(session: Session, ranks: Ranks, *, twice: bool = False, threads: bool = False) -> Stacks:
    """The stacks of these ranks. Blocks, at most 3 s; with `twice` half a second more and another look.

    Args:
        twice: look again after half a second, and tell who moved.
        threads: all threads, not only the main ones.
    """
    started = time.monotonic()
    before: tuple[RankSnapshot, ...] = ()
    taken = look(session, ranks)
    if twice:
        threading.Event().wait(MOVES_IN_S)
        before, taken = taken.snapshots, look(session, ranks)
    took = time.monotonic() - started
    return Stacks(taken.snapshots, before, taken.silent_hosts, threads, took, _sources(session, taken.snapshots))


def picture(session: Session, *, history_s: float = 0.001) -> Picture:
    """Everything that the supervisor knows of the mesh now. Blocks a few milliseconds."""
    session.check()
    _not_while_listening(session)
    return onlooker.look_once(session.connection, history_s=history_s)


def _explained(
    session: Session, taken: messages.SnapshotsTaken, first: messages.SnapshotsTaken | None = None
) -> tuple[Finding, ...]:
    return diagnose.explain(
        taken.snapshots,
        axes=session.axes.axes if session.axes is not None else None,
        silent_hosts=taken.silent_hosts,
        earlier=first.snapshots if first is not None else (),
    )


def _sources(session: Session, snapshots: tuple[RankSnapshot, ...]) -> dict[str, str]:
    """The sources of the cells that these ranks run, by the file names of their frames."""
    running = {seen.file: seen.cell for seen in snapshots if seen.file and seen.cell}
    if not running or session.info.cells_run > _CELLS_READ:
        return {}
    by_label = {entry.label: entry.source for entry in session.history()}
    # Without leading empty lines, as IPython runs a cell: that is what the lines of its frames count.
    return {file: _LEADING_EMPTY.sub("", by_label[cell]) for file, cell in running.items() if cell in by_label}


def _nothing(ranks: Ranks) -> Finding:
    return Finding(kind="idle", ranks=ranks, title=f"Nothing that was found concerns ranks {format_ranks(ranks)}")


def _not_while_listening(session: Session) -> None:
    if threading.current_thread() is session.connection.thread:
        raise UsageError(
            "this runs in the thread that would have to bring the answer (a callback of the mesh's news); ask from "
            "another thread"
        )


# ---------------------------------------------------------------------------------------------------------------------
# As tables and columns


def health_table(picture: Picture, ranks: Ranks) -> Table:
    """A row per rank: what it does, how busy it is, what it waits for."""
    shown = [rank for rank in picture.ranks if rank.rank in set(ranks)]
    rows = tuple(
        (
            str(rank.rank),
            ", ".join([*doing(rank), *(["asks for input()"] if rank.asking else [])]),
            f"{rank.waits_in} since {format_age(picture.at - rank.waits_since)}"
            if rank.waits_in and rank.waits_since is not None
            else "",
            _number(rank.cpu_percent, " %"),
            _size(rank.rss_bytes),
            _number(rank.gpu_utilisation, " %"),
            _size(rank.gpu_allocated_bytes),
            _number(rank.collectives_per_s, "/s") if rank.num_collectives else "",
            _number(rank.steps_per_s, "/s") if rank.steps else "",
            f"{rank.gil_lag_s:.1f} s" if rank.gil_lag_s is not None and rank.gil_lag_s >= 0.5 else "",
            f"{rank.beat_age_s} s ago" if rank.beat_age_s else "",
        )
        for rank in shown
    )
    names = (
        "rank", "state", "waits in", "cpu", "memory", "gpu", "gpu memory", "collectives", "steps", "gil kept",
        "last beat",
    )  # fmt: skip
    notes = tuple(dict.fromkeys(one.title + "." for one in picture.findings))
    states = [rank.state for rank in shown]
    counted = ", ".join(f"{states.count(state)} {STATES[state]}" for state in STATES if state in states)
    return Table(f"Mesh {picture.name}: {counted or 'no ranks'}.", names, rows, notes)


def memory_table(picture: Picture, ranks: Ranks) -> Table:
    """A row per rank: memory of the process and of its GPU."""
    rows = tuple(
        (
            str(rank.rank),
            rank.host,
            _size(rank.rss_bytes),
            _size(rank.peak_rss_bytes),
            rank.device if rank.gpu is None else f"{rank.device} ({rank.gpu})",
            _size(rank.gpu_allocated_bytes),
            _size(rank.gpu_reserved_bytes),
            _size(rank.gpu_peak_bytes),
            _size(rank.gpu_used_bytes),
            _size(rank.gpu_total_bytes),
        )
        for rank in picture.ranks
        if rank.rank in set(ranks)
    )
    names = (
        "rank", "host", "memory", "peak", "device", "gpu allocated", "gpu reserved", "gpu peak", "gpu used", "gpu size",
    )  # fmt: skip
    return Table(f"Mesh {picture.name}: memory of each rank.", names, rows)


def memory_columns(session: Session, ranks: Ranks, *, history: bool, kind: str | None) -> Any:
    """See `Mesh.memory`."""
    seen = picture(session, history_s=_EVER_S if history else 0.001)
    mine = [rank for rank in seen.ranks if rank.rank in set(ranks)]
    if history:
        table: dict[str, list[Any]] = {"rank": [], "time": [], "rss_bytes": [], "gpu_allocated_bytes": []}
        for rank in mine:
            gpu = dict(seen.series.points("gpu_allocated_bytes", rank.rank))
            for at, value in seen.series.points("rss_bytes", rank.rank):
                for name, cell in zip(table, (rank.rank, at, int(value), gpu.get(at)), strict=True):
                    table[name].append(cell)
        return columns.frame(table, kind)
    fields = (
        "rank", "host", "device", "rss_bytes", "peak_rss_bytes", "gpu_allocated_bytes", "gpu_reserved_bytes",
        "gpu_peak_bytes", "gpu_used_bytes", "gpu_total_bytes",
    )  # fmt: skip
    return columns.frame({name: [getattr(rank, name) for rank in mine] for name in fields}, kind)


def metric_columns(session: Session, ranks: Ranks, *, kind: str | None) -> Any:
    """See `Mesh.metrics`."""
    names = ("name", "rank", "step", "value", "time")
    mine = set(ranks)
    rows = [row for row in picture(session, history_s=_EVER_S).scalars.rows() if row[1] in mine]
    return columns.frame({name: [row[at] for row in rows] for at, name in enumerate(names)}, kind)


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g}{unit}"


def _size(count: int | None) -> str:
    return "" if count is None else format_bytes(count)
