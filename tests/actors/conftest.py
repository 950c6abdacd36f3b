"""Processes that a module of tests shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.actors.procs import ProcMesh, this_host
from tests.budget import WAIT_S


@pytest.fixture(scope="module")
def procs(starts_meshes: None) -> Iterator[ProcMesh]:
    """Three light processes along the axis `gpus`."""
    started = this_host().spawn_procs({"gpus": 3}, name="shared")
    yield started
    started.stop().get(WAIT_S)
