"""Reports of a rank to its host: its sockets, and its output in order, whichever thread sends it."""

from __future__ import annotations

import threading

import zmq

from meshbook.ids import CallId
from meshbook.rank.output.capture import OutputBuffer
from meshbook.wire import codec, messages, spawn
from meshbook.wire.linked_sockets import LinkedDealer


class Reporter:
    """Sends reports for both threads: output in order, each piece numbered, on the sending thread's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: spawn.RankConfig, output: OutputBuffer) -> None:
        self._config, self._output = config, output
        self._lock = threading.Lock()
        self._seq = 0
        self.work_socket = connect_to_host(context, config.work_address, config)
        self.call_id: CallId | None = None  # the call that the output belongs to: the running one, else the last
        self.may_have_sent = False  # set as soon as a report may have left, also if sending it raises

    def send(self, report: messages.RankReport) -> None:
        """Send a report. Main thread only.

        Raises:
            ProtocolError: an error in it has a field that the host could not read, and would wait for for ever.
        """
        body = codec.encode_body(report)
        if isinstance(report, messages.RankFinished) and report.outcome.error is not None:
            codec.rank_reports.decode_body(body)
        self.may_have_sent = True
        self.work_socket.send(body)

    def pop_remaining_output(self) -> tuple[tuple[messages.OutputItem, ...], int]:
        """Return the unsent output, and the number of the last piece that was sent."""
        with self._lock:
            return self._output.pop_items(), self._seq

    def send_output(self, socket: LinkedDealer) -> int:
        """Send the available output on `socket`; return its approximate size in bytes."""
        with self._lock:
            items = self._output.pop_items()
            if not items:
                return 0
            output = messages.RankOutput(rank=self._config.rank, call=self.call_id, seq=self._seq + 1, items=items)
            body = codec.encode_body(output)  # may fail; the host would wait for ever for a number that is not sent
            socket.send(body)
            self._seq += 1
            return len(body)


def connect_to_host(context: zmq.Context[zmq.Socket[bytes]], address: str, config: spawn.RankConfig) -> LinkedDealer:
    """Return a rank's connection to one of its host's sockets."""
    return LinkedDealer(context, address, spawn.rank_identity(config.rank, config.incarnation))
