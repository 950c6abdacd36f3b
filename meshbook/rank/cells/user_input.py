"""input(), getpass() and the debugger in a cell: the client is asked, and the main thread waits for the reply."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.ids import CallId
from meshbook.rank.call_state import CallState
from meshbook.rank.cells.no_terminal import TerminalReplacement
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.reporter import Reporter
from meshbook.wire import codec
from meshbook.wire.messages import DebuggerStop, InputReply, RankInputRequest


class InputRequester:
    """Asks the user of the running cell for a line of text. Main thread only.

    Attributes:
        is_waiting: whether the main thread waits for a reply; read by any thread.
        on_debugger_stop: called when the debugger is about to ask for a command.
        debugged_call: the call whose debugger a client has asked for, whether or not it replies to input().
    """

    def __init__(
        self, rank: int, state: CallState, output: OutputBuffer, reporter: Reporter, is_allowed: Callable[[], bool]
    ) -> None:
        """
        Args:
            is_allowed: whether the client of the running cell can reply.
        """
        self._rank, self._state, self._output, self._reporter = rank, state, output, reporter
        self._is_allowed = is_allowed
        self.is_waiting = False
        self.on_debugger_stop: Callable[[], None] = lambda: None
        self.debugged_call: CallId | None = None

    def serve(self, terminal: TerminalReplacement) -> None:
        """Have input(), getpass() and the debugger ask here."""
        terminal.request_input = self.request
        terminal.ask_command = lambda stop: self.request("", False, stop)
        terminal.can_ask = self.can_debug

    def can_debug(self) -> bool:
        """Whether a client gives the debugger commands in the running call."""
        call = self._state.running_call_id
        return call is not None and (self._is_allowed() or call == self.debugged_call)

    def request(self, prompt: str, password: bool, stop: DebuggerStop | None = None) -> str:
        """Return the user's reply from the notebook.

        Args:
            stop: where the debugger has stopped; then the reply is a command.

        Raises:
            EOFError: no client can reply.
            KeyboardInterrupt: the user interrupted the cell instead.
        """
        work = self._reporter.work_socket
        call = self._state.running_call_id
        if call is None or not (self._is_allowed() if stop is None else self.can_debug()):
            raise EOFError(
                "input() can be answered only while a cell of a notebook or terminal runs; "
                "give the value as a variable instead"
            )
        if stop is not None:
            self.on_debugger_stop()
        self._output.flush()
        self._reporter.send_output(work)
        self.is_waiting = True  # set before the request is sent
        try:
            self._reporter.send(RankInputRequest(self._rank, call, prompt, password, stop))
            while True:
                reply = codec.rank_commands.decode_body(work.receive())  # a SIGINT raises here
                if isinstance(reply, InputReply) and reply.target == call:
                    if reply.interrupted:
                        raise KeyboardInterrupt
                    if reply.text is None:
                        raise EOFError("there is nobody to ask for input() here")
                    return reply.text
        finally:
            self.is_waiting = False
