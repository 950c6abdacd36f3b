"""Monarch's KubernetesJob up to the API: a server stands in for Kubernetes'. No pod ever comes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.starting import create_mesh
from meshbook.errors import StartError
from tests.budget import when
from tests.cluster.test_slurm import WhenWritten

pytestmark = [
    pytest.mark.monarch,
    pytest.mark.usefixtures("starts_meshes"),
    pytest.mark.skipif(importlib.util.find_spec("kubernetes") is None, reason="pip install kubernetes"),
]

_KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{}}}}]
"""


class Kubernetes(ThreadingHTTPServer):
    """What a job asks of Kubernetes' API."""

    daemon_threads = True

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = refuses
        self.made: list[Any] = []  # custom objects, for which an operator would make pods
        self.removed: list[str] = []
        self.has_ended = threading.Event()

    def close(self) -> None:
        self.has_ended.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Kubernetes

    def do_GET(self) -> None:
        if "/pods" not in self.path:
            self._answer(404, {"kind": "Status", "code": 404})
            return
        self.send_response(200)  # what happens to pods, until the client has enough of it
        self.end_headers()
        self.server.has_ended.wait()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuses:
            self._answer(403, {"kind": "Status", "code": 403, "message": "you may not make monarchmeshes in ml"})
            return
        self.server.made.append(body)
        self._answer(201, body)

    def do_DELETE(self) -> None:
        self.server.removed.append(self.path.rpartition("/")[2])
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[Callable[..., tuple[Kubernetes, str]]]:
    servers: list[Kubernetes] = []

    def new(**how: bool) -> tuple[Kubernetes, str]:
        servers.append(server := Kubernetes(**how))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = tmp_path / "kubeconfig"
        config.write_text(_KUBECONFIG.format(port=server.server_port))
        return server, f"monarch://kubernetes?namespace=ml&image=ours:1&gpus_per_node=2&kubeconfig={config}"

    yield new
    for server in servers:
        server.close()


def test_pods_are_asked_for_and_awaited_and_stop_takes_the_request_back(new_cluster: Any) -> None:
    server, on = new_cluster()
    stop = WhenWritten("Monarch: its KubernetesJob is pending", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(stop):
        create_mesh(on=on, nodes=2, gpus_per_node=2, torch=False)
    (made,) = server.made
    (container,) = made["spec"]["podTemplate"]["spec"]["containers"]
    assert (made["metadata"]["namespace"], made["spec"]["replicas"]) == ("ml", 2)
    assert (container["image"], container["resources"]["limits"]) == ("ours:1", {"nvidia.com/gpu": "2"})
    when(lambda: server.removed == [made["metadata"]["name"]])


def test_a_namespace_without_rights_is_named_in_kubernetes_words(new_cluster: Any) -> None:
    _, on = new_cluster(refuses=True)
    with pytest.raises(StartError, match=r"403.*you may not make monarchmeshes in ml"):
        create_mesh(on=on, nodes=1, gpus_per_node=2, torch=False)
