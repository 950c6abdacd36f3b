"""A debugpy port of a rank, with a client as VS Code has one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshbook
from meshbook.controller.debug_ports import describe_ports, open_ports
from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError
from meshbook.wire.messages import DebugPort
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")

pytest.importorskip("debugpy")

LOOP = """i, done = 0, False
while not done:
    i += 1
    __import__("time").sleep(0.01)
i > 0
"""


class Client:
    """The few messages of the Debug Adapter Protocol that a test needs."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._file = self._socket.makefile("rb")
        self._seq = 0
        self._events: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        self._seq += 1
        message = {"seq": self._seq, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self._seq

    def read(self) -> dict[str, Any]:
        size = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name == b"Content-Length" else size
        message: dict[str, Any] = json.loads(self._file.read(size))
        if message["type"] == "event":
            self._events.append(message)
        return message

    def answer(self, seq: int) -> dict[str, Any]:
        while (message := self.read())["type"] != "response" or message["request_seq"] != seq:
            pass
        assert message["success"], message
        body: dict[str, Any] = message.get("body") or {}
        return body

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.answer(self.send(command, **arguments))

    def event(self, name: str) -> dict[str, Any]:
        while (found := next((event for event in self._events if event["event"] == name), None)) is None:
            self.read()
        self._events.remove(found)
        body: dict[str, Any] = found.get("body") or {}
        return body

    def attach(self, file: str, line: int) -> None:
        """Attach with a breakpoint."""
        self.request("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        attached = self.send("attach", justMyCode=False)
        self.event("initialized")
        self.request("setBreakpoints", source={"path": file}, breakpoints=[{"line": line}])
        self.request("configurationDone")
        self.answer(attached)

    def close(self) -> None:
        self.request("disconnect", terminateDebuggee=False)
        self._file.close()
        self._socket.close()


@pytest.fixture(scope="module")
def own_mesh() -> Iterator[Mesh]:
    with meshbook.create_mesh(3) as mesh:
        yield mesh


def port_in(text: str) -> int:
    (found,) = re.findall(r'"port": (\d+)', text)
    return int(found)


def test_a_cell_is_stopped_in_the_margin_looked_at_and_goes_on_when_the_client_leaves(
    own_mesh: Mesh, tmp_path: Path
) -> None:
    mesh = own_mesh
    file = str(tmp_path / "ipykernel_9" / "1.py")  # as notebooks name their cells
    future = mesh.session.request(mesh.session.cell_command(LOOP, (0, 1), filename=file, label="cell 1"))
    when(lambda: "sleep(0.01)" in mesh.stacks(1).text)
    text = open_ports(mesh.session, (1,))
    assert '"name": "rank 1 of' in text
    assert Path(file).read_text() == LOOP  # what VS Code opens
    assert port_in(open_ports(mesh.session, (1,))) == port_in(text)
    for _ in range(2):
        client = Client(port_in(text))
        client.attach(file, 3)
        stopped = client.event("stopped")
        (frame, *_) = client.request("stackTrace", threadId=stopped["threadId"])["stackFrames"]
        assert (frame["line"], frame["source"]["path"]) == (3, file)
        assert client.request("evaluate", expression="rank + 40", frameId=frame["id"])["result"] == "41"
        seen = mesh.stacks(1)  # the rank answers while it is stopped
        assert "line 3" in seen.text
        with pytest.raises(UsageError, match="debugpy port"):
            mesh_debug(mesh)
        client.close()
    client = Client(port_in(text))
    client.attach(file, 3)
    client.event("stopped")
    mesh.session.interrupt((0, 1))  # Stop also ends a rank that is stopped
    assert {part.outcome.status for part in future.result(WAIT_S).outcomes} == {"interrupted"}
    client.close()
    assert mesh.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").values.same() == 3.0


def mesh_debug(mesh: Mesh) -> None:
    from meshbook.controller.running_debugger import find_running, stop_foreground

    stop_foreground(mesh.session, find_running(mesh.session, (1,)), (1,))


def test_breakpoint_stops_in_the_client_while_one_is_attached(own_mesh: Mesh, tmp_path: Path) -> None:
    mesh = own_mesh
    file = str(tmp_path / "ipykernel_9" / "2.py")
    client = Client(port_in(open_ports(mesh.session, (0,))))
    client.attach(file, 99)
    source = "if rank == 0:\n    breakpoint()\n    kept = 7\n"
    future = mesh.session.request(mesh.session.cell_command(source, (0, 1), filename=file, label="cell 2"))
    stopped = client.event("stopped")
    (frame, *_) = client.request("stackTrace", threadId=stopped["threadId"])["stackFrames"]
    assert frame["source"]["path"] == file
    client.request("continue", threadId=stopped["threadId"])
    future.result(WAIT_S)
    client.close()
    assert mesh.run("kept", ranks=0).values[0] == 7


def test_a_port_of_several_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="is for one rank, and these are 2: ranks 0-1"):
        open_ports(None, (0, 1), 5678)  # type: ignore[arg-type]


def test_on_another_machine_the_port_is_to_be_forwarded_and_paths_are_mapped() -> None:
    port = DebugPort("127.0.0.1", 5678, "gpu7", "/home/me/work")
    text = describe_ports("lab", {2: port}, "laptop")
    assert "ssh -N -L 5678:127.0.0.1:5678 gpu7" in text
    assert '"remoteRoot": "/home/me/work"' in text
    here = describe_ports("lab", {2: port}, "gpu7")
    assert "ssh" not in here
    assert "pathMappings" not in here


def test_without_debugpy_it_is_said_what_to_install(own_mesh: Mesh) -> None:
    own_mesh.run("import sys; sys.modules['debugpy'] = None", ranks=2)
    with pytest.raises(UsageError, match=r"rank 2: debugpy is not installed there; .* -m pip install debugpy"):
        open_ports(own_mesh.session, (2,))
