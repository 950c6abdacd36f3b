"""A machine that loses power, hangs or is cut off, and comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshbook.controller.futures import MeshFuture
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import HealError, RankLost, UsageError
from meshbook.wire.process_control import kill_supervisor
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed
from tests.host_processes import keepers_among

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]

# A dead machine counts as lost after 15 s; on a loaded one the supervisor may come to it late.
NAMED_WITHIN_S = 60.0


@contextmanager
def busy_mesh() -> Iterator[tuple[Mesh, MeshFuture[object]]]:
    """Two light ranks on each machine, each with an `x`, that sleep."""
    with create_mesh(4, on="ssh://n1,n2", torch=False) as mesh:
        mesh.run("import time\nx = 10 + rank")
        future = mesh.run("time.sleep(1000)", wait=False)
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        yield mesh, future


def check_named(mesh: Mesh, future: MeshFuture[object]) -> None:
    """Check that n2 is named, in words of its own, and that the survivors go on with what they hold."""
    before = time.monotonic()
    error = future.exception(NAMED_WITHIN_S)
    assert isinstance(error, RankLost)
    assert time.monotonic() - before < NAMED_WITHIN_S
    assert error.ranks == (2, 3)
    assert "machine n2 has not answered for" in str(error)
    assert "SIGKILL" not in str(error)
    assert dict(mesh.run("x").values) == {0: 10, 1: 11}
    assert [host.state for host in mesh.hosts()] == ["ready", "lost"]


def heal(mesh: Mesh) -> None:
    """Heal a mesh whose machine is back: its ranks are new, the others keep what they hold."""
    mesh.heal()
    assert [host.state for host in mesh.hosts()] == ["ready", "ready"]
    assert dict(mesh.run("__import__('socket').gethostname()").values) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert dict(mesh.run("x", ranks=(0, 1)).values) == {0: 10, 1: 11}


def test_a_machine_without_power_is_named_and_its_ranks_are_healed_when_it_is_back(bed: Bed) -> None:
    with busy_mesh() as (mesh, future):
        bed.power_off("n2")
        check_named(mesh, future)
        with pytest.raises(HealError, match="machine n2, where no host could be started again: n2"):
            mesh.heal()
        assert "ssh: connect to host" in mesh.logs(host="n2")
        with pytest.raises(UsageError, match="there is no host 'n3' in this mesh; its hosts: n1, n2"):
            mesh.logs(host="n3")
        bed.power_on("n2")
        heal(mesh)


def kill_host(bed: Bed, name: str) -> None:
    (keeper,) = keepers_among(bed.processes(name))
    os.kill(keeper, signal.SIGKILL)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (kill_host, "machine n2 has lost its host process, which was killed by a signal"),
        (Bed.end_ssh_sessions, 'machine n2 is out of reach: its ssh connection has ended ("'),
    ],
    ids=["host", "sshd"],
)
def test_what_has_ended_of_a_machine_is_told_apart_and_its_ranks_are_healed(
    bed: Bed, harm: Callable[[Bed, str], None], words: str
) -> None:
    with busy_mesh() as (mesh, future):
        before = set(bed.processes("n2"))
        harm(bed, "n2")
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (2, 3)
        assert words in str(error)
        when(lambda: before.isdisjoint(bed.processes("n2")))
        heal(mesh)


def test_a_standby_names_a_machine_that_is_lost_to_it_and_heals_it(bed: Bed) -> None:
    with busy_mesh() as (mesh, future):
        former = mesh.session.info.supervisor_pid
        os.kill(former, signal.SIGKILL)
        when(lambda: mesh.session.info.supervisor_pid != former)
        kill_host(bed, "n2")
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (2, 3)
        assert "machine n2 has lost its host process, whose exit status was lost with a former super" in str(error)
        heal(mesh)


@pytest.mark.parametrize(("harm", "undo"), [(Bed.freeze, Bed.thaw), (Bed.cut, Bed.restore)], ids=["hangs", "is cut"])
def test_a_machine_that_comes_back_by_itself_has_no_rank_twice(
    bed: Bed, harm: Callable[[Bed, str], None], undo: Callable[[Bed, str], None]
) -> None:
    with busy_mesh() as (mesh, future):
        before = set(bed.processes("n2"))
        harm(bed, "n2")
        try:
            check_named(mesh, future)
        finally:
            undo(bed, "n2")
        when(lambda: before.isdisjoint(bed.processes("n2")))  # as told by the supervisor
        heal(mesh)


def test_a_machine_that_stays_cut_off_ends_its_ranks_by_itself_once_they_count_as_lost(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 5\ncut_off_ttl_s = 10")
    monkeypatch.chdir(tmp_path)
    with busy_mesh() as (mesh, future):
        before = set(bed.processes("n2"))
        bed.cut("n2")
        try:
            check_named(mesh, future)
            when(lambda: before.isdisjoint(bed.processes("n2")))  # nobody can have said so
        finally:
            bed.restore("n2")
        heal(mesh)


def test_a_machine_that_is_cut_off_for_a_moment_keeps_its_ranks_and_what_they_run(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 50")
    monkeypatch.chdir(tmp_path)
    with busy_mesh() as (mesh, future):
        before = set(bed.processes("n2"))
        bed.cut("n2")
        try:
            when(lambda: [host.state for host in mesh.hosts()] == ["ready", "silent"])
        finally:
            bed.restore("n2")
        when(lambda: [host.state for host in mesh.hosts()] == ["ready", "ready"])
        assert set(bed.processes("n2")) == before
        assert not future.done()
        future.interrupt()
        future.exception(WAIT_S)
        assert dict(mesh.run("x").values) == {0: 10, 1: 11, 2: 12, 3: 13}


def test_a_machine_that_stands_still_for_a_moment_keeps_its_ranks_and_a_stop_does_not_wait_for_it(bed: Bed) -> None:
    with create_mesh(2, on="ssh://n1,n2", torch=False) as mesh:
        mesh.run("import time\nx = 10 + rank")
        said: list[str] = []
        command = mesh.session.cell_command("time.sleep(1000)", (0, 1))
        future = mesh.session.request(command, on_output=lambda items: said.extend(map(str, items)))
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        bed.freeze("n2")
        try:
            when(lambda: any("machine n2 has not answered for" in text for text in said))
            assert [host.state for host in mesh.hosts()] == ["ready", "silent"]
            mesh.session.interrupt((0, 1), target=command.call)
            when(lambda: any("did not come back from Stop: machine n2 has not answered for" in text for text in said))
        finally:
            bed.thaw("n2")
        future.result(WAIT_S)  # the Stop has come to n2
        assert dict(mesh.run("x").values) == {0: 10, 1: 11}
        assert [host.state for host in mesh.hosts()] == ["ready", "ready"]


def test_how_long_a_machine_may_be_silent_is_set(bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 6")
    monkeypatch.chdir(tmp_path)
    with busy_mesh() as (_, future):
        bed.freeze("n2")
        try:
            error = future.exception(NAMED_WITHIN_S)
        finally:
            bed.thaw("n2")
        assert "machine n2 has not answered for 6 s" in str(error)


def test_a_mesh_with_a_dead_machine_is_stopped_at_once(bed: Bed) -> None:
    with busy_mesh() as (mesh, _):
        bed.power_off("n2")
        try:
            before = time.monotonic()
            mesh.stop()
            assert time.monotonic() - before < 6  # 2 s on a quiet machine
        finally:
            bed.power_on("n2")


def test_a_host_whose_supervisor_is_killed_ends_its_ranks(bed: Bed) -> None:
    with busy_mesh() as (mesh, _):
        kill_supervisor(mesh.status().supervisor_pid)
        when(lambda: not bed.processes("n1") and not bed.processes("n2"))
