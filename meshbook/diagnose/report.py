"""Findings: what `diagnose` says about a mesh, and what each is completed with besides its sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import product
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from meshbook.diagnose import snapshot_reader
from meshbook.diagnose.evidence import Evidence
from meshbook.diagnose.kinds import KINDS
from meshbook.diagnose.snapshot_reader import SourceLocation
from meshbook.diagnose.wording import MAX_LOCATIONS, group_ranks_by
from meshbook.ids import Ranks, format_ranks, name_ranks


class Finding(Struct, frozen=True, omit_defaults=True):
    """One reason why the mesh makes no progress, or the statement that nothing is wrong."""

    kind: str  # a key of `kinds.KINDS`
    ranks: Ranks  # the ranks that cause it, or that it is about
    title: str  # one sentence: which ranks, where, what, and which ranks wait for it
    others: Ranks = ()  # ranks that wait because of it
    evidence: tuple[str, ...] = ()  # what the finding is based on, a line each
    next_step: str = ""  # one or two sentences, with the command to type
    cell: str | None = None  # "cell 7"
    line: int | None = None  # line of `file` at which the first of `ranks` is
    file: str | None = None
    sure: bool = True  # False: shown with "Perhaps"
    waits: tuple[tuple[Ranks, Ranks, str], ...] = ()  # (waiting ranks, ranks waited for, operation): "all_reduce #41"
    looked_at: float | None = None  # wall-clock time that its durations end at; None: it is shown at once

    @property
    def sentence(self) -> str:
        """Return the title as shown, without a full stop; if not sure, it begins with "Perhaps"."""
        return self.title if self.sure else f"Perhaps: {self.title[:1].lower()}{self.title[1:]}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the evidence as shown: of a finding that stays, first when the ranks were looked at."""
        if self.looked_at is None:
            return self.evidence
        return f"looked at {datetime.fromtimestamp(self.looked_at):%H:%M:%S}", *self.evidence


def dated(found: Iterable[Finding], looked_at: float) -> tuple[Finding, ...]:
    """Return findings that stay where they are shown, with the wall-clock time that their durations end at."""
    return tuple(replace(one, looked_at=looked_at) for one in found)


def make_finding(
    evidence: Evidence,
    kind: str,
    ranks: Ranks,
    title: str,
    *,
    at: SourceLocation | None = None,
    others: Iterable[int] = (),
    lines: Sequence[str] = (),
    sure: bool = True,
) -> Finding:
    """Return a finding, completed with its next step, its place, and what is known of its ranks beside the lines.

    Args:
        ranks: those that cause it.
        others: those that wait because of it; they may contain `ranks`.
    """
    waiting = tuple(sorted(set(others).difference(ranks)))
    involved = [rank for rank in (*ranks, *waiting) if rank in evidence.snapshots]
    endpoint_lines = _endpoint_lines(evidence, involved)
    actor_lines = [wait.phrase for rank in involved for wait in evidence.actor_waits.waits_of_rank(rank)]
    by_axis = _axis_selector(evidence, ranks)
    all_lines = [
        *filter(None, lines),
        *endpoint_lines,
        *(actor_lines[:MAX_LOCATIONS] if kind != "actor-deadlock" else ()),
        *([f"{name_ranks(ranks)}: all with {by_axis}"] if by_axis else ()),
    ]
    return Finding(
        kind=kind,
        ranks=ranks,
        others=waiting,
        title=title,
        evidence=tuple(dict.fromkeys(all_lines)),
        next_step=_next_step(evidence, kind, ranks, in_endpoint=bool(endpoint_lines)),
        cell=_cell_of(evidence, ranks, at),
        line=at.line if at is not None else None,
        file=at.file or None if at is not None else None,
        sure=sure,
        waits=_wait_edges(evidence, involved),
    )


def _next_step(evidence: Evidence, kind: str, ranks: Ranks, *, in_endpoint: bool) -> str:
    pids = [evidence.snapshots[rank].pid for rank in ranks if rank in evidence.snapshots]
    words = {
        "ranks": format_ranks(ranks) if ranks else "",
        "first": ranks[0] if ranks else "",
        "name": name_ranks(ranks) if ranks else "the ranks",
        "pids": " ".join(str(pid) for pid in pids if pid is not None) or "PID",
    }
    step = KINDS[kind].next_step.format(**words)
    stop = KINDS[kind].interrupt_hint.format(**words)
    if in_endpoint:
        stop = "Stop where the answer is awaited, or interrupt(actors), interrupts the endpoint; the actor lives."
    return f"{step} {stop}".strip()


def _cell_of(evidence: Evidence, ranks: Ranks, at: SourceLocation | None) -> str | None:
    first = evidence.snapshots.get(ranks[0]) if ranks else None
    if (at is not None and at.cell is not None) or first is None:
        return at.cell if at is not None else None
    return first.cell or first.last_cell


def _endpoint_lines(evidence: Evidence, ranks: Sequence[int]) -> list[str]:
    """Return a line for each actor's endpoint that ranks run."""
    endpoints = {rank: snapshot_reader.actor_endpoint_of(evidence.snapshots[rank]) for rank in sorted(ranks)}
    return [
        f"{name_ranks(those)}: {' in its endpoint '.join(endpoint)}"
        for endpoint, those in group_ranks_by(endpoints, endpoints.__getitem__)
        if endpoint is not None
    ]


def _wait_edges(evidence: Evidence, ranks: Iterable[int]) -> tuple[tuple[Ranks, Ranks, str], ...]:
    waits = {rank: evidence.waits[rank] for rank in sorted(ranks) if rank in evidence.waits}
    edges = group_ranks_by(waits, lambda rank: (waits[rank].for_ranks, evidence.op_name(waits[rank].op)))
    return tuple((those, for_ranks, what) for (for_ranks, what), those in edges)


def _axis_selector(evidence: Evidence, ranks: Ranks) -> str | None:
    """Return `dp=1` if these are exactly the ranks with that coordinate."""
    names, sizes = list(evidence.axes), list(evidence.axes.values())
    total = prod(sizes)
    if len(ranks) < 2 or len(names) < 2 or total != len(evidence.world_ranks) or len(ranks) == total:
        return None
    points = list(product(*map(range, sizes)))
    chosen = [points[rank] for rank in ranks if rank < total]
    for axis, name in enumerate(names):
        coordinates = {point[axis] for point in chosen}
        if len(coordinates) == 1 and len(ranks) * sizes[axis] == total:
            return f"{name}={coordinates.pop()}"
    return None
