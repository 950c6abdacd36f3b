"""Two meshes for all tests of this folder that leave them clean: two ranks, and two by two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh


@pytest.fixture(scope="package")
def mesh2() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="package")
def mesh22() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh
