"""Processes that a module of tests shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.actors.procs import ProcMesh, this_host
from meshbook.actors.runtime import registry as lives
from meshbook.actors.runtime.faults import MeshFailure
from tests.budget import WAIT_S


@pytest.fixture(scope="module")
def procs(starts_meshes: None) -> Iterator[ProcMesh]:
    """Three light processes along the axis `gpus`."""
    started = this_host().spawn_procs({"gpus": 3}, name="shared")
    yield started
    started.stop().get(WAIT_S)


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Failures that no actor has handled."""
    heard: list[MeshFailure] = []
    monkeypatch.setattr(lives.local_registry(), "on_unhandled_failure", heard.append)
    return heard
