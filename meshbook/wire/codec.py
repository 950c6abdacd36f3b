"""Messages to frames and back. No sockets.

A message is two frames: the protocol version, then msgpack. The version comes first and alone, so that a peer of any
version can tell that it does not understand the rest. Decoding is strict: the decoder of a role knows only what that
role may hear, and whatever else arrives is a `ProtocolError`, never a crash and never a pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from meshbook.errors import ProtocolError, VersionMismatch
from meshbook.wire import messages

PROTOCOL = b"meshbook/1"

# The largest message a socket accepts; beyond it zmq closes the connection. Large data goes through shared memory; what
# rides inline (another machine, macOS) has to fit.
MAX_MESSAGE_BYTES = 1 << 28

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: messages.Message) -> list[bytes]:
    """The frames of a message: version, then body."""
    return [PROTOCOL, _encoder.encode(message)]


def encode_body(message: messages.Message) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Frames to messages, for one role; see the instances below."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def decode(self, frames: Sequence[bytes]) -> M:
        """The message in `frames`.

        Raises:
            VersionMismatch: the peer speaks another version; the text says which end to upgrade.
            ProtocolError: these are not the frames of a message that this role hears.
        """
        if not frames or frames[0] != PROTOCOL:
            raise VersionMismatch(describe_version(frames[0] if frames else b""))
        if len(frames) != 2:
            raise ProtocolError(f"a message has 2 frames, and {len(frames)} came")
        return self.decode_body(frames[1])

    def decode_body(self, body: bytes) -> M:
        try:
            message: M = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message of {len(body)} bytes could not be read: {error}") from error
        return message


def describe_version(first_frame: bytes) -> str:
    """What to tell someone whose peer's first frame is not our version."""
    ours = PROTOCOL.decode()
    if not first_frame.startswith(b"meshbook/"):
        return f"the peer does not speak Meshbook's protocol ({ours}); is this a Meshbook socket?"
    theirs = first_frame[:32].decode("ascii", "replace")
    number = theirs.partition("/")[2]
    if number.isdecimal() and int(number) > int(ours.partition("/")[2]):
        return f"the peer speaks {theirs} and this process {ours}: upgrade Meshbook here (pip install -U meshbook)"
    return f"the peer speaks {theirs} and this process {ours}: upgrade Meshbook there, or restart that mesh"


client_commands: Decoder[messages.ClientCommand] = Decoder(messages.ClientCommand)
host_commands: Decoder[messages.HostCommand] = Decoder(messages.HostCommand)
rank_commands: Decoder[messages.RankCommand] = Decoder(messages.RankCommand)
rank_reports: Decoder[messages.RankReport] = Decoder(messages.RankReport)
host_reports: Decoder[messages.HostReport] = Decoder(messages.HostReport)
supervisor_reports: Decoder[messages.SupervisorReport] = Decoder(messages.SupervisorReport)
