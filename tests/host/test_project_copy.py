"""A machine's copy of the project, with the supervisor's side in the same process."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.project_folder import ProjectFolder
from meshbook.host.project_copy import ProjectCopy
from meshbook.ids import CallId
from meshbook.supervisor.project_server import ProjectServer
from meshbook.wire import messages
from meshbook.wire.loop import Loop
from meshbook.wire.messages import FilesSynced, MeshSpec, ProjectFile, ProjectSpec


class Bench:
    """A project here, a copy of it, and what the copy's host says to the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "proj"
        self.project.mkdir()
        self.host_folder = folder / "run" / "meshbook" / "m-1.h0"
        self.host_folder.mkdir(parents=True)
        self.server = ProjectServer()
        self.synced: list[FilesSynced] = []
        self.before_serving: Callable[[messages.FetchFiles], object] = lambda request: None
        self._requests: list[messages.FetchFiles] = []
        self.copy = ProjectCopy(Loop(), self.host_folder, self._report)

    def _report(self, report: Any) -> None:
        (self._requests if isinstance(report, messages.FetchFiles) else self.synced).append(report)

    def write(self, path: str, text: str = "x", *, mode: int = 0o644) -> Path:
        place = self.project / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)
        return place

    def files(self) -> tuple[ProjectFile, ...]:
        return ProjectFolder(ProjectSpec(str(self.project))).files()

    def sync(self, files: tuple[ProjectFile, ...] | None = None) -> FilesSynced:
        command = messages.SyncFiles(CallId("s"), str(self.project), self.files() if files is None else files)
        self.server.allow(command)
        self.copy.handle(command)
        while self._requests:
            request = self._requests.pop(0)
            self.before_serving(request)
            self.copy.handle(self.server.serve(request))
        return self.synced[-1]

    def there(self) -> dict[str, str]:
        files = [path for path in self.copy.path.rglob("*") if path.is_file()]
        return {path.relative_to(self.copy.path).as_posix(): path.read_text() for path in sorted(files)}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="mbp", dir="/tmp") as folder:  # pytest's may be too deep for sockets
        monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", f"{folder}/run")
        (Path(folder) / "run" / "meshbook").mkdir(parents=True, mode=0o700)
        bench = Bench(Path(folder))
        yield bench
        bench.copy.close()


def test_what_differs_comes_and_what_is_gone_goes_with_its_folders_and_bytecode(bench: Bench) -> None:
    bench.write("a.py", "1")
    bench.write("pkg/sub/b.py", "2")
    bench.write("empty")
    bench.write("run.sh", "echo", mode=0o755)
    (bench.project / "empty").write_text("")
    assert bench.sync() == FilesSynced(CallId("s"), 4, 6)
    assert bench.there() == {"a.py": "1", "empty": "", "pkg/sub/b.py": "2", "run.sh": "echo"}
    assert stat.S_IMODE((bench.copy.path / "run.sh").stat().st_mode) == 0o700
    assert stat.S_IMODE((bench.copy.path / "a.py").stat().st_mode) == 0o600
    cache = bench.copy.path / "pkg" / "sub" / "__pycache__"
    cache.mkdir()
    (cache / "b.cpython-311.pyc").write_text("compiled")
    bench.write("a.py", "11")
    (bench.project / "pkg" / "sub" / "b.py").unlink()
    assert bench.sync() == FilesSynced(CallId("s"), 1, 2, 1)
    assert bench.there() == {"a.py": "11", "empty": "", "run.sh": "echo"}
    assert not (bench.copy.path / "pkg").exists()
    assert bench.sync() == FilesSynced(CallId("s"))


def test_a_sync_that_was_under_way_in_a_process_that_was_killed_is_an_error_and_the_next_brings_all_again(
    bench: Bench,
) -> None:
    bench.write("a.py", "1")
    bench.write("b.py", "1")
    bench.sync()
    bench.write("b.py", "2")
    bench.write("new.py")

    def begin_standby(request: messages.FetchFiles) -> None:
        bench.copy._pid = -1
        (bench.copy.path / "b.py").write_text("2")  # it may have come to this
        (bench.copy.path / "new.py").write_text("x")

    bench.before_serving = begin_standby
    assert bench.sync().error == "its host agent was killed while files came; sync again"
    bench.before_serving = lambda request: None
    bench.write("b.py", "1")
    (bench.project / "new.py").unlink()
    assert bench.sync() == FilesSynced(CallId("s"), 2, 2, 1)
    assert bench.there() == {"a.py": "1", "b.py": "1"}
    assert bench.sync() == FilesSynced(CallId("s"))


def test_a_module_that_changed_twice_in_a_second_is_not_run_from_its_old_bytecode(bench: Bench) -> None:
    bench.write("a.py", "1")
    bench.sync()
    cache = bench.copy.path / "__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_text("compiled")
    (cache / "b.cpython-311.pyc").write_text("of another")
    bench.write("a.py", "2")
    bench.sync()
    assert [path.name for path in cache.iterdir()] == ["b.cpython-311.pyc"]


def test_what_ranks_have_written_stays_and_is_not_replaced_by_a_folder(bench: Bench) -> None:
    bench.write("a.py")
    bench.sync()
    (bench.copy.path / "out").write_text("results")
    bench.write("out/new.py")
    done = bench.sync()
    assert done.error.endswith("out is in the way of out/new.py: it was made there by a rank; remove or rename it")
    assert bench.there() == {"a.py": "x", "out": "results"}
    (bench.copy.path / "out").unlink()
    assert bench.sync().error == ""
    assert bench.there() == {"a.py": "x", "out/new.py": "x"}


