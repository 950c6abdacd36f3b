"""A supervisor that a signal has stopped (SIGSTOP), and somebody who leaves its mesh or ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshbook.cli.main import end_mesh
from meshbook.controller.starting import create_mesh
from meshbook.wire import keys
from meshbook.wire.process_control import is_stopped
from tests.budget import when

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.mark.parametrize("way", ["stop", "detach"])
def test_a_mesh_whose_supervisor_is_stopped_is_left_and_ended_in_good_order(way: str) -> None:
    mesh = create_mesh(1)
    supervisor = mesh.session.info.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    when(lambda: is_stopped(supervisor))
    if way == "detach":
        mesh.detach()  # raises where it is not answered
        os.kill(supervisor, signal.SIGSTOP)
        when(lambda: is_stopped(supervisor))
        (left,) = [one for one in keys.list_connections() if one.pid == supervisor]
        assert end_mesh(left) == "has ended"
    else:
        mesh.stop()
    when(lambda: not Path(f"/proc/{supervisor}").exists())
    assert mesh.name not in [one.name for one in keys.list_connections()]
    if way == "stop":
        assert mesh.session.ended == "stopped by a script"
