"""Fold how a call ended on many ranks: equal outcomes once, equal failures once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from meshbook.errors import Failure, Released, TransferError
from meshbook.fold.numbers import FoldMember, fold, template_of
from meshbook.ids import Ranks
from meshbook.wire.messages import CallFinished, Frame, Message, Outcome, OutcomeGroup, RankError, Refused

_encode = msgspec.msgpack.Encoder().encode


def fold_outcomes(pairs: Iterable[tuple[int, Outcome]]) -> tuple[OutcomeGroup, ...]:
    """Return each distinct outcome once, with its ranks. Ordered by lowest rank.

    Outcomes are equal if their encoded bytes are, so fields added later are compared too.
    """
    return merge_parts([tuple(OutcomeGroup((rank,), outcome) for rank, outcome in pairs)])


def merge_parts(part_lists: Iterable[Sequence[OutcomeGroup]]) -> tuple[OutcomeGroup, ...]:
    """Merge the outcome groups of several hosts. Ordered by lowest rank."""
    ranks_of: dict[bytes, list[int]] = {}
    outcomes: dict[bytes, Outcome] = {}
    for parts in part_lists:
        for part in parts:
            packed = _encode(part.outcome)
            if packed in ranks_of:
                ranks_of[packed].extend(part.ranks)
            else:
                ranks_of[packed] = list(part.ranks)
                outcomes[packed] = part.outcome
    folded = [OutcomeGroup(tuple(sorted(set(ranks))), outcomes[packed]) for packed, ranks in ranks_of.items()]
    return tuple(sorted(folded, key=lambda part: part.ranks))


def failure_report_for(report: Message, error: TransferError) -> Message:
    """Return the reply for a report too large for a message: the call has ended, and why values are missing."""
    call = getattr(report, "call", None)
    if not isinstance(report, CallFinished):
        return Refused(call=call, error="TransferError", text=str(error))
    text = f"the ranks' values together do not fit: {error}"
    outcome = Outcome(status="error", error=RankError(ename="TransferError", evalue=text, traceback=(text,)))
    ranks = tuple(sorted(rank for part in report.outcomes for rank in part.ranks))
    return CallFinished(
        call=report.call, outcomes=(OutcomeGroup(ranks, outcome),), seconds=report.seconds, lost=report.lost
    )


def fold_errors(parts: Iterable[OutcomeGroup]) -> tuple[Failure, ...]:
    """Return each distinct failure once: same exception, same location, messages that differ at most in numbers.

    Covers "error" and "interrupted" outcomes. A lost rank is no failure of the code it ran, and `fold_released` reports
    ranks that waited for those that failed. Where messages differ in numbers, `evalue` and the last line of the
    traceback show the range. The rest of the traceback is that of the lowest rank. If any rank raised, interrupted
    ranks get no traceback, as they say nothing about the cause.

    Returns:
        Raised failures before interrupted ones; then by number of ranks, largest first; then by lowest rank.
    """
    parts = tuple(parts)
    raised = any(part.outcome.status == "error" and not _was_released(part) for part in parts)
    stopped: set[int] = set()
    errors_by_key: dict[tuple[str, tuple[Frame, ...], str], list[tuple[FoldMember, RankError]]] = {}
    for part in sorted(parts, key=lambda one: one.ranks):
        error = part.outcome.error
        if error is None or part.outcome.status not in ("error", "interrupted") or _was_released(part):
            continue
        if part.outcome.status == "interrupted":
            stopped.update(part.ranks)
            if raised:
                error = msgspec.structs.replace(error, traceback=(), frames=())
        template = template_of(error.evalue)
        key = (error.ename, error.frames, template.key)
        errors_by_key.setdefault(key, []).append((FoldMember(part.ranks, error.evalue, template.numbers), error))
    failures: list[Failure] = []
    for group in errors_by_key.values():
        first = group[0][1]
        folded = fold([one for one, _ in group], "short")
        assert folded is not None  # as it may be shortened
        traceback = first.traceback
        if traceback and folded.text != first.evalue:
            traceback = (*traceback[:-1], _replace_message(traceback[-1], first.evalue, folded.text))
        failures.append(Failure(folded.ranks, first.ename, folded.text, traceback))
    return tuple(
        sorted(failures, key=lambda failure: (failure.ranks[0] in stopped, -len(failure.ranks), failure.ranks))
    )


def fold_released(parts: Iterable[OutcomeGroup]) -> tuple[Released, ...]:
    """Return the ranks that waited in a collective others had left, by where they waited. Ordered by lowest rank."""
    ranks_at: dict[str, list[int]] = {}
    for part in parts:
        if _was_released(part):
            assert part.outcome.error is not None
            ranks_at.setdefault(part.outcome.error.released_from or "", []).extend(part.ranks)
    released = [Released(tuple(sorted(ranks)), where) for where, ranks in ranks_at.items()]
    return tuple(sorted(released, key=lambda one: one.ranks))


def _was_released(part: OutcomeGroup) -> bool:
    return part.outcome.error is not None and part.outcome.error.released_from is not None


def ranks_with_status(parts: Iterable[OutcomeGroup], *statuses: str) -> Ranks:
    """Return the ranks whose outcome has one of these statuses."""
    return tuple(sorted(rank for part in parts if part.outcome.status in statuses for rank in part.ranks))


def _replace_message(line: str, message: str, folded: str) -> str:
    """Return a traceback's last line with the folded message in place of one rank's."""
    before, found, after = line.rpartition(message)
    return before + folded + after if found else line
