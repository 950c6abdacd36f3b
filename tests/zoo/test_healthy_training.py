"""Models of many kinds, trained for a hundred steps with the sentinel on: no alarm, and no error of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.zoo.healthy_training import SETUP, TRAININGS
from tests.zoo.test_bad_numbers import heard

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        mesh.run(SETUP)
        yield mesh


@pytest.mark.parametrize("name", TRAININGS)
def test_a_healthy_training_gives_no_alarm(mesh: Mesh, name: str) -> None:
    mesh.nan(True)
    shown = mesh.run(TRAININGS[name], echo=False).output
    report = heard(mesh)
    assert report, report.text
    assert report.on == (0, 1), shown
    assert report.num_updates >= 100
    assert "sentinel" not in shown
