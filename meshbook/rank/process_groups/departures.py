"""Ranks that have left a call: which collectives wait for them in vain, and how that is reported.

Pure functions of recorded collectives and positions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from meshbook.diagnose.source_files import cell_label, is_user_file
from meshbook.errors import CollectiveAborted
from meshbook.ids import name_ranks
from meshbook.rank.process_groups import positions
from meshbook.rank.process_groups.ring import Collective, GroupLabel, UserLine
from meshbook.wire.messages import POINT_TO_POINT, CollectiveCall, Outcome, RankError, RankPosition

# Names a line of the user's code; returns "line 3 of cell 2".
Locate = Callable[[str, int], str]


def find_doomed_wait(
    running: Iterable[Collective],
    connecting: Iterable[GroupLabel],
    departed: tuple[RankPosition, ...],
    *,
    rank: int,
    recorded: Callable[[], Iterable[Collective]],
    locate: Locate,
) -> CollectiveAborted | None:
    """Return the error for a thread of this rank that waits for departed ranks; None if no thread does.

    Args:
        running: the collectives in flight.
        connecting: the groups that wait for their members to connect.
        recorded: returns the collectives of the call.
    """
    for collective in running:
        left = [one for one in departed if positions.can_never_complete(collective, one, rank)]
        if left:
            return _collective_aborted(collective, left, rank, recorded, locate)
    for label in connecting:
        left = [one for one in departed if positions.can_never_form(label, one)]
        if left:
            return _make_aborted_error("new_group", "new_group", None, left, locate)
    return None


def find_transport_cause(
    error: RankError | None,
    recorded: Sequence[Collective],
    departed: tuple[RankPosition, ...],
    *,
    rank: int,
    locate: Locate,
) -> CollectiveAborted | None:
    """Return the cause of a gloo connection error; None if the error is another one, or no departure explains it.

    A rank that waits for a departed rank may first see a third rank, released before it, close its connections.
    Only the cause is informative.

    Args:
        recorded: the collectives since the beginning of the call, the oldest first.
    """
    if error is None or error.ename != "RuntimeError" or "gloo/transport" not in error.evalue:
        return None
    for collective in reversed(recorded):
        if collective.error is None:
            continue
        left = [one for one in departed if positions.can_never_complete(collective, one, rank)]
        if left:
            return _collective_aborted(collective, left, rank, lambda: recorded, locate)
    return None


def describe_leave_reason(
    rank: int,
    outcome: Outcome,
    release_error: CollectiveAborted | None,
    cell_title: Callable[[str], str | None] = cell_label,
) -> str:
    """Return why others wait for this rank in vain, "rank 1 raised ValueError: no at line 3"; "" on success.

    Args:
        release_error: the error that released this rank from the call, if any.
        cell_title: returns "cell 12" for the file of a cell.
    """
    error = outcome.error
    if outcome.status == "ok":
        return ""
    if error is not None and error.released_from is not None and release_error is not None:
        return release_error.cause  # it left because of another rank, which is the cause of all
    if outcome.status == "interrupted" or error is None:
        return f"rank {rank} was stopped"
    frame = next((frame for frame in reversed(error.frames) if is_user_file(frame.file)), None)
    location = "" if frame is None else f" at {make_locate(error.frames[0].file, cell_title)(frame.file, frame.line)}"
    text = error.evalue.splitlines()[0] if error.evalue else ""
    return f"rank {rank} raised {error.ename}{': ' if text else ''}{text}{location}"


def _collective_aborted(
    collective: Collective,
    left: Sequence[RankPosition],
    rank: int,
    recorded: Callable[[], Iterable[Collective]],
    locate: Locate,
) -> CollectiveAborted:
    what = f"{collective.op} #{collective.group_seq}"
    failed = [one for one in left if positions.has_failed_in(collective, one)]
    details = ""
    if not failed and not any(one.cause for one in left) and collective.op not in POINT_TO_POINT:
        own = positions.describe_calls(
            one for one in recorded() if one.label is collective.label and one.generation == collective.generation
        )
        details = _describe_counts(collective, left, rank, own, locate)
    return _make_aborted_error(
        collective.op, what, collective.line, failed or left, locate, has_failed=bool(failed), details=details
    )


def _describe_counts(
    collective: Collective, left: Sequence[RankPosition], rank: int, own: Sequence[CollectiveCall], locate: Locate
) -> str:
    """Return how many collectives ranks came to, and from which on they differ; "" if others made none in this call."""
    groups = {one.rank: group for one in left for group in one.groups if group.name == collective.group}
    if not any(group.has_new_collectives for group in groups.values()):
        return ""
    ranks_by_count: dict[int, list[int]] = {}
    for other, group in groups.items():
        ranks_by_count.setdefault(group.num_started, []).append(other)
    counts = ", ".join(f"{name_ranks(ranks)} to {count}" for count, ranks in sorted(ranks_by_count.items()))
    text = f"rank {rank} came to {collective.group_seq} collectives, {counts}"
    found = {other: positions.first_difference(own, group) for other, group in groups.items()}
    differences = {other: difference for other, difference in found.items() if difference is not None}
    if not differences:
        return (
            f"{text}. Which one of rank {rank}'s is too many is not known: unless it is the last, those after it may "
            "have mixed different values"
        )
    first = min(differences.values(), key=lambda one: one.own.seq)
    alike = name_ranks(other for other, difference in differences.items() if difference == first)
    number = f"#{first.own.seq}"
    return (
        f"{text}. They differ from {number} on{'' if first.is_first else ', or from an earlier one'}: "
        f"{_describe_call(first.own, locate)} on rank {rank}, {_describe_call(first.other, locate)} on {alike}. "
        f"What {number} and those after it have computed may mix different values"
    )


def _describe_call(call: CollectiveCall, locate: Locate) -> str:
    text = f"{call.op} of {call.shapes}" if call.shapes else call.op
    if call.file:
        text += f" at {locate(call.file, call.line)}"
    if call.caller_file:
        text += f", called at {locate(call.caller_file, call.caller_line)}"
    return text


def _make_aborted_error(
    op: str,
    what: str,
    line: UserLine | None,
    left: Sequence[RankPosition],
    locate: Locate,
    *,
    has_failed: bool = False,
    details: str = "",
) -> CollectiveAborted:
    """
    Args:
        left: ranks that it waits for in vain. One that failed, or was stopped, is the cause.
        details: a further sentence.
    """
    where = op if line is None else f"{op} at {locate(line.file, line.line)}"
    culprit = next((one for one in left if one.cause), None)
    ranks = tuple(sorted(one.rank for one in left)) if culprit is None else (culprit.rank,)
    cause = "" if culprit is None else culprit.cause
    prefix = f"{name_ranks(ranks)} {'failed in' if has_failed else 'ended the cell without coming to'}"
    text = f"{what} cannot be completed: {cause or f'{prefix} it'}"
    return CollectiveAborted(
        f"{text}\n{details}" if details else text,
        ranks=ranks,
        cause=cause or f"{prefix} {what}",  # for ranks that wait for this rank in turn
        where=where,
    )


def make_locate(running_file: str | None, cell_title: Callable[[str], str | None] = cell_label) -> Locate:
    """Return what names a line: `line 3` of the running cell, `line 3 of cell 2` of another one, `train.py:3`."""

    def locate(file: str, line: int) -> str:
        if file == running_file:
            return f"line {line}"
        cell = cell_title(file) or cell_label(file)
        return f"line {line} of {cell}" if cell is not None else f"{os.path.basename(file)}:{line}"

    return locate
