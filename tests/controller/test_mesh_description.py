"""What this process knows of the ranks, when one is lost while a thread takes a reply."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.mesh import Mesh
from meshbook.controller.session import Session
from meshbook.controller.starting import create_mesh
from meshbook.wire import messages
from tests.budget import when
from tests.host_processes import pid_of

pytestmark = pytest.mark.usefixtures("starts_meshes")


def taken_late(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, kind: type, lose: Callable[[], None]) -> None:
    """The reply to the next command of this kind is there, and is taken only when a rank has been lost since."""
    connection = mesh.session.connection
    request = connection.request

    def late(command: Any) -> Any:
        future = request(command)
        if not isinstance(command, kind):
            return future
        result = future.result

        def result_after_the_loss(timeout: float | None = None) -> Any:
            reply = result(timeout)
            lose()
            return reply

        monkeypatch.setattr(future, "result", result_after_the_loss)
        monkeypatch.setattr(connection, "request", request)
        return future

    monkeypatch.setattr(connection, "request", late)


def test_a_reply_that_is_taken_late_does_not_hide_a_loss_since(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_mesh(3) as mesh:
        pids = {rank.rank: rank.pid for rank in mesh.status().ranks}

        def lose(rank: int) -> None:
            os.kill(pids[rank] or 0, signal.SIGKILL)
            when(lambda: rank in mesh.session.lost)

        taken_late(mesh, monkeypatch, messages.QueryStatus, lambda: lose(1))
        assert mesh.status().ranks[1].state != "dead"
        assert mesh.session.lost == (1,)
        taken_late(mesh, monkeypatch, messages.HealMesh, lambda: lose(2))
        mesh.heal()
        assert mesh.session.lost == (2,)


def test_a_rank_that_is_lost_while_this_process_attaches_is_known_to_be_lost() -> None:
    with create_mesh(2) as mesh:
        pid = pid_of(mesh, 1)
        connection = SupervisorConnection(mesh.session.connection.connection_info, kind="test", observer=True)
        os.kill(pid, signal.SIGKILL)
        when(lambda: mesh.session.lost == (1,))
        mesh.status()  # so that the report has come to the other client, too
        session = Session(connection, stop_at_exit=False)
        when(lambda: session.lost == (1,))
        session.close()
