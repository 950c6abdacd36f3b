"""Two meshes for all tests of this folder: two ranks, and two by two. Each test leaves them clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from tests.shared import SharedMesh


@pytest.fixture(scope="module")
def shared2(starts_meshes: None) -> Iterator[SharedMesh]:
    shared = SharedMesh({"dp": 2})
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def shared22(starts_meshes: None) -> Iterator[SharedMesh]:
    shared = SharedMesh({"dp": 2, "tp": 2})
    yield shared
    shared.close()


@pytest.fixture
def mesh2(shared2: SharedMesh) -> Iterator[Mesh]:
    yield shared2.get()
    shared2.check()


@pytest.fixture
def mesh22(shared22: SharedMesh) -> Iterator[Mesh]:
    yield shared22.get()
    shared22.check()
