"""`meshbook serve` as a process of its own, asked by the standard library's HTTP client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import runpy
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook import create_mesh
from meshbook.controller.mesh import Mesh
from meshbook.gateway.operations import OPERATIONS
from meshbook.wire.folders import runtime_folder
from tests.budget import WAIT_S, when
from tests.cli.commands import meshbook
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")

ROOT = Path(__file__).resolve().parent.parent.parent


class Server:
    """`meshbook serve` on a free port."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "meshbook", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.printed = ""
        assert self.process.stdout is not None
        while "Ctrl-C ends it" not in self.printed:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.printed += line
        self.port = int(self.printed.split("#token=")[0].rsplit(":", 1)[1].strip("/"))
        self.token_file: Path = runtime_folder() / f".serve-{self.port}.json"
        self.tokens: dict[str, str] = json.loads(self.token_file.read_text())["tokens"]

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = "look") -> tuple[int, Any]:
        """The status and the JSON of a request. `token`: a scope, or any text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2 * WAIT_S)
        try:
            headers = {} if token is None else {"Authorization": f"Bearer {self.tokens.get(token, token)}"}
            content = body if isinstance(body, str | None) else json.dumps(body)
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, answer = self.ask("GET", path)
        assert status == 200, answer
        return answer

    def end(self) -> str:
        """End it as Ctrl-C does; return what it has printed on stderr."""
        self.process.send_signal(signal.SIGINT)
        try:
            errors = self.process.communicate(timeout=WAIT_S)[1]
            assert self.process.returncode == 130
            assert not self.token_file.exists()
            return errors
        finally:
            self.process.kill()


class Events:
    """A stream of server-sent events, read on a thread. Which kind comes first is not promised."""

    def __init__(self, server: Server, path: str, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=2 * WAIT_S)
        self.connection.request("GET", path, headers={"Authorization": f"Bearer {server.tokens['look']}", **headers})
        self._socket = self.connection.sock
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200, self.reply.read()
        self._events: queue.SimpleQueue[tuple[str, str, Any] | None] = queue.SimpleQueue()
        self._passed_over: list[tuple[str, str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            while line := self.reply.readline().decode():
                name, _, value = line.rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "event" in fields:
                    self._events.put((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
                    fields = {}
        except OSError:  # the test has closed it
            pass
        self._events.put(None)

    def next(self, kind: str, has: str = "") -> tuple[str, Any]:
        """The id and the content of the first event of a kind, with this text in it, that was not returned before."""
        for event in self._passed_over:
            if event[0] == kind and has in json.dumps(event[2]):
                self._passed_over.remove(event)
                return event[1:]
        while (event := self._events.get(timeout=WAIT_S)) is not None:
            if event[0] == kind and has in json.dumps(event[2]):
                return event[1:]
            self._passed_over.append(event)
        raise AssertionError(f"the stream has ended without {kind} {has}")

    def close(self) -> None:
        """Close the connection, in the middle if the server has not ended it, as a page that is left."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self.reply.close()
        self.connection.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def mesh(run: object) -> Iterator[Mesh]:
    with create_mesh(2, name="served") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def server(mesh: Mesh) -> Iterator[Server]:
    server = Server()
    yield server
    assert server.end() == ""


def test_tokens_are_printed_once_and_kept_where_only_this_user_reads_them(server: Server) -> None:
    assert stat.S_IMODE(os.stat(server.token_file).st_mode) == 0o600
    command = Path(f"/proc/{server.process.pid}/cmdline").read_text()
    for scope, token in server.tokens.items():
        assert f"{scope:<7} http://127.0.0.1:{server.port}/#token={token}" in server.printed
        assert token not in command


