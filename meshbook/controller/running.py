"""Running a cell or a function on ranks for `Mesh`: in the foreground, within a time limit, or as a future."""

from __future__ import annotations

import textwrap
from typing import Any

from meshbook.controller import recording
from meshbook.controller.console import Console, find_prompter
from meshbook.controller.futures import MeshFuture
from meshbook.controller.results import CellResult
from meshbook.controller.session import Session
from meshbook.errors import CellError, MeshbookError, MeshTimeout, RankLost
from meshbook.fold.heal_advice import heal_advice
from meshbook.ids import Ranks, format_ranks, name_ranks

# Seconds that an interrupted call may take to end.
_INTERRUPT_TIMEOUT_S = 10.0


def dedent(source: str) -> str:
    """Return the source of a cell, without the indentation that all of its lines have."""
    if not isinstance(source, str):
        what = f"a {type(source).__name__}"
        raise TypeError(f"mesh.run runs source text, and this is {what}; mesh.execute(function) runs a function")
    return textwrap.dedent(source)


def run_command(session: Session, command: Any, console: Console, timeout_s: float | None = None) -> CellResult:
    """Run a command with its output on the console. Blocks; Ctrl-C works, and input() if there is no time limit.

    Raises:
        CellError, CellInterrupted, RankLost: as `Mesh.run`.
        MeshTimeout: it was interrupted after `timeout_s` seconds.
    """
    if timeout_s is not None:
        return _run_within(session, command, console, timeout_s)
    finished = session.foreground.run(command, on_output=console, on_input=find_prompter())
    try:
        return session.cell_result(command, finished, console.text)
    except MeshbookError as error:
        if note := recording.save_failed(session, command, finished):
            error.add_note(note)
            if isinstance(error, CellError):
                error.rendered = (*error.rendered, note)
        raise


def submit_command(session: Session, command: Any, console: Console) -> MeshFuture[CellResult]:
    """Send a command whose output goes to the console, and return a future of its result."""
    source = session.request(command, on_output=console)
    return session.future(source, command, lambda finished: session.cell_result(command, finished, console.text))


def _run_within(session: Session, command: Any, console: Console, timeout_s: float) -> CellResult:
    future = submit_command(session, command, console)
    try:
        return future.result(timeout_s)
    except MeshTimeout:
        future.interrupt()
        future.exception(_INTERRUPT_TIMEOUT_S)
        raise MeshTimeout(f"{command.label} did not end within {timeout_s:g} s and was interrupted") from None
    except KeyboardInterrupt:
        future.interrupt()
        future.result(_INTERRUPT_TIMEOUT_S)
        raise  # it had ended when the Stop came to the ranks


def heal_advice_for(session: Session, lost: Ranks) -> str:
    """Return what %mesh heal does about these lost ranks."""
    return heal_advice(len(lost), (rank.heals_when for rank in session.info.ranks if rank.rank in lost))


def require_living(session: Session, own: Ranks, chosen: Ranks | None) -> Ranks:
    """Return the ranks that a call goes to: those that were chosen, else the living ones of a view's own.

    Raises:
        RankLost: a chosen rank is lost, or no rank of the view is left.
    """
    living = session.living(own)
    if chosen is None:
        if not living:
            raise RankLost(
                f"of ranks {format_ranks(own)} of {session.name!r} none is left; {heal_advice_for(session, own)}",
                ranks=own,
            )
        return tuple(sorted(living))
    if lost := tuple(rank for rank in chosen if rank in session.lost):
        raise RankLost(
            f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone; nothing was run. "
            f"Living: {format_ranks(living)}. {heal_advice_for(session, lost)}",
            ranks=lost,
            survivors=living,
        )
    return chosen
