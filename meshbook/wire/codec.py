"""Encode messages as frames, and decode them. No sockets.

A message is two frames: the protocol version, then msgpack. The version is a frame of its own, so that a peer of any
version can tell that it cannot read the rest; a zero byte and a header may follow it (`wire/link.py`). Decoding is
strict: a role's decoder accepts only the messages that the role may receive; anything else raises `ProtocolError`. No
input crashes the decoder, and it never unpickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from meshbook.errors import ProtocolError, TransferError, VersionMismatch
from meshbook.wire import messages

PROTOCOL = b"meshbook/13"

# The largest message that a socket accepts; zmq closes the connection beyond it. Large data goes through shared memory;
# inline data (another machine, macOS) has to fit.
MAX_MESSAGE_BYTES = 1 << 28

# The largest first message of a peer that is not authenticated yet.
MAX_HELLO_BYTES = 1 << 16

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: messages.Message) -> list[bytes]:
    """Return the frames of a message: version, then body. Raises TransferError if it is too large."""
    return [PROTOCOL, encode_body(message)]


def encode_body(message: messages.Message | messages.StoreReply) -> bytes:
    """Return the body of a message.

    Raises:
        TransferError: it is larger than a socket accepts. zmq would drop it, and its receiver would wait for ever.
    """
    return check_size(_encoder.encode(message), type(message).__name__)


def check_size(body: bytes, name: str = "a message") -> bytes:
    """Return the body itself. Raises TransferError if it is larger than a socket accepts."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise TransferError(
            f"{name} has {len(body):,} bytes, and a message takes {MAX_MESSAGE_BYTES:,}: large values go through "
            "shared memory, which could not be had (no memory files, or no file descriptors left: see ulimit -n); "
            "send it in parts"
        )
    return body


class Decoder(Generic[M]):
    """Decodes frames to messages, for one role; see the instances below."""

    def __init__(self, message_types: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_types)
        self._max_bytes = max_bytes

    def decode(self, frames: Sequence[bytes]) -> M:
        """Return the message in `frames`.

        Raises:
            VersionMismatch: the peer uses another protocol version; the text says which end to upgrade.
            ProtocolError: the frames are not a message that this role accepts.
        """
        check_version(frames)
        if len(frames) != 2:
            raise ProtocolError(f"a message has 2 frames, and {len(frames)} came")
        if len(frames[1]) > self._max_bytes:
            raise ProtocolError(f"{len(frames[1]):,} bytes came where {self._max_bytes:,} are the most")
        return self.decode_body(frames[1])

    def decode_body(self, body: bytes) -> M:
        try:
            message: M = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message of {len(body)} bytes could not be read: {error}") from error
        return message


def check_version(frames: Sequence[bytes]) -> None:
    """Raise VersionMismatch if the frames are not a message of our protocol version."""
    if not frames or frames[0].partition(b"\0")[0] != PROTOCOL:
        raise VersionMismatch(describe_version_mismatch(frames[0] if frames else b""))


def describe_version_mismatch(first_frame: bytes) -> str:
    """Return the error message for a peer whose first frame is not our version."""
    ours = PROTOCOL.decode()
    if not first_frame.startswith(b"meshbook/"):
        return f"the peer does not speak Meshbook's protocol ({ours}); is this a Meshbook socket?"
    theirs = first_frame.partition(b"\0")[0][:32].decode("ascii", "replace")
    number = theirs.partition("/")[2]
    if number.isdecimal() and int(number) > int(ours.partition("/")[2]):
        return f"the peer speaks {theirs} and this process {ours}: upgrade Meshbook here (pip install -U meshbook)"
    return f"the peer speaks {theirs} and this process {ours}: upgrade Meshbook there, or restart that mesh"


client_commands: Decoder[messages.ClientCommand] = Decoder(messages.ClientCommand)
host_commands: Decoder[messages.HostCommand] = Decoder(messages.HostCommand)
rank_commands: Decoder[messages.RankCommand] = Decoder(messages.RankCommand)
rank_reports: Decoder[messages.RankReport] = Decoder(messages.RankReport)
host_reports: Decoder[messages.HostReport] = Decoder(messages.HostReport)
# The only messages decoded from a peer before it has shown the mesh's token, for each of the three kinds of socket.
client_hellos: Decoder[messages.Hello] = Decoder(messages.Hello, max_bytes=MAX_HELLO_BYTES)
host_hellos: Decoder[messages.HostReady] = Decoder(messages.HostReady, max_bytes=MAX_HELLO_BYTES)
rank_hellos: Decoder[messages.RankReady] = Decoder(messages.RankReady, max_bytes=MAX_HELLO_BYTES)

store_hellos: Decoder[messages.StoreHello] = Decoder(messages.StoreHello, max_bytes=MAX_HELLO_BYTES)

store_commands: Decoder[messages.StoreCommand] = Decoder(messages.StoreCommand)
store_replies: Decoder[messages.StoreReply] = Decoder(messages.StoreReply)
supervisor_reports: Decoder[messages.SupervisorReport] = Decoder(messages.SupervisorReport)
