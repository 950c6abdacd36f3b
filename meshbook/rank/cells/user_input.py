"""input() and getpass() in a cell: the question goes to the client, and the main thread waits for the reply."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.rank.call_state import CallState
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.reporter import Reporter
from meshbook.wire import codec
from meshbook.wire.messages import InputReply, RankInputRequest


class InputRequester:
    """Asks the user of the running cell for a line of text. Main thread only.

    Attributes:
        is_waiting: whether the main thread waits for a reply; read by any thread.
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

    def request(self, prompt: str, password: bool) -> str:
        """Return the user's reply from the notebook.

        Raises:
            EOFError: no client can reply.
            KeyboardInterrupt: the user interrupted the cell instead.
        """
        work = self._reporter.work_socket
        call = self._state.running_call_id
        if call is None or not self._is_allowed():
            raise EOFError(
                "input() can be answered only while a cell of a notebook or terminal runs; "
                "give the value as a variable instead"
            )
        self._output.flush()
        self._reporter.send_output(work)
        self.is_waiting = True  # set before the request is sent
        try:
            self._reporter.send(RankInputRequest(rank=self._rank, call=call, prompt=prompt, password=password))
            while True:
                work.poll()  # a SIGINT raises here, with no message partly received
                reply = codec.rank_commands.decode(work.recv_multipart())
                if isinstance(reply, InputReply) and reply.target == call:
                    if reply.interrupted:
                        raise KeyboardInterrupt
                    if reply.text is None:
                        raise EOFError("there is nobody to ask for input() here")
                    return reply.text
        finally:
            self.is_waiting = False
