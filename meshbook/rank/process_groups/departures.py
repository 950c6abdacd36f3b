"""Ranks that have left a call: which collectives wait for them in vain, and how that is reported.

Pure functions of recorded collectives and positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from meshbook.diagnose.source_files import cell_label, is_user_file
from meshbook.errors import CollectiveAborted
from meshbook.rank.process_groups import positions
from meshbook.rank.process_groups.ring import Collective, GroupLabel, UserLine
from meshbook.wire.messages import Outcome, RankError, RankPosition


def find_doomed_wait(
    running: Iterable[Collective],
    connecting: Iterable[GroupLabel],
    departed: tuple[RankPosition, ...],
    *,
    rank: int,
    running_file: str | None,
) -> CollectiveAborted | None:
    """Return the error for a thread of this rank that waits for a departed rank; None if no thread does.

    Args:
        running: the collectives in flight.
        connecting: the groups that wait for their members to connect.
        running_file: the file name of the running cell.
    """
    for collective in running:
        for left in departed:
            if positions.can_never_complete(collective, left, rank):
                return _collective_aborted(collective, left, running_file)
    for label in connecting:
        for left in departed:
            if positions.can_never_form(label, left):
                return _make_aborted_error("new_group", "new_group", None, left, running_file)
    return None


def find_transport_cause(
    error: RankError | None,
    recorded: Iterable[Collective],
    departed: tuple[RankPosition, ...],
    *,
    rank: int,
    running_file: str | None,
) -> CollectiveAborted | None:
    """Return the cause of a gloo connection error; None if the error is another one, or no departure explains it.

    A rank that waits for a departed rank may first see a third rank, released before it, close its connections.
    Only the cause is informative.

    Args:
        recorded: the collectives since the beginning of the call, the newest first.
    """
    if error is None or error.ename != "RuntimeError" or "gloo/transport" not in error.evalue:
        return None
    for collective in recorded:
        for left in departed:
            if collective.error is not None and positions.can_never_complete(collective, left, rank):
                return _collective_aborted(collective, left, running_file)
    return None


def describe_leave_reason(rank: int, outcome: Outcome, release_error: CollectiveAborted | None) -> str:
    """Return why others wait for this rank in vain, "rank 1 raised ValueError: no at line 3"; "" on success.

    Args:
        release_error: the error that released this rank from the call, if any.
    """
    error = outcome.error
    if outcome.status == "ok":
        return ""
    if error is not None and error.released_from is not None and release_error is not None:
        return release_error.cause  # it left because of another rank, which is the cause of all
    if outcome.status == "interrupted" or error is None:
        return f"rank {rank} was stopped"
    frame = next((frame for frame in reversed(error.frames) if is_user_file(frame.file)), None)
    location = "" if frame is None else f" at {_format_location(frame.file, frame.line, error.frames[0].file)}"
    text = error.evalue.splitlines()[0] if error.evalue else ""
    return f"rank {rank} raised {error.ename}{': ' if text else ''}{text}{location}"


def _collective_aborted(collective: Collective, left: RankPosition, running_file: str | None) -> CollectiveAborted:
    what = f"{collective.op} #{collective.group_seq}"
    has_failed = positions.has_failed_in(collective, left)
    return _make_aborted_error(collective.op, what, collective.line, left, running_file, has_failed=has_failed)


def _make_aborted_error(
    op: str,
    what: str,
    line: UserLine | None,
    left: RankPosition,
    running_file: str | None,
    *,
    has_failed: bool = False,
) -> CollectiveAborted:
    where = op if line is None else f"{op} at {_format_location(line.file, line.line, running_file)}"
    prefix = f"rank {left.rank} {'failed in' if has_failed else 'ended the cell without coming to'}"
    reason = left.cause or f"{prefix} it"
    cause = left.cause or f"{prefix} {what}"  # for ranks that wait for this rank in turn
    return CollectiveAborted(f"{what} cannot be completed: {reason}", ranks=(left.rank,), cause=cause, where=where)


def _format_location(file: str, line: int, running_file: str | None) -> str:
    """Return `line 3` for the running cell, `line 3 of cell 2` for another one, `train.py:3` for a file."""
    if file == running_file:
        return f"line {line}"
    cell = cell_label(file)
    return f"line {line} of {cell}" if cell is not None else f"{os.path.basename(file)}:{line}"
