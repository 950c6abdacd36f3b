"""The error that a finished call stands for, as one exception and as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from meshbook.errors import (
    CellError,
    CellInterrupted,
    Failure,
    MeshbookError,
    RankLost,
    Released,
    describe_exit,
)
from meshbook.fold import rendering
from meshbook.fold.device_errors import dead_context_note
from meshbook.fold.heal_advice import heal_advice
from meshbook.fold.outcomes import fold_errors, fold_released, ranks_with_status
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import OutcomeGroup

_MAX_SUMMARIZED = 4  # failures, or lost ranks, that a sentence names


def error_from(finished: messages.CallFinished, label: str = "the cell") -> MeshbookError | None:
    """Return the exception that a finished call stands for; None if it succeeded on every rank."""
    outcomes = finished.outcomes
    statuses = {part.outcome.status for part in outcomes}
    if not statuses - {"ok"}:
        return None
    if finished.lost or "lost" in statuses:
        return _rank_lost_error(finished, label)
    succeeded = ranks_with_status(outcomes, "ok")
    failures, released = fold_errors(outcomes), fold_released(outcomes)
    released_ranks = {rank for one in released for rank in one.ranks}
    raised = not released_ranks.issuperset(ranks_with_status(outcomes, "error"))
    if "interrupted" in statuses and not raised:
        summary = f"{label} was stopped on {name_ranks(ranks_with_status(outcomes, 'interrupted'))}"
        if succeeded:
            summary += f"; {name_ranks(succeeded)} had ended already"
        if released:
            summary += f"; {rendering.render_released(released)}"
        return CellInterrupted(failures, succeeded, released=released, summary=summary)
    if released and not failures:  # nothing was raised: a rank ended the cell without joining the collective
        failures = _released_failures(outcomes)
    if failures:
        return CellError(failures, succeeded, released=released, summary=_summarize(failures, succeeded, released))
    return CellError((), succeeded, summary=f"{name_ranks(ranks_with_status(outcomes, 'skipped'))} did not answer")


def render_error(error: MeshbookError, with_source: Callable[[str], str] = str) -> MeshbookError:
    """Attach the ranks' tracebacks to an error, for IPython and for plain Python.

    Args:
        with_source: completes a frame with the source that this process knows, of a function that it has sent.
    """
    if isinstance(error, (CellError, RankLost)) and not error.rendered:
        error.failures = tuple(replace(one, traceback=tuple(map(with_source, one.traceback))) for one in error.failures)
        lines = rendering.render_errors(
            error.failures, getattr(error, "succeeded", ()), None, released=getattr(error, "released", ())
        )
        if isinstance(error, RankLost):
            lines = [f"\x1b[31mRankLost\x1b[39m: {error}", *(["", *lines] if error.failures else [])]
        elif not error.failures:
            lines = [f"{type(error).__name__}: {error}"]
        error.rendered = tuple(lines)
        if error.failures:
            error.add_note(rendering.plain_text("\n".join(lines)))
    return error


def _released_failures(parts: Sequence[OutcomeGroup]) -> tuple[Failure, ...]:
    """Return the errors of released ranks as failures of their own."""
    own = []
    for part in parts:
        error = part.outcome.error
        if error is not None and error.released_from is not None:
            outcome = msgspec.structs.replace(part.outcome, error=msgspec.structs.replace(error, released_from=None))
            own.append(OutcomeGroup(part.ranks, outcome))
    return fold_errors(own)


def _summarize(failures: Sequence[Failure], succeeded: Sequence[int], released: Sequence[Released]) -> str:
    text = "; ".join(
        f"{name_ranks(failure.ranks)}: {failure.ename}{failure.evalue and f': {failure.evalue}'}"
        for failure in failures[:_MAX_SUMMARIZED]
    )
    for failure in failures:
        if note := dead_context_note(failure.ranks, failure.evalue):
            text += f"\n{note}"
    if len(failures) > _MAX_SUMMARIZED:
        text += f"; and {len(failures) - _MAX_SUMMARIZED} more"
    if released:
        text += f"; {rendering.render_released(released)}"
    return text + (f" ({name_ranks(succeeded)} ran to the end)" if succeeded else "")


def _rank_lost_error(finished: messages.CallFinished, label: str) -> RankLost:
    exited = finished.lost
    lost = tuple(sorted({one.rank for one in exited}.union(ranks_with_status(finished.outcomes, "lost"))))
    survivors = tuple(sorted({rank for part in finished.outcomes for rank in part.ranks} - set(lost)))
    first = exited[0] if exited else None
    message = f"{_how_lost(finished, lost, label)}. {_survivors_state(finished, survivors)}".rstrip()
    if first is not None:
        message += _last_traces(first)
    needs = [one.heals_when for one in exited]
    if survivors:
        message += (
            f"\nNext: {heal_advice(len(lost), needs)}, and the others keep what they hold; or go on with these alone "
            f"(%%mesh --ranks {format_ranks(survivors)})."
        )
    elif first is not None and first.cause is not None:
        message += f"\nNext: {heal_advice(len(lost), needs)}."
    # The message says that the survivors were stopped; where each of them was does not explain the loss.
    own = fold_errors([part for part in finished.outcomes if part.outcome.status != "interrupted"])
    if first is None:
        return RankLost(message, ranks=lost, survivors=survivors, failures=own)
    return RankLost(
        message,
        ranks=lost,
        host=first.host,
        pid=first.pid,
        signal=describe_exit(first.signal, None).rsplit(" ", 1)[-1] if first.signal is not None else None,
        exit_code=first.exit_code,
        last_lines=first.last_lines,
        last_collective=first.last_collective,
        survivors=survivors,
        failures=own,
    )


def _how_lost(finished: messages.CallFinished, lost: Ranks, label: str) -> str:
    """Return how ranks were lost, as sentences without the last full stop."""
    if finished.lost:
        first = finished.lost[0]
        if (
            len(lost) > 1
            and first.cause is not None
            and {(one.host, one.cause) for one in finished.lost} == {(first.host, first.cause)}
        ):  # all ranks of a machine
            return f"{name_ranks(lost)} on {first.host}: {first.cause.removeprefix('is lost: ')}, while {label} ran"
        alike: dict[tuple[str, str], list[messages.RankExited]] = {}
        for one in sorted(finished.lost, key=lambda one: one.rank):
            alike.setdefault((one.host, one.description), []).append(one)
        text = "; ".join(
            f"{name_ranks(one.rank for one in ranks)} ({_name_pids(ranks)} on {host}) "
            f"{how if len(ranks) == 1 else how.replace('was ', 'were ', 1)} while {label} ran"
            for (host, how), ranks in list(alike.items())[:_MAX_SUMMARIZED]
        )
        if any(one.signal == 9 and not one.is_killed_by_us for one in finished.lost):
            text += ". SIGKILL is also how the system ends a process when memory runs out"
        return text
    for part in finished.outcomes:
        if part.outcome.error is not None and part.ranks[0] in lost:
            return part.outcome.error.evalue
    return f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone"


def _name_pids(exited: Sequence[messages.RankExited]) -> str:
    pids = ", ".join(str(one.pid) for one in exited[:_MAX_SUMMARIZED])
    return f"pid{'' if len(exited) == 1 else 's'} {pids}{'' if len(exited) <= _MAX_SUMMARIZED else ', …'}"


def _survivors_state(finished: messages.CallFinished, survivors: Ranks) -> str:
    """Return what the other ranks hold and where they are, as sentences; empty if there are none."""
    text = ""
    if survivors:
        text = f"{name_ranks(survivors).capitalize()} {'keeps its' if len(survivors) == 1 else 'keep their'} state. "
    if not_returned := ranks_with_status(finished.outcomes, "skipped"):
        text += f"{name_ranks(not_returned).capitalize()} had not come back from it yet."
    return text


def _last_traces(exited: messages.RankExited) -> str:
    """Return the last collective and the last lines of a rank that has exited."""
    text = f"\nIts last collective: {exited.last_collective}" if exited.last_collective else ""
    if exited.last_lines:
        text += "\nIts last lines:\n" + "\n".join(f"    {line}" for line in exited.last_lines)
    return text
