"""Meshes that tests use one after the other: one that a test has left broken is not handed on, and that test fails."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import MeshbookError
from tests.budget import WAIT_S


class SharedMesh:
    """A mesh, started at its first use, and anew after a test that has broken it."""

    def __init__(self, axes: dict[str, int], **options: Any) -> None:
        self._axes, self._options = axes, options
        self._mesh: Mesh | None = None

    def get(self) -> Mesh:
        if self._mesh is None:
            self._mesh = create_mesh(self._axes, **self._options)
        return self._mesh

    def check(self) -> None:
        """Fail the test that has just ended if the mesh is not as it got it: whole, idle, with its groups."""
        if self._mesh is not None and (problem := what_is_wrong(self._mesh)):
            self.close()
            pytest.fail(f"this test has left the shared mesh broken: {problem}", pytrace=False)

    def close(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.stop()


def what_is_wrong(mesh: Mesh) -> str:
    """Why the next test cannot use the mesh; "" if it can. A cell that follows an error forms groups anew first."""
    if mesh.session.ended is not None:
        return f"it has ended: {mesh.session.ended}"
    if mesh.session.lost:
        return f"it has lost ranks {mesh.session.lost}"
    try:
        mesh.run("pass", wait=False, echo=False).result(WAIT_S)
    except MeshbookError as error:
        return f"a cell fails: {error}"
    groups = mesh.status().groups
    return "" if groups == "ready" else f"its process groups are {groups}"