@pytest.mark.parametrize(
    ("token", "method", "path", "status", "says"),
    [
        (None, "GET", "/meshes", 401, "a token is needed"),
        ("wrong", "GET", "/meshes", 401, "the token is none of this server's"),
        ("look", "POST", "/meshes/served/run", 403, "run needs the scope run, and this token's is look"),
        ("run", "POST", "/meshes", 403, "start needs the scope manage, and this token's is run"),
        ("run", "DELETE", "/meshes/served", 403, "stop needs the scope manage"),
        ("look", "GET", "/meshes/nobody", 404, "no mesh is named 'nobody'; running: served"),
        ("look", "GET", "/meshes/nobody/events", 404, "no mesh is named 'nobody'"),
        ("look", "GET", "/meshes/served/results/x-1", 404, "no cell x-1 is kept"),
        ("look", "GET", "/nothing", 404, "/openapi.json has all that there are"),
        ("look", "PUT", "/meshes", 405, "Method Not Allowed"),
        ("manage", "POST", "/meshes", 409, "a mesh named 'served' is running"),
        ("look", "GET", "/meshes/served/history?limit=x", 422, "Expected `int`, got `str` - at `$.limit`"),
        ("look", "GET", "/meshes/served/stacks?rank=1", 422, "unknown field `rank`"),
        ("look", "GET", "/meshes/served/events?cursor=x", 422, "the cursor 'x' is not a number"),
        ("look", "GET", "/meshes/served/events?cursor=999999", 422, "the cursor 999999 is of another mesh"),
        ("run", "POST", "/meshes/served/run", 422, "is 'served' in the path, 'other' in the body"),
    ],
)
def test_what_is_refused_says_why(
    server: Server, token: str | None, method: str, path: str, status: int, says: str
) -> None:
    body = {409: {"mesh": "served", "num_ranks": 1}, 422: {"mesh": "other", "source": "1"}}.get(status)
    found, answer = server.ask(method, path, body if method == "POST" else None, token=token)
    assert (found, set(answer)) == (status, {"error"})
    assert says in answer["error"]["message"]


def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    status, answer = server.ask("POST", "/meshes/served/run", "{source", token="run")
    assert (status, answer["error"]["type"]) == (422, "UsageError")
    assert "the body is not a JSON object" in answer["error"]["message"]


def test_a_cell_is_run_and_its_output_streams_from_where_a_reader_left_it(mesh: Mesh, server: Server) -> None:
    source = "import meshbook\nfor step in range(3):\n    meshbook.log(loss=1.0, step=step)\n    if rank: print(step)"
    with Events(server, "/meshes/served/events") as events:
        assert events.next("status")[1]["ranks"][0]["ranks"] == "0-1"
        status, asked = server.ask("POST", "/meshes/served/run", {"source": source}, token="run")
        assert status == 202
        done = server.get(f"/meshes/served/results/{asked['ticket']}?wait_s=30")
        assert (done["status"], done["untrusted_output"]) == ("ok", {"printed": "[1] 0\n[1] 1\n[1] 2\n"})
        cursor, output = events.next("output", "[1] 2")
        assert output["output"][0]["by"] == "http:run"
        assert events.next("metrics", '"step": 2')[1]["metrics"] == [{"name": "loss", "step": 2, "mean": 1.0}]
    mesh.run("if rank == 0: print('meanwhile')", echo=False)
    with Events(server, "/meshes/served/events", **{"Last-Event-ID": cursor}) as events:
        texts = [one["untrusted_output"] for one in events.next("output", "meanwhile")[1]["output"]]
        assert texts[-1] == "[0] meanwhile\n"
    assert server.get("/meshes/served/metrics?name=loss")["metrics"][0]["last"][0]["step"] == 2
    assert server.get("/meshes/served")["ranks"][0]["state"] == "idle"


def test_it_answers_while_ranks_hang(mesh: Mesh, server: Server, gate: Gate) -> None:
    with Events(server, "/meshes/served/events") as events:
        person = mesh.run(f"if rank == 1:\n    {gate.wait}\ndist.barrier()", wait=False, echo=False)
        when(lambda: server.get("/meshes/served/why")["findings"][0].get("waiting_ranks") == "0")
        assert server.get("/meshes/served/why")["findings"][0]["ranks"] == "1"
        assert events.next("status", "barrier")
        assert "line 2" in server.get("/meshes/served/stacks?ranks=1")["untrusted_output"]
        gate.open()
        person.result(WAIT_S)


