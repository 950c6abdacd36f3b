"""Frames to messages and back, and what a stranger's frames come to."""

from __future__ import annotations

import pickle
from typing import Any, get_args

import msgspec
import pytest

from meshbook.errors import ProtocolError, TransferError, VersionMismatch
from meshbook.wire import codec, messages

CELL = messages.RunCell(call="a-1", ranks=(0, 2, 3), source="loss = step(batch)", execution_count=7)  # type: ignore[arg-type]


def test_a_command_arrives_as_it_was_sent() -> None:
    assert codec.client_commands.decode(codec.encode(CELL)) == CELL


def test_the_first_frame_is_the_protocol_version() -> None:
    assert codec.encode(CELL)[0] == b"meshbook/13"


def test_a_newer_peer_is_refused_with_which_end_to_upgrade() -> None:
    with pytest.raises(VersionMismatch, match="upgrade Meshbook here"):
        codec.client_commands.decode([b"meshbook/9999", b""])


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


def test_what_does_not_fit_a_message_is_refused_with_the_sum_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(TransferError, match=r"RunCell has 1,\d+ bytes, and a message takes 100.*in parts"):
        codec.encode(msgspec.structs.replace(CELL, source="x" * 1000))


@pytest.mark.parametrize("door", [codec.client_hellos, codec.host_hellos, codec.rank_hellos])
def test_of_a_peer_that_is_not_known_nothing_is_decoded_but_its_first_word(door: codec.Decoder[Any]) -> None:
    words = {
        codec.client_hellos: messages.Hello(token="t", client="c", kind="test", pid=1, channel="send"),
        codec.host_hellos: messages.HostReady(host=0, hostname="box", pid=1, token="t"),
        codec.rank_hellos: messages.RankReady(rank=0, pid=1, device="cpu", token="t"),
    }
    assert door.decode(codec.encode(words[door])) == words[door]
    finished = messages.RankFinished(rank=0, call="c", outcome=messages.Outcome(status="ok"), seconds=0.0)  # type: ignore[arg-type]
    for other in (CELL, finished, messages.HostFailed(host=0, reason="none")):
        with pytest.raises(ProtocolError):
            door.decode(codec.encode(other))
    with pytest.raises(ProtocolError, match="65,536 are the most"):
        door.decode([codec.PROTOCOL, bytes(codec.MAX_HELLO_BYTES + 1)])