def test_a_folder_becomes_a_file_and_a_file_a_folder(bench: Bench) -> None:
    bench.write("a/b")
    bench.write("c")
    bench.sync()
    (bench.project / "a" / "b").unlink()
    (bench.project / "a").rmdir()
    (bench.project / "c").unlink()
    bench.write("a", "file")
    bench.write("c/d", "inner")
    assert bench.sync().error == ""
    assert bench.there() == {"a": "file", "c/d": "inner"}


def test_nothing_is_written_or_removed_through_a_link_that_a_rank_has_put_there(bench: Bench, tmp_path: Path) -> None:
    bench.write("pkg/a.py", "1")
    bench.sync()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.py").write_text("mine")
    (bench.copy.path / "pkg" / "a.py").unlink()
    (bench.copy.path / "pkg").rmdir()
    (bench.copy.path / "pkg").symlink_to(elsewhere)
    bench.write("pkg/a.py", "2")
    assert "pkg is in the way" in bench.sync().error
    (bench.project / "pkg" / "a.py").unlink()
    bench.sync()
    assert (elsewhere / "a.py").read_text() == "mine"


@pytest.mark.parametrize(
    "file", [ProjectFile("../evil", 1, b"1"), ProjectFile("/evil", 1, b"1"), ProjectFile("l", link="../../evil")]
)
def test_a_path_outside_of_the_copy_is_refused_and_nothing_is_changed(bench: Bench, file: ProjectFile) -> None:
    bench.write("a.py", "1")
    bench.sync()
    bench.write("a.py", "2")
    assert bench.sync((*bench.files(), file)).error.endswith("nothing was changed")
    assert bench.there() == {"a.py": "1"}


def test_a_link_within_the_project_is_one_in_the_copy(bench: Bench) -> None:
    bench.write("data/a.txt", "1")
    (bench.project / "latest").symlink_to("data/a.txt")
    assert bench.sync().error == ""
    assert os.readlink(bench.copy.path / "latest") == "data/a.txt"
    assert (bench.copy.path / "latest").read_text() == "1"


def test_a_file_that_changes_while_it_travels_has_the_contents_of_one_moment(bench: Bench) -> None:
    size = 3 << 20
    place = bench.write("large", "1" * size)
    small = bench.write("small", "1")

    def change(request: messages.FetchFiles) -> None:
        if request.batch == 2:  # a part of the old contents has come
            place.write_text("2" * size)
            os.utime(place, ns=(1, 1))
        elif request.batch == 3:
            small.unlink()

    bench.before_serving = change
    done = bench.sync()
    assert (done.error, done.num_files, done.num_bytes) == ("", 1, size)
    assert bench.there() == {"large": "2" * size}
    bench.before_serving = lambda request: None
    assert bench.sync() == FilesSynced(CallId("s"))  # its digest is that of what came


def test_a_file_that_never_stands_still_is_named_and_nothing_is_changed(bench: Bench) -> None:
    bench.write("a.py", "1")
    bench.sync()
    bench.write("a.py", "2")
    place = bench.write("train.log", "0")
    bench.before_serving = lambda request: place.write_text(place.read_text() + "0")
    error = bench.sync().error
    assert error.startswith("train.log changed each of the 5 times that it was read; stop what writes it, or leave")
    assert bench.there() == {"a.py": "1"}


def test_a_copy_that_cannot_be_written_is_an_error_and_the_next_sync_repairs_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a.py", "1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/run/x")

    with monkeypatch.context() as patch:
        patch.setattr("meshbook.host.project_copy._Arriving.add", full)
        assert bench.sync().error == "its copy of the project cannot be written: No space left on device (/run/x)"
    assert bench.sync().error == ""
    assert bench.there() == {"a.py": "1"}


def test_ranks_work_in_the_copy_and_import_from_it_before_other_places(bench: Bench) -> None:
    bench.write("src/a.py")
    spec = MeshSpec(
        axes={},
        cwd=f"{bench.project}/notebooks",
        sys_path=("/opt/lib", f"{bench.project}/notebooks", f"{bench.project}/src", f"{bench.project}/.venv/lib"),
        project=ProjectSpec(str(bench.project)),
    )
    assert bench.copy.localize(spec) == spec
    bench.sync()
    local = bench.copy.localize(spec)
    there = f"{bench.copy.path}/"
    assert local.cwd == f"{there}notebooks"
    assert local.sys_path == (f"{there}notebooks", f"{there}src", "/opt/lib", f"{bench.project}/.venv/lib")


def test_the_copy_has_one_path_on_all_machines_unless_hosts_share_one_and_goes_with_its_host(bench: Bench) -> None:
    bench.write("a.py")
    bench.sync()
    assert bench.copy.path == bench.host_folder.parent / "m-1.src" / "proj"
    second = ProjectCopy(Loop(), bench.host_folder.with_name("m-1.h1"), bench.synced.append)
    bench.host_folder.with_name("m-1.h1").mkdir()
    second.handle(messages.SyncFiles(CallId("s"), str(bench.project), ()))
    assert second.path == bench.host_folder.parent / "m-1.h1" / "proj"
    bench.copy.close()
    assert [path.name for path in sorted(bench.host_folder.parent.iterdir())] == ["m-1.h0", "m-1.h1"]