def test_a_killed_rank_and_the_end_of_the_mesh_reach_readers_and_requests_in_flight(server: Server) -> None:
    status, made = server.ask("POST", "/meshes", {"mesh": "short", "num_ranks": 2}, token="manage")
    assert (status, made["num_ranks"]) == (201, 2)
    with Events(server, "/meshes/short/events") as events:
        killing = {"source": "import os\nif rank: os.kill(os.getpid(), 9)"}
        server.ask("POST", "/meshes/short/run", killing, token="run")
        (dead,) = [row for row in events.next("status", "dead")[1]["ranks"] if row["state"] == "dead"]
        assert (dead["ranks"], dead["exit"]) == ("1", "was killed by SIGKILL")
        status, healed = server.ask("POST", "/meshes/short/heal", token="manage")
        assert (status, healed["new_ranks"]) == (200, "1")
        endless = {"source": "import time\nwhile True: time.sleep(0.01)"}
        ticket = server.ask("POST", "/meshes/short/run", endless, token="run")[1]["ticket"]
        in_flight: list[tuple[int, Any]] = []
        path = f"/meshes/short/results/{ticket}?wait_s=60"
        waiter = threading.Thread(target=lambda: in_flight.append(server.ask("GET", path)))
        waiter.start()
        assert server.ask("DELETE", "/meshes/short", token="manage") == (200, {"stopped": "short"})
        assert events.next("end")[1]["reason"] == "stopped by http:manage"
        waiter.join(WAIT_S)
    ((status, answer),) = in_flight
    assert (status, answer["error"]["type"]) in ((409, "NotAttached"), (404, "MeshNameError"))
    assert server.ask("GET", "/meshes/short")[0] == 404


def test_a_web_form_trains_on_the_mesh(server: Server) -> None:
    form = runpy.run_path(str(ROOT / "notebooks" / "train_from_a_form.py"))["serve"](server.token_file, "served", 0)
    with form:
        threading.Thread(target=form.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{form.server_address[1]}"

        def train(**fields: str) -> tuple[str, str]:
            with urllib.request.urlopen(address, urllib.parse.urlencode(fields).encode(), timeout=WAIT_S) as page:
                return page.url, page.read().decode()

        assert "Not started: could not convert string to float" in train(lr="__import__('os')", steps="3")[1]
        run, _ = train(lr="0.05", steps="5")
        when(lambda: "<p>running</p>" not in read(run))
        form.shutdown()
    status, history = server.ask("GET", "/meshes/served/history?limit=1")
    assert (status, history["cells"][0]["by"], history["cells"][0]["status"]) == (200, "http:run", "ok")


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=WAIT_S) as page:
        return page.read().decode()


def test_the_document_has_every_operation_and_the_page_needs_no_other_machine(server: Server) -> None:
    status, document = server.ask("GET", "/openapi.json", token=None)
    assert (status, document["openapi"]) == (200, "3.1.0")
    described = {about["operationId"] for methods in document["paths"].values() for about in methods.values()}
    assert described == {*OPERATIONS, "events"}
    body = document["paths"]["/meshes/{mesh}/run"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert (set(body["properties"]), body["required"]) == ({"source", "ranks"}, ["source"])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", "/")
    page = connection.getresponse()
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "http" not in page.read().decode().replace("Meshbook over HTTP", "")
    connection.close()


def test_it_ends_with_readers_and_warns_where_others_could_listen(mesh: Mesh) -> None:
    server = Server("--host", "0.0.0.0")
    with Events(server, "/meshes/served/events") as events:
        events.next("status")
        errors = server.end()
        assert events.next("end")[1]["reason"] == "the server has ended"
    assert "0.0.0.0 is not this machine's own address" in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--keyfile", "x"), "--keyfile is the key of a certificate; add --certfile"),
        (("--certfile", "nowhere.pem"), "there is no file nowhere.pem"),
        (("--port", "0", "--certfile", __file__), "is no certificate that can be served"),
        (("--host", "192.0.2.1"), "cannot be listened on"),
    ],
)
def test_a_slip_gets_a_sentence(words: tuple[str, ...], says: str) -> None:
    done = meshbook("serve", *words)
    assert done.status == 2
    assert says in done.err
