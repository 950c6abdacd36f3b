"""When the project is looked at and sent, and what is said of modules that only this machine has."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook import clock
from meshbook.actors import unhandled_faults
from meshbook.actors.mesh_references import MeshReferences
from meshbook.actors.runtime.faults import MeshFailure
from meshbook.clock import ManualClock
from meshbook.controller import missing_modules
from meshbook.controller.missing_modules import add_hint, missing_module_hint
from meshbook.controller.project import SyncedProject
from meshbook.errors import CellError, Failure, SyncError
from meshbook.wire import messages
from meshbook.wire.messages import ActorFailure, HostFiles, MeshSpec, ProjectFile, ProjectSpec

SPEC = MeshSpec(axes={"rank": 2}, engine="ssh", on="ssh://n1,n2")


class Desk:
    """A project whose folder is a variable and whose session notes what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock(100.0)
        monkeypatch.setattr(clock, "monotonic", self.clock.monotonic)
        self.sent: list[tuple[ProjectFile, ...]] = []
        self.error = ""
        connection = SimpleNamespace(next_call_id=lambda: "c", request=self._request)
        session: Any = SimpleNamespace(connection=connection, check_attached=lambda: None)
        self.project = SyncedProject(session, ProjectSpec("/p"))
        self.files = (ProjectFile("a", 1, b"1"),)
        self.num_looks = 0
        monkeypatch.setattr(self.project.folder, "files", self._look)

    def _look(self) -> tuple[ProjectFile, ...]:
        self.num_looks += 1
        self.clock.advance(0.008)
        return self.files

    def _request(self, command: messages.SyncProject) -> Future[Any]:
        self.sent.append(command.files)
        future = Future[Any]()
        future.set_result(SimpleNamespace(synced=(HostFiles("n1", 1, 5), HostFiles("n2", 1, 5, error=self.error))))
        return future


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(monkeypatch)
    desk.project.started(desk.project.look())
    return desk


def test_cells_in_quick_succession_look_for_a_fiftieth_of_the_time_and_send_only_what_has_changed(desk: Desk) -> None:
    for _ in range(1000):
        desk.project.sync_if_changed()
        desk.clock.advance(0.003)
    assert 0.008 * desk.num_looks <= 0.02 * 3.5
    assert desk.sent == []
    desk.files = (ProjectFile("a", 1, b"2"),)
    desk.clock.advance(0.4)
    desk.project.sync_if_changed()
    desk.clock.advance(0.4)
    desk.project.sync_if_changed()
    assert desk.sent == [desk.files]


def test_a_folder_that_takes_long_to_look_at_is_looked_at_all_the_same_within_a_second(desk: Desk) -> None:
    desk.project._look_s = 3.0
    desk.clock.advance(1.0)
    desk.project.sync_if_changed()
    assert desk.num_looks == 2


def test_a_machine_without_the_files_is_named_and_the_next_cell_tries_again(desk: Desk) -> None:
    desk.error = "no space"
    desk.files = (ProjectFile("a", 1, b"2"),)
    desk.clock.advance(1.0)
    for _ in range(2):
        with pytest.raises(SyncError, match=r"not brought to all machines[.] n2: no space"):
            desk.project.sync_if_changed()
    desk.error = ""
    desk.project.sync_if_changed()
    assert len(desk.sent) == 3


def test_what_went_to_machines_is_said_once_for_those_alike(desk: Desk) -> None:
    desk.project.folder.left_out = {"data": "is a link to /mnt, which is outside of the project"}
    assert str(desk.project.sync()).splitlines() == [
        "1 file (5 B) went to n1, n2; 1 in all, after 0.01 s.",
        "left out: data is a link to /mnt, which is outside of the project",
    ]


# ---- modules that only this machine has


def hint(name: str, spec: MeshSpec = SPEC, ename: str = "ModuleNotFoundError") -> str:
    return missing_module_hint((Failure((0, 1), ename, f"No module named '{name}'", ()),), spec)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """A module in a folder of the path that is not imported."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pkg" / "util.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path)


def test_a_module_that_only_this_machine_has_is_an_error_that_names_sync(module: str) -> None:
    text = hint("pkg.util")
    assert text.startswith(f"pkg.util is a module of this machine ({module}/pkg/util.py), and ranks 0-1 cannot import")
    assert text.endswith("%mesh restart --sync brings the project folder to all machines (create_mesh(…, sync=True))")
    error = add_hint(CellError((Failure((0, 1), "ModuleNotFoundError", "No module named 'pkg'", ()),), ()), SPEC)
    assert isinstance(error, CellError)
    assert "--sync" in error.rendered[-1]
    assert "--sync" in error.__notes__[-1]


def test_a_value_whose_module_only_this_machine_has_is_an_error_that_names_sync(module: str) -> None:
    text = (
        "the value needs module `pkg.util`, which cannot be imported where the value arrived (it needs `pkg`): "
        "No module named 'pkg'; install it there"
    )
    found = missing_module_hint((Failure((0,), "TransferError", text, ()),), SPEC)
    assert found.startswith(f"pkg is a module of this machine ({module}/pkg/__init__.py), and rank 0 cannot import it")
    session: Any = SimpleNamespace(info=SimpleNamespace(spec=SPEC))
    ended = f"?.__init__ failed, so there is no actor 'a': TransferError: {text}"
    failures = {rank: ActorFailure(1, "ended", "TransferError", ended) for rank in (0, 1)}
    assert "ranks 0-1 cannot import it. %mesh restart --sync" in MeshReferences(session).missing_module_hint(failures)


def test_a_module_that_an_actor_lacks_which_nobody_calls_is_a_failure_that_names_sync(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = SimpleNamespace(info=SimpleNamespace(spec=SPEC))
    ref: Any = SimpleNamespace(name="loaders", references=MeshReferences(session))
    registry = SimpleNamespace(owned={"a-1": SimpleNamespace(ref=ref)})
    monkeypatch.setattr(unhandled_faults, "local_registry", lambda: registry)

    def described(text: str) -> str:
        alike = [MeshFailure("loaders", (rank,), text) for rank in (0, 1)]
        return unhandled_faults._describe(alike[0], alike)

    failed = "Loader.__init__ failed, so there is no actor 'loaders': "
    told = described(f"{failed}ModuleNotFoundError: No module named 'pkg'")
    assert "alike on ranks 0-1; no __supervise__ has handled it. pkg is a module of this machine" in told
    assert "ranks 0-1 cannot import it. %mesh restart --sync" in told
    assert described(f"{failed}ValueError: no").endswith("no __supervise__ has handled it")


def test_with_sync_the_hint_is_why_it_did_not_travel(module: str) -> None:
    synced = MeshSpec(axes={}, on="ssh://n1", project=ProjectSpec(module))
    assert f"If git ignores it, name it: %mesh restart --sync {module}/pkg/__init__.py" in hint("pkg", synced)
    elsewhere = MeshSpec(axes={}, on="ssh://n1", project=ProjectSpec("/p"))
    assert "It is not in the project that --sync brings there, /p" in hint("pkg", elsewhere)


def test_an_installed_module_is_to_be_installed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_modules, "_place_here", lambda name: "/v/lib/site-packages/pandas/__init__.py")
    assert "Install it on the other machines, or have uv do it there (%mesh restart --sync --env uv)" in hint("pandas")


def test_what_this_machine_does_not_have_either_or_a_mesh_on_it_gets_no_hint(module: str) -> None:
    assert hint("no_such_module") == ""
    assert hint("pkg.no_such_module") == ""
    assert hint("pkg", MeshSpec(axes={})) == ""
    assert hint("pkg", ename="ImportError") == ""
