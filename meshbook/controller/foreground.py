"""Calls that this process waits for: their output, their input() requests, and Stop."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.console import Prompter
from meshbook.controller.debugging import DebuggerPrompt, describe_end
from meshbook.controller.input_questions import InputQuestions, Question
from meshbook.controller.pending_requests import stuck_notice
from meshbook.controller.sigint import SigintLatch
from meshbook.controller.stop_presses import StopPresses
from meshbook.errors import CellInterrupted
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire import messages

OutputHandler = Callable[[tuple[messages.FoldedItem, ...]], None]

_Inbox = queue.SimpleQueue[Any]  # what arrives for a call, for the thread that waits; None: it has ended
_WAKE = object()  # in a call's inbox: a SIGINT is pending


@dataclass(frozen=True)
class AbandonedCall:
    """An interrupted call that is no longer waited for, because some ranks do not return from it."""

    command: Any
    future: Future[Any]
    ranks: Ranks  # the ranks that do not return
    reason: str


@dataclass(frozen=True)
class _SilenceChanged:
    """The supervisor stopped replying, or replies again."""

    silent: bool


class _Waiting:
    """What a thread needs while it waits for a call."""

    def __init__(self, command: Any, inbox: _Inbox, on_output: OutputHandler | None, on_input: Prompter | None):
        self.command, self.inbox, self.on_output, self.on_input = command, inbox, on_output, on_input
        self.debugger = DebuggerPrompt(command.ranks)
        self.questions = InputQuestions(command.ranks)
        self.sigint = SigintLatch(wake=lambda: inbox.put(_WAKE))
        self._is_asking = False

    def ask(self, prompt: str, password: bool) -> str | None:
        """Prompt the user, and return what was typed; None: nobody is there. Stop raises KeyboardInterrupt."""
        if self.on_input is None:
            return None
        self._is_asking = True
        try:
            with self.sigint.handler_restored():
                return self.on_input(prompt, password)
        finally:
            self._is_asking = False

    def call_ended(self, future: Future[Any]) -> None:
        """End the wait, and tell a user who is at a prompt. Any thread."""
        if self._is_asking:
            lost = () if future.exception() is not None else future.result().lost
            text = f"{describe_end(getattr(self.command, 'label', '') or 'the call', lost)}; press Enter"
            self.show((messages.RankDisplay(ranks=self.command.ranks, item=messages.Notice(text)),))
        self.inbox.put(None)

    def show(self, items: tuple[messages.FoldedItem, ...]) -> None:
        if self.on_output is not None:
            self.on_output(items)

    def seconds_until_due(self, now: float) -> float | None:
        """Return how long until the user is to be asked something; None: nothing is to be asked."""
        due = self.questions.seconds_until_due(now), self.debugger.seconds_until_due(now)
        return min((seconds for seconds in due if seconds is not None), default=None)

    @property
    def output_inbox(self) -> Callable[[Any], None] | None:
        """Takes output from the listener thread; None: output is orphan output."""
        return self.inbox.put if self.on_output is not None else None


class ForegroundCalls:
    """The call that a thread of this process waits for, and the ones that it gave up waiting for.

    Attributes:
        abandoned: by call id; each stays until its ranks return.
        in_flight: functions of the layers above that return the ids of their calls in flight, oldest first; Stop
            interrupts these too.
    """

    def __init__(
        self,
        connection: SupervisorConnection,
        request: Callable[..., Future[Any]],
        interrupt: Callable[..., None],
    ) -> None:
        """Wait for the calls of one connection.

        Args:
            request: sends a command for ranks, as `Session.request`.
            interrupt: interrupts a call, as `Session.interrupt`.
        """
        self.abandoned: dict[str, AbandonedCall] = {}
        self.in_flight: list[Callable[[], list[str] | None]] = []
        self._connection, self._request, self._interrupt = connection, request, interrupt
        self._presses = StopPresses()
        self._running: tuple[str, Ranks] | None = None
        self._can_ask = False  # the ranks of the foreground call may ask for input
        self._inbox: _Inbox | None = None
        connection.listeners.silence_changed.append(self._silence_changed)

    @property
    def is_idle(self) -> bool:
        """Whether no call is in the foreground."""
        return self._running is None

    @property
    def prompting_call(self) -> str | None:
        """The id of the call in the foreground, if its ranks can ask the user; None: there is none, or they cannot."""
        return self._running[0] if self._running is not None and self._can_ask else None

    # ---- waiting

    def run(
        self,
        command: Any,
        *,
        on_output: OutputHandler | None = None,
        on_input: Prompter | None = None,
        keep_result: bool = False,
    ) -> messages.CallFinished:
        """Send a command and wait for its end on this thread, handling its output and input() requests.

        KeyboardInterrupt stops the ranks and continues to wait for them, as `wire.stop_timing` describes; a second
        within 5 s escalates.

        Args:
            keep_result: return the result of a call that had ended when its Stop came to the ranks.

        Raises:
            CellInterrupted: some ranks do not return from a Stop: the call stays in `abandoned` until they do. Or the
                call had ended when its Stop came: the Stop ends what called this, such as a loop.
        """
        waiting = _Waiting(command, queue.SimpleQueue(), on_output, on_input)
        with waiting.sigint:
            self._running = (command.call, command.ranks)
            try:
                future = self._request(command, on_output=waiting.output_inbox, on_input=waiting.inbox.put)
            except KeyboardInterrupt:  # the command may or may not have been sent
                self._interrupt(command.ranks, target=command.call)
                self._running = None
                raise
            except BaseException:
                self._running = None
                raise
            self._wait(waiting, future)
        return self._result(waiting, future, keep_result=keep_result)

    def wait(
        self,
        command: Any,
        future: Future[Any],
        *,
        inbox: _Inbox | None = None,
        on_output: OutputHandler | None = None,
        on_input: Prompter | None = None,
    ) -> messages.CallFinished:
        """Wait for a command that was already sent, as the foreground call. See `run`."""
        waiting = _Waiting(command, inbox if inbox is not None else queue.SimpleQueue(), on_output, on_input)
        with waiting.sigint:
            self._wait(waiting, future)
        return self._result(waiting, future)

    def _wait(self, waiting: _Waiting, future: Future[Any]) -> None:
        command, inbox = waiting.command, waiting.inbox
        try:
            self._can_ask = waiting.on_input is not None and getattr(command, "allow_input", False)
            self._running, self._inbox = (command.call, command.ranks), inbox
            self._connection.pending.set_handlers(
                command.call, on_output=waiting.output_inbox, on_input=inbox.put, on_stuck=inbox.put
            )
            if self._connection.silent:
                inbox.put(_SilenceChanged(True))
            self._read_inbox(waiting, future)
        except BaseException:
            self._presses.is_new_sigint(time.monotonic())  # the next SIGINT is a press of its own
            raise
        finally:
            self._running = self._inbox = None
            self._presses.call_ended()

    def _result(self, waiting: _Waiting, future: Future[Any], *, keep_result: bool = False) -> messages.CallFinished:
        """Return the result of a finished call, after SIGINT handling is restored."""
        is_new = self._presses.is_new_sigint(time.monotonic())
        # Stop reaches a notebook twice, and the second half may arrive after the call has ended.
        if waiting.sigint.pop() and is_new:
            signal.raise_signal(signal.SIGINT)
        finished: messages.CallFinished = future.result()
        command = waiting.command
        if not keep_result and self.was_interrupted(command.call) and error_from(finished) is None:
            label = getattr(command, "label", "") or "an operation on tensors"
            raise render_error(CellInterrupted((), command.ranks, summary=f"{label} was stopped as it ended"))
        return finished

    def _read_inbox(self, waiting: _Waiting, future: Future[Any]) -> None:
        """Handle what arrives for a call, on this thread, until the call has ended."""
        command, inbox, sigint = waiting.command, waiting.inbox, waiting.sigint
        future.add_done_callback(waiting.call_ended)
        while True:
            try:
                item = inbox.get(timeout=self._seconds_to_wait(waiting))
                if item is None:
                    break
                if sigint.pop():
                    self._on_sigint()
                if item is _WAKE:
                    continue
                if isinstance(item, messages.InputRequest):
                    if item.stop is None:
                        if (text := waiting.questions.add(item, time.monotonic())) is not None:
                            self._reply(item, text)
                    else:
                        waiting.debugger.add(item.rank, item.stop, time.monotonic())
                elif isinstance(item, Question):
                    waiting.questions.forget(item)
                elif isinstance(item, messages.RanksStuck):
                    if self.was_interrupted(command.call):
                        raise self._abandon(command, future, item.ranks, item.reason)
                    waiting.show(stuck_notice(item).items)
                elif isinstance(item, _SilenceChanged):
                    if item.silent and self.was_interrupted(command.call):
                        raise self._abandon(command, future, command.ranks, self._connection.describe_silence())
                    waiting.show((self._silence_notice(item, command.ranks),))
                else:
                    waiting.show(item)
            except queue.Empty:
                if waiting.questions.seconds_until_due(now := time.monotonic()) == 0.0:
                    self._ask(waiting)
                elif waiting.debugger.seconds_until_due(now) == 0.0:
                    self._prompt_debugger(waiting)
                elif self._presses.has_given_up(time.monotonic()):
                    reason = f"{name_ranks(command.ranks)} did not come back and could not be killed"
                    raise self._abandon(command, future, command.ranks, reason) from None
            except CellInterrupted:
                raise
            except KeyboardInterrupt:  # a second SIGINT before the first was processed, or one on another thread
                sigint.pop()
                self._on_sigint()
                if future.done():  # the item being processed is lost, possibly the end marker
                    inbox.put(None)

    def _ask(self, waiting: _Waiting) -> None:
        """Ask the user the oldest question of ranks, unless Stop has ended the call; send all of them the answer."""
        question, text = waiting.questions.pop(), None
        try:
            if not self.was_interrupted(waiting.command.call):
                with contextlib.suppress(EOFError):
                    text = waiting.ask(f"[{name_ranks(question.ranks)}] {question.prompt}", question.password)
        except KeyboardInterrupt:
            self.interrupt()
        waiting.questions.answered(question, text)
        waiting.inbox.put(question)  # behind what ranks have asked until now
        for request in question.requests.values():
            self._reply(request, text)

    def _reply(self, request: messages.InputRequest, text: str | None) -> None:
        is_stopped = text is None and self.was_interrupted(request.call)
        self._connection.send(messages.InputReply(request.call, request.rank, text, interrupted=is_stopped))

    def _seconds_to_wait(self, waiting: _Waiting) -> float | None:
        """Return how long the inbox may stay empty before something is to be done; None: for ever."""
        due = waiting.seconds_until_due(time.monotonic())
        return 1.0 if due is None and self._presses.is_killing else due

    def _prompt_debugger(self, waiting: _Waiting) -> None:
        """Ask for a command for the ranks that the debugger has stopped, and send it; a Stop goes to all of them."""
        debugger, call = waiting.debugger, waiting.command.call
        line: str | None = None
        is_ending = self.was_interrupted(call)
        if not is_ending:
            waiting.show(debugger.pop_text(time.monotonic()))
            try:
                line = waiting.ask(debugger.prompt(), False)
            except (EOFError, KeyboardInterrupt):
                is_ending = True
        typed = debugger.end() if is_ending else debugger.typed(line, time.monotonic())
        if typed.ends_call and not self.was_interrupted(call):
            self.interrupt(may_escalate=False)
        waiting.show(typed.items)
        for rank, text in typed.replies.items():
            self._connection.send(messages.InputReply(call, rank, text, interrupted=typed.ends_call))

    def _abandon(self, command: Any, future: Future[Any], ranks: Ranks, reason: str) -> CellInterrupted:
        """Stop waiting for an interrupted call. Later output of its ranks is shown as orphan output."""
        self._connection.pending.set_handlers(command.call)
        self.abandoned[command.call] = AbandonedCall(command, future, ranks, reason)
        future.add_done_callback(lambda _: self.abandoned.pop(command.call, None))
        label = getattr(command, "label", "") or "the call"
        one = len(ranks) == 1
        if self._connection.silent:
            summary = f"{label} was stopped here, but its ranks do not know: {reason}"
        else:
            summary = (
                f"{label} was stopped, but {name_ranks(ranks)} {'has' if one else 'have'} not come back: {reason}. "
                f"Press Stop again (or %mesh kill {format_ranks(ranks)}) to end {'it' if one else 'them'}; what "
                f"{'it holds' if one else 'they hold'} is lost then. Until then cells on "
                f"{'that rank' if one else 'those ranks'} wait; %mesh why, %mesh stacks and %%controller cells work"
            )
        error = CellInterrupted((), summary=summary)
        render_error(error)
        return error

    def _silence_changed(self, silent: bool) -> None:
        if (inbox := self._inbox) is not None:
            inbox.put(_SilenceChanged(silent))

    def _silence_notice(self, silence: _SilenceChanged, ranks: Ranks) -> messages.RankDisplay:
        name = self._connection.connection_info.name
        text = self._connection.describe_silence() if silence.silent else f"the supervisor of {name} answers again"
        return messages.RankDisplay(ranks=ranks, item=messages.Notice(text))

    # ---- Stop

    def interrupt(self, *, may_escalate: bool = True, expect_sigint: bool = False) -> bool:
        """Interrupt the foreground call on its ranks, as the Stop button does. Thread-safe.

        A second Stop within 5 s also kills the ranks that do not return; so does one while no call is in the foreground
        and ranks have not returned from an earlier Stop.

        Args:
            may_escalate: False: never treat it as a second Stop.
            expect_sigint: the same Stop will also arrive as a SIGINT, soon, or later on a busy machine.

        Returns:
            Whether there was something to stop.
        """
        running = self._running
        now = time.monotonic()
        was_stopped = self._connection.continue_supervisor()
        if running is None:
            return may_escalate and self._kill_abandoned(now)
        call, ranks = running
        if expect_sigint:
            self._presses.expect_sigint(now)
        meaning = self._presses.press(call, now, may_escalate=may_escalate)
        if meaning == "repeat":
            return True
        hard = meaning == "kill"
        if self._connection.silent and not was_stopped:
            self._silence_changed(True)
        for abandoned in list(self.abandoned.values()):
            self._interrupt(abandoned.command.ranks, target=abandoned.command.call, hard=hard)
        for get_calls in self.in_flight:  # calls that run before the foreground call, oldest first
            for earlier in get_calls() or ():
                self._interrupt(ranks, target=earlier, hard=hard)
        self._interrupt(ranks, target=call, hard=hard)
        return True

    def was_interrupted(self, call: str) -> bool:
        """Whether Stop was pressed while this was the foreground call."""
        return self._presses.was_interrupted(call)

    @property
    def interrupted_call(self) -> str | None:
        """The foreground call that the last Stop interrupted; None: there was none."""
        return self._presses.interrupted_call

    def _on_sigint(self) -> None:
        """Handle a SIGINT: a new Stop, or the second half of one that arrived as a message."""
        if self._presses.is_new_sigint(time.monotonic()):
            self.interrupt()

    def _kill_abandoned(self, now: float) -> bool:
        """Handle Stop without a foreground call: kill the ranks that have not returned from the last Stop."""
        abandoned = list(self.abandoned.values())
        if abandoned and self._presses.press_when_idle(now) == "kill":
            for call in abandoned:
                self._interrupt(call.ranks, target=call.command.call, hard=True)
        return bool(abandoned)
