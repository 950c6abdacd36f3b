"""What a supervisor and its ranks inherit from the process that starts a mesh."""

from __future__ import annotations

import signal

import pytest

from meshbook.controller.starting import create_mesh

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_signals_that_are_blocked_where_a_mesh_is_started_reach_its_ranks() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with create_mesh(1, torch=False, start_method="fresh") as mesh:
            assert mesh.run("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, ())").values.same() == set()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
