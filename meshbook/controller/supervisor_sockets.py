"""A client's two sockets to its supervisor, and the link that they are: one to send, one to receive.

Two sockets, because a zmq socket belongs to one thread: callers send from their own thread, under a lock, and no
message waits for a hand-over to the thread that listens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import zmq

from meshbook.clock import monotonic
from meshbook.wire import codec, keys, messages
from meshbook.wire.link import Link, is_numbered
from meshbook.wire.loop import send_frames


class SupervisorSockets:
    """Connected sockets. `send`, `acknowledge` and `close` may be called on any thread.

    Attributes:
        receiver: for the thread that listens, which passes what comes to `accept`.
        is_closed: nothing can be sent any more.
    """

    def __init__(self, connection_info: keys.ConnectionInfo, client: str) -> None:
        self._lock = threading.Lock()
        self._link = Link()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sender = self._connect(connection_info, keys.client_identity(client, "send"))
        self.receiver = self._connect(connection_info, keys.client_identity(client, "receive"))
        self.is_closed = False

    def _connect(self, connection_info: keys.ConnectionInfo, identity: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, identity)
        if connection_info.server_key:
            keys.dial_encrypted(socket, connection_info.server_key)
        socket.connect(connection_info.address)
        return socket

    def introduce(self, hello_to_send: messages.Hello, hello_to_receive: messages.Hello) -> None:
        """Send the first message of each socket."""
        self._sender.send_multipart(codec.encode(hello_to_send))
        self.receiver.send_multipart(codec.encode(hello_to_receive))

    def send(self, body: bytes) -> bool:
        """Send a message; return False if the sockets are closed."""
        with self._lock:
            if not self.is_closed:
                send_frames(self._sender, (self._link.number(body), body))
            return not self.is_closed

    def accept(self, frames: list[bytes]) -> messages.SupervisorReport | None:
        """Return the report in received frames if it is the next one to be handled; else handle the message.

        Raises:
            VersionMismatch, ProtocolError: see `codec.Decoder.decode`.
        """
        if len(frames) != 2 or not is_numbered(frames[0]):  # a refusal, before there is a link
            return codec.supervisor_reports.decode(frames)
        with self._lock:
            is_next, replies = self._link.receive(*frames)
            for reply in replies if not self.is_closed else ():
                send_frames(self._sender, reply)
        return codec.supervisor_reports.decode_body(frames[1]) if is_next else None

    def acknowledge(self) -> None:
        """Acknowledge what was received, if nothing that was sent since did."""
        with self._lock:
            if self._link.owes_acknowledgement and not self.is_closed:
                send_frames(self._sender, self._link.acknowledge())

    def last_reports(self, timeout_s: float) -> Iterator[list[bytes]]:
        """Yield the frames that a supervisor has sent before it ended, until its connection has ended. Blocks.

        What has been sent is all there when the end of the connection is seen. Use it on the thread that listens.

        Args:
            timeout_s: for the end of the connection.
        """
        monitor = self.receiver.get_monitor_socket(int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED))
        poller = zmq.Poller()
        for socket in (self.receiver, monitor):
            poller.register(socket, zmq.POLLIN)
        deadline, has_ended = monotonic() + timeout_s, False
        try:
            while True:
                remaining_s = 0.0 if has_ended else max(0.0, deadline - monotonic())
                ready = dict(poller.poll(int(remaining_s * 1000)))
                if self.receiver in ready:
                    yield self.receiver.recv_multipart()
                elif has_ended or monitor not in ready:
                    return
                else:
                    monitor.recv_multipart()
                    has_ended = True
        finally:
            self.receiver.disable_monitor()
            monitor.close(linger=0)

    def refuse_sending(self) -> bool:
        """Have `send` return False from now on; return whether it did already."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
            return was_closed

    def close(self) -> None:
        """Close the sockets, on the thread that listens."""
        with self._lock:
            self.is_closed = True
            self._sender.close(linger=200)
            self.receiver.close(linger=0)
        self._context.term()
