"""The debugger on a cell that runs: `%mesh debug`, `mesh.debug()`, `meshbook debug`.

Ranks are asked to stop where they are. Their prompt is that of the cell, if this process waits for the cell and its
user can type there; else it is here, and belongs to this client until it leaves.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from meshbook.controller.console import Console, Prompter, find_prompter
from meshbook.controller.debugging import DebuggerPrompt, describe_end, describe_exits
from meshbook.controller.session import Session
from meshbook.errors import MeshbookError, MeshTimeout, UsageError
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire import messages
from meshbook.wire.messages import DebuggerPlace, OpenCall

# Shows folded output.
Show = Callable[[tuple[messages.FoldedItem, ...]], object]

# Seconds that ranks may take to stop before it is said what they are in. In a collective they look ten times a second.
_STOP_TIMEOUT_S = 1.0
# Seconds until it is known where ranks are that were asked to stop; their service threads reply within two.
_PLACES_TIMEOUT_S = 4.0
# Seconds between two looks whether the mesh has ended.
_POLL_S = 0.5
# Seconds that a cell may take to end after `q`, before its end is no longer waited for.
_QUIT_TIMEOUT_S = 3.0


def find_running(session: Session, ranks: Ranks) -> OpenCall:
    """Return the cell, or the function, that runs on some of these ranks: the oldest.

    Raises:
        UsageError: none does.
    """
    reply = session.call_supervisor(messages.QueryStatus(call=session.connection.next_call_id()))
    wanted = set(ranks)
    for call in reply.open_calls:
        if wanted & set(call.ranks):
            return call
    raise UsageError(
        f"nothing runs on {name_ranks(ranks)}, so that there is nothing to stop. %%mesh --break stops a cell at its "
        "first line, breakpoint() in it at a line; %mesh postmortem looks into the last failure"
    )


def request_stop(session: Session, call: OpenCall, ranks: Ranks) -> Future[Any]:
    """Ask ranks to stop in the debugger; the future's `CallFinished` has their `DebuggerPlace`."""
    chosen = session.living(tuple(rank for rank in ranks if rank in set(call.ranks)))
    command = messages.StopInDebugger(session.connection.next_call_id(), chosen, call.call)
    return session.request(command)


def places_of(finished: messages.CallFinished) -> dict[int, DebuggerPlace]:
    """Return where ranks are that were asked to stop. One that does not answer has not replied."""
    found = {}
    for part in finished.outcomes:
        reply = part.outcome.reply
        if part.outcome.status == "lost":
            place = DebuggerPlace(problem="is gone")
        elif not isinstance(reply, dict):
            place = DebuggerPlace(inside="something that does not let it answer (%mesh why tells what)")
        elif "error" in reply:
            place = DebuggerPlace(problem=f"could not be asked ({reply['error']})")
        else:
            place = msgspec.convert(reply, DebuggerPlace)
        found.update(dict.fromkeys(part.ranks, place))
    return found


def describe_places(places: Mapping[int, DebuggerPlace]) -> list[str]:
    """Return where ranks are, a line for those at one place: "rank 1: in recv #2 at cell 7, line 3"."""
    by_text: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_text.setdefault(describe_place(place), []).append(rank)
    return [f"{name_ranks(sorted(ranks))}: {text}" for text, ranks in by_text.items()]


def describe_place(place: DebuggerPlace) -> str:
    where = f"at {place.place}" if place.place else "" if place.inside else "in no line of yours"
    return place.problem or " ".join(filter(None, [f"in {place.inside}" if place.inside else "", where]))


def stop_foreground(session: Session, call: OpenCall, ranks: Ranks) -> str:
    """Stop ranks of the call that this process waits for, where the prompt will be; return what to tell. Any thread.

    Raises:
        UsageError: no rank will stop.
        MeshTimeout: the supervisor does not reply.
    """
    try:
        places = places_of(request_stop(session, call, ranks).result(_PLACES_TIMEOUT_S))
    except TimeoutError:
        raise MeshTimeout(session.connection.describe_silence()) from None
    stopping = _check_places(places)
    title = call.label or "the cell that runs"
    stop = f"{name_ranks(stopping)} {'stops' if len(stopping) == 1 else 'stop'}"
    heading = f"{stop} in the debugger, with its prompt below {title}; a rank in C code, when that returns"
    return "\n".join([heading, *describe_places(places)])


def _check_places(places: Mapping[int, DebuggerPlace]) -> Ranks:
    """Return the ranks that will stop. Raises UsageError if there is none."""
    stopping = tuple(sorted(rank for rank, place in places.items() if not place.problem))
    if not stopping:
        raise UsageError("no rank stops in the debugger: " + "; ".join(describe_places(places)))
    return stopping


