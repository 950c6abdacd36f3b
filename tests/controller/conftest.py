"""One mesh of four ranks for all tests that leave it clean; tests that break something start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh


@pytest.fixture(scope="package")
def shared_mesh() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


@pytest.fixture
def mesh(shared_mesh: Mesh) -> Iterator[Mesh]:
    """The shared mesh, which must be whole and idle again after the test."""
    yield shared_mesh
    assert not shared_mesh.session.lost, "this test lost ranks of the shared mesh; start one of its own"
    shared_mesh.run("pass", echo=False)  # comes after groups that are being formed anew
    assert shared_mesh.status().groups == "ready"
