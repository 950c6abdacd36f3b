"""Frames to messages and back, and what a stranger's frames come to."""

from __future__ import annotations

import pickle
from typing import Any, get_args

import msgspec
import pytest

from meshbook.errors import ProtocolError, VersionMismatch
from meshbook.wire import codec, messages

CELL = messages.RunCell(call="a-1", ranks=(0, 2, 3), source="loss = step(batch)", number=7)  # type: ignore[arg-type]


def test_a_command_arrives_as_it_was_sent() -> None:
    assert codec.client_commands.decode(codec.encode(CELL)) == CELL


def test_the_first_frame_is_the_protocol_version() -> None:
    assert codec.encode(CELL)[0] == b"meshbook/1"


def test_a_newer_peer_is_refused_with_which_end_to_upgrade() -> None:
    with pytest.raises(VersionMismatch, match="upgrade Meshbook here"):
        codec.client_commands.decode([b"meshbook/2", b""])


def test_an_older_peer_is_refused_with_which_end_to_upgrade() -> None:
    with pytest.raises(VersionMismatch, match="upgrade Meshbook there"):
        codec.client_commands.decode([b"meshbook/0", b""])


def test_a_stranger_to_the_protocol_is_told_so() -> None:
    with pytest.raises(VersionMismatch, match="does not speak Meshbook's protocol"):
        codec.client_commands.decode([b"GET / HTTP/1.1", b""])


@pytest.mark.parametrize(
    "frames",
    [
        [codec.PROTOCOL],
        [codec.PROTOCOL, b"", b""],
        [codec.PROTOCOL, b"not msgpack at all"],
        [codec.PROTOCOL, msgspec.msgpack.encode({"type": "NoSuchWord"})],
        [codec.PROTOCOL, msgspec.msgpack.encode({"type": "RunCell", "call": 3})],
        [codec.PROTOCOL, codec.encode(CELL)[1][:-3]],
        [codec.PROTOCOL, b"\x91" * 100_000],
    ],
)
def test_frames_that_are_no_message_are_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        codec.client_commands.decode(frames)


def test_a_role_does_not_hear_the_words_of_another() -> None:
    with pytest.raises(ProtocolError):
        codec.rank_commands.decode(codec.encode(messages.StopMesh(call="a-1")))  # type: ignore[arg-type]


class Bomb:
    """Unpickled, it says so."""

    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


def test_a_pickle_where_a_message_should_be_is_not_unpickled() -> None:
    with pytest.raises(ProtocolError):
        codec.client_commands.decode([codec.PROTOCOL, pickle.dumps(Bomb())])
    assert not Bomb.went_off


def test_a_field_that_is_not_known_is_ignored() -> None:
    fields = msgspec.msgpack.decode(codec.encode(CELL)[1])
    fields["from_the_future"] = 1
    assert codec.client_commands.decode([codec.PROTOCOL, msgspec.msgpack.encode(fields)]) == CELL


def test_every_message_of_every_role_has_a_name_of_its_own() -> None:
    kinds = {kind for union in (messages.AnyMessage,) for kind in get_args(union)}
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