class RunningDebugger:
    """The debugger's prompt of a call, held by this thread.

    Args:
        ranks: to be stopped.
        show: shows what they say.
        ask: asks for a command.
        note: shows a sentence of Meshbook's own. Called on any thread.
    """

    def __init__(
        self, session: Session, call: OpenCall, ranks: Ranks, show: Show, ask: Prompter, note: Callable[[str], object]
    ) -> None:
        self._session, self._call, self._show, self._ask, self._note = session, call, show, ask, note
        self._ranks = tuple(rank for rank in ranks if rank in set(call.ranks))
        self._prompt = DebuggerPrompt(call.ranks, self._ranks)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places: dict[int, DebuggerPlace] | None = None  # of ranks that were asked to stop and have not
        self._is_asking = self._has_ended = False
        self._report_at = time.monotonic() + _STOP_TIMEOUT_S  # when ranks that have not stopped are reported
        self._quit_deadline = float("inf")

    def run(self) -> None:
        """Stop the ranks, and serve their prompt until all go on, the call ends, or the user leaves by Ctrl-C or Stop.

        Raises:
            MeshbookError: no rank will stop.
        """
        session, target = self._session, self._call.call
        pending = session.connection.pending
        pending.debuggers[target] = self._take
        session.lost_listeners.append(self._take)
        try:
            asked = request_stop(session, self._call, self._ranks)
            asked.add_done_callback(self._inbox.put)
            self._serve()
        except (EOFError, KeyboardInterrupt):
            self._note(f"left the debugger; {self._title} goes on")
        finally:
            pending.debuggers.pop(target, None)
            session.lost_listeners.remove(self._take)
            if not self._has_ended:
                with contextlib.suppress(MeshbookError):
                    session.connection.send(messages.LeaveDebugger(self._call.ranks, target))

    @property
    def _title(self) -> str:
        return self._call.label or "what runs"

    def _take(self, item: Any) -> None:
        """Take a report. Listener thread."""
        self._inbox.put(item)
        if self._is_asking and not isinstance(item, messages.InputRequest):  # the prompt waits for the user
            self._note(f"{self._describe(item)}; press Enter")

    def _describe(self, item: messages.DebuggedCallEnded | tuple[messages.RankExited, ...]) -> str:
        if isinstance(item, messages.DebuggedCallEnded):
            return describe_end(self._title, item.lost)
        return describe_exits(item)

    def _serve(self) -> None:
        while not self._is_done:
            now = time.monotonic()
            if now > self._quit_deadline:
                self._note(f"{self._title} was sent a Stop and has not ended yet; %mesh why says what keeps it")
                return
            due_s = self._prompt.seconds_until_due(now)
            try:
                item = self._inbox.get(timeout=_POLL_S if due_s is None else due_s)
            except queue.Empty:
                if due_s is not None:
                    self._prompt_once()
                elif now > self._report_at:
                    self._report_places()
                continue
            self._handle(item)
        if not self._has_ended and self._session.ended is None:
            self._note(f"{self._title} goes on")

    @property
    def _is_quitting(self) -> bool:
        return self._quit_deadline < float("inf")

    @property
    def _is_done(self) -> bool:
        is_over = self._prompt.is_over and not self._is_quitting
        return self._has_ended or self._session.ended is not None or is_over

    def _handle(self, item: Any) -> None:
        if isinstance(item, messages.InputRequest):
            assert item.stop is not None
            if self._is_quitting:  # it stopped as `q` was typed
                self._reply(item.rank, None, interrupted=True)
                return
            self._prompt.add(item.rank, item.stop, time.monotonic())
            if self._places:
                self._places.pop(item.rank, None)
        elif isinstance(item, messages.DebuggedCallEnded):
            self._has_ended = True
            self._note(self._describe(item))
        elif isinstance(item, Future):
            self._set_places(places_of(item.result()))
        else:
            for exited in item:
                self._prompt.remove(exited.rank)
            self._note(self._describe(item))

    def _set_places(self, places: dict[int, DebuggerPlace]) -> None:
        _check_places(places)
        stopped = set(self._prompt.stopped)
        self._places = {rank: place for rank, place in places.items() if rank not in stopped}
        self._prompt.places = {rank: describe_place(place) for rank, place in places.items()}

    def _report_places(self) -> None:
        """Say, once, what ranks are in that were asked to stop and have not."""
        if self._places:
            for line in describe_places(self._places):
                self._note(f"not stopped yet, {line}")
        if self._places is not None:
            self._places, self._report_at = {}, float("inf")

    def _prompt_once(self) -> None:
        prompt = self._prompt
        self._report_places()
        self._show(prompt.pop_text(time.monotonic()))
        self._is_asking = True
        try:
            line = self._ask(prompt.prompt(), False)
        finally:
            self._is_asking = False
        if line is None:
            raise EOFError
        typed = prompt.typed(line, time.monotonic())
        if typed.ends_call:
            self._session.interrupt(self._call.ranks, target=self._call.call)
            self._quit_deadline = time.monotonic() + _QUIT_TIMEOUT_S
        self._show(typed.items)
        for rank, text in typed.replies.items():
            self._reply(rank, text, interrupted=typed.ends_call)

    def _reply(self, rank: int, text: str | None, *, interrupted: bool) -> None:
        self._session.connection.send(messages.InputReply(self._call.call, rank, text, interrupted=interrupted))


def debug(session: Session, ranks: Ranks) -> None:
    """Stop what ranks run in the debugger, with the prompt on this terminal or below this cell. Blocks.

    Raises:
        UsageError: nothing runs there, or nobody can type here.
    """
    if (prompter := find_prompter()) is None:
        raise UsageError(
            f"there is nobody to type commands here; in a terminal: meshbook debug {session.name} {format_ranks(ranks)}"
        )
    call = find_running(session, ranks)
    console = Console(call.ranks, echo=True)
    RunningDebugger(session, call, ranks, console, prompter, console.note).run()
