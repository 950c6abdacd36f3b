"""One mesh of four ranks for all tests that leave it clean; tests that break something start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from tests.shared import SharedMesh


@pytest.fixture(scope="module")
def shared_mesh(starts_meshes: None) -> Iterator[SharedMesh]:
    shared = SharedMesh({"dp": 2, "tp": 2})
    yield shared
    shared.close()


@pytest.fixture
def mesh(shared_mesh: SharedMesh) -> Iterator[Mesh]:
    """The shared mesh, which must be whole and idle again after the test."""
    yield shared_mesh.get()
    shared_mesh.check()
