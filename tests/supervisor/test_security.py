"""Strangers at the door: nothing of theirs is run, nothing unpickled, and the supervisor lives on."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import VersionMismatch
from meshbook.wire import codec, keys, messages

pytestmark = pytest.mark.usefixtures("starts_meshes")


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(1, torch=False) as mesh:
        yield mesh


@pytest.fixture
def stranger(mesh: Mesh) -> Iterator[zmq.Socket[bytes]]:
    """A socket to the supervisor's own, of somebody who can reach it but has no token."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(mesh.session.connection.connection_info.address)
        yield socket


def answer(socket: zmq.Socket[bytes]) -> messages.SupervisorReport:
    assert socket.poll(60_000), "the supervisor did not answer"
    return codec.supervisor_reports.decode(socket.recv_multipart())


def hello(token: str, **changes: Any) -> messages.Hello:
    fields = {"token": token, "client": "x", "kind": "test", "pid": os.getpid(), "channel": "receive", **changes}
    return messages.Hello(**fields)  # type: ignore[arg-type]


def cell(path: str) -> messages.RunCell:
    return messages.RunCell(call="x-1", ranks=(0,), source=f"import os; os.mkdir({path!r})")  # type: ignore[arg-type]


def test_a_cell_of_a_peer_without_the_token_is_not_run(
    mesh: Mesh, stranger: zmq.Socket[bytes], tmp_path: object
) -> None:
    stranger.send_multipart(codec.encode(cell(f"{tmp_path}/ran")))
    refused = answer(stranger)
    assert isinstance(refused, messages.Refused)
    assert "token" in refused.text
    mesh.run("None")
    assert not os.path.exists(f"{tmp_path}/ran")


def test_a_wrong_token_is_refused_and_what_follows_it_too(
    mesh: Mesh, stranger: zmq.Socket[bytes], tmp_path: object
) -> None:
    stranger.send_multipart(codec.encode(hello("0" * 64)))
    assert isinstance(answer(stranger), messages.Refused)
    stranger.send_multipart(codec.encode(cell(f"{tmp_path}/ran")))
    assert isinstance(answer(stranger), messages.Refused)
    assert not os.path.exists(f"{tmp_path}/ran")


def test_a_pickle_of_a_peer_without_the_token_is_not_unpickled(
    mesh: Mesh, stranger: zmq.Socket[bytes], tmp_path: object
) -> None:
    payload = messages.Payload(pickled=pickle.dumps(Bomb(f"{tmp_path}/bomb")))
    call = messages.CallFunction(call="x-2", ranks=(0,), function=payload)  # type: ignore[arg-type]
    stranger.send_multipart(codec.encode(call))
    stranger.send_multipart([pickle.dumps(Bomb(f"{tmp_path}/bomb"))])
    assert isinstance(answer(stranger), messages.Refused)
    assert isinstance(answer(stranger), messages.Refused)
    mesh.run("None")
    assert not os.path.exists(f"{tmp_path}/bomb")


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00" * 100],
        [codec.PROTOCOL],
        [codec.PROTOCOL, b"\xc1"],
        [codec.PROTOCOL, b"\x81" * 10_000],
        [b"x"] * 50,
    ],
    ids=["empty", "zeros", "no body", "not msgpack", "deep", "many frames"],
)
def test_malformed_frames_are_refused_and_the_mesh_works_on(
    mesh: Mesh, stranger: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    stranger.send_multipart(frames)
    assert isinstance(answer(stranger), messages.Refused)
    assert mesh.run("1 + 1").values.same() == 2


def test_a_flood_of_bad_frames_fills_no_log(mesh: Mesh, stranger: zmq.Socket[bytes]) -> None:
    log = keys.runtime_folder() / mesh.name / "supervisor.log"
    before = log.stat().st_size
    for _ in range(2000):
        stranger.send_multipart([codec.PROTOCOL, b"\xc1"])
    for _ in range(2000):
        assert isinstance(answer(stranger), messages.Refused)
    assert log.stat().st_size - before < 10_000


def test_an_oversized_message_ends_that_connection_and_nothing_else(mesh: Mesh, stranger: zmq.Socket[bytes]) -> None:
    stranger.send_multipart([codec.PROTOCOL, bytes(codec.MAX_MESSAGE_BYTES + 1)])
    assert mesh.run("1 + 1").values.same() == 2
    assert not stranger.poll(200)


def test_a_peer_of_another_version_is_told_which_end_to_upgrade(mesh: Mesh, stranger: zmq.Socket[bytes]) -> None:
    stranger.send_multipart([b"meshbook/99", codec.encode(hello("x"))[1]])
    refused = answer(stranger)
    assert isinstance(refused, messages.Refused)
    assert refused.error == "VersionMismatch"
    assert "upgrade Meshbook here" in refused.text


def test_a_client_refused_for_its_version_raises_that(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PROTOCOL", b"meshbook/0")
    with pytest.raises(VersionMismatch):
        SupervisorConnection(mesh.session.connection.connection_info, kind="test")


def test_nobody_can_pose_as_a_rank(mesh: Mesh) -> None:
    address = f"ipc://{keys.runtime_folder() / mesh.name / 'h0-work.sock'}"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"r7")
        socket.connect(address)
        ready = messages.RankReady(rank=0, pid=1, device="cpu", token="0" * 64)
        finished = messages.RankFinished(rank=0, call="c", outcome=messages.Outcome(status="ok"), seconds=0.0)  # type: ignore[arg-type]
        socket.send_multipart(codec.encode(ready))
        socket.send_multipart(codec.encode(finished))
        assert mesh.run("'the real one'").values.same() == "the real one"


def test_sockets_and_keys_lie_where_only_this_user_can_reach_them(mesh: Mesh) -> None:
    folder = keys.runtime_folder() / mesh.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "mesh.json").stat().st_mode) == 0o600


@pytest.mark.skipif(not zmq.has("curve"), reason="this pyzmq has no CURVE")
def test_on_tcp_a_peer_without_the_servers_key_is_not_heard() -> None:
    with create_mesh(1, torch=False, listen="tcp://127.0.0.1:*") as mesh:
        found = mesh.session.connection.connection_info
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(found.address)
            socket.send_multipart(codec.encode(hello(found.token)))
            assert not socket.poll(500)
        assert mesh.run("1").values.same() == 1
