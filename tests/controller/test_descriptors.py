"""A supervisor without file descriptors: what runs goes on, new work is refused with the reason."""

from __future__ import annotations

import os
import resource

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach, create_mesh
from meshbook.errors import MeshbookError, NotAttached
from meshbook.wire.processes import forks_of
from tests.budget import when
from tests.controller.test_heal import kill

pytestmark = pytest.mark.usefixtures("starts_meshes")

LACKS = "no file descriptors are left"


def descriptors_of(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def set_limit(pid: int, number: int | None) -> None:
    """Let a process open no file any more; None: as many as it may."""
    if number is None:
        _, number = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def take_descriptors(mesh: Mesh) -> int:
    """Lower the limits of the supervisor and its standby until they have none; the pid of the supervisor."""
    supervisor = mesh.status().supervisor_pid
    before = descriptors_of(supervisor)
    lowest_free = min(set(range(len(before) + 1)) - before)
    for pid in (supervisor, *forks_of(supervisor)):
        set_limit(pid, lowest_free)
    when(lambda: len(descriptors_of(supervisor)) < len(before) - 8, "the end of its reserve")
    return supervisor


def test_a_supervisor_without_descriptors_refuses_new_work_with_the_reason_and_lives_on() -> None:
    with create_mesh(2) as mesh:
        mesh.run("x = rank + 1")
        supervisor = take_descriptors(mesh)
        assert dict(mesh.run("x").values) == {0: 1, 1: 2}
        for _ in range(3):
            with pytest.raises(NotAttached, match=f"takes no client now: {LACKS}"):
                attach(mesh.name)
        with pytest.raises(MeshbookError, match=f"cannot do ResizeMesh now: {LACKS}"):
            mesh.resize(3)
        with pytest.raises(MeshbookError, match=f"cannot do KeepSpares now: {LACKS}"):
            mesh.spare(1)
        for pid in (supervisor, *forks_of(supervisor)):
            set_limit(pid, None)
        when(lambda: forks_of(supervisor), "another standby")
        attach(mesh.name).session.detach()
        kill(mesh, 1)
        mesh.heal()
        assert dict(mesh.run("x").values)[0] == 1
        assert mesh.status().supervisor_pid == supervisor
