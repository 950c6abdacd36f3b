"""One mesh of four ranks for all tests that leave it clean, and meshes of their own for tests that break something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
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


@pytest.fixture(scope="module")
def three(starts_meshes: None) -> Iterator[Mesh]:
    """Ranks that a module's tests lose and heal."""
    with create_mesh(3) as mesh:
        yield mesh


@pytest.fixture
def pair(starts_meshes: None) -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        yield mesh


@pytest.fixture
def trio(starts_meshes: None) -> Iterator[Mesh]:
    with create_mesh(3) as mesh:
        yield mesh
