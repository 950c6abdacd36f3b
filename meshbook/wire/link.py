"""Numbers and acknowledges the messages of a connection, so that none is lost or handled twice when it breaks. Pure.

Each end has a `Link`. What is sent gets a number and is kept until the other end has said that it came; that rides on
whatever flows back. A connection that breaks loses what was in transit. After a reconnect one end sends SYNC, and both
send again what the other has not received; what came already is dropped by its number.

A numbered message is two frames: the protocol's version with a header, then the body. A message without a body only
acknowledges, or asks for something. What comes before there is a link (a hello, its refusal) has no header.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

from meshbook.wire.codec import PROTOCOL

# What a numbered message is for, the last byte of its header.
_DATA: Final = 0  # a message with a body
_ACK: Final = 1  # only says how many messages have been received
_RESEND: Final = 2  # a message is missing: send again what was not received
_SYNC: Final = 3  # the connection may have broken: the same, and ask in turn for what is missing

# prefix, the number of this message (without a body: of the last one), how many were received, what it is for
_HEADER: Final = struct.Struct(f"<{len(PROTOCOL) + 1}sQQB")
_PREFIX: Final = PROTOCOL + b"\0"

# Received messages, and bytes of them, after which an acknowledgement does not wait for a message to ride on.
_MAX_UNREPORTED: Final = 16
_MAX_UNREPORTED_BYTES: Final = 1 << 20

Frames = tuple[bytes, bytes]


def is_numbered(frame: bytes) -> bool:
    """Whether this is the first frame of a numbered message."""
    return len(frame) == _HEADER.size and frame.startswith(_PREFIX)


class Link:
    """One end's numbers, and what it has sent that the other end has not acknowledged.

    Attributes:
        hello: body of the message that introduces this end; it is repeated, without a number, in reply to SYNC.
    """

    def __init__(self) -> None:
        self.hello: bytes | None = None
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._num_acknowledged = 0  # of our messages
        self._num_received = 0
        self._num_unreported = self._num_unreported_bytes = 0  # of those received
        self._requested_after = -1  # the number after which RESEND was last sent

    @property
    def num_sent(self) -> int:
        return self._unacknowledged[-1][0] if self._unacknowledged else self._num_acknowledged

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether the other end has not been sent yet how much was received."""
        return self._num_unreported > 0

    def number(self, body: bytes) -> bytes:
        """Keep a message that is about to be sent, and return its header."""
        number = self.num_sent + 1
        self._unacknowledged.append((number, body))
        return self._header(number, _DATA)

    def acknowledge(self) -> Frames:
        """Return a message that only acknowledges."""
        return self._header(self.num_sent, _ACK), b""

    def sync(self) -> Frames:
        """Return the message with which one end begins when the connection may have broken."""
        return self._header(self.num_sent, _SYNC), b""

    def receive(self, header: bytes, body: bytes) -> tuple[bool, Sequence[Frames]]:
        """Handle a numbered message.

        Returns:
            Whether its body is the next one to be handled (else it has none, came before, or comes again later), and
            messages to send back.
        """
        _, number, num_acknowledged, kind = _HEADER.unpack(header)
        self._drop_acknowledged(num_acknowledged)
        if kind == _DATA:
            return self._receive_data(number, len(body))
        if kind == _ACK:
            return False, ()
        replies: list[Frames] = []
        if kind == _SYNC and self.hello is not None:
            replies.append((PROTOCOL, self.hello))
        replies += [(self._header(sent, _DATA), kept) for sent, kept in self._unacknowledged]
        if kind == _SYNC and number > self._num_received:
            replies.append(self._request_resend())
        return False, replies

    def _receive_data(self, number: int, num_bytes: int) -> tuple[bool, Sequence[Frames]]:
        if number > self._num_received + 1:
            is_requested = self._requested_after == self._num_received
            return False, () if is_requested else (self._request_resend(),)
        self._num_unreported += 1
        if number <= self._num_received:
            return False, ()
        self._num_received = number
        self._num_unreported_bytes += num_bytes
        if self._num_unreported >= _MAX_UNREPORTED or self._num_unreported_bytes >= _MAX_UNREPORTED_BYTES:
            return True, (self.acknowledge(),)
        return True, ()

    def _request_resend(self) -> Frames:
        self._requested_after = self._num_received
        return self._header(self.num_sent, _RESEND), b""

    def _drop_acknowledged(self, number: int) -> None:
        """Drop what the other end has received. An exception of a signal handler between any two lines does no harm."""
        self._num_acknowledged = max(self._num_acknowledged, min(number, self.num_sent))
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()

    def _header(self, number: int, kind: int) -> bytes:
        self._num_unreported = self._num_unreported_bytes = 0
        return _HEADER.pack(_PREFIX, number, self._num_received, kind)
