"""The notebook's project folder on two machines that ssh reaches."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, StartError, SyncError
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed
from tests.host_processes import keepers_among, kill_agent
from tests.kernel.frontend import kernel

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]

ON = "ssh://n1,n2"
# Stands in for uv: makes the environment that it is asked for, with a package, in the folder that has the lock.
FAKE_UV = """#!/bin/sh -e
[ "$*" = "sync --frozen --color never --no-progress --python {python}" ] || {{ echo "unexpected: $*"; exit 9; }}
cat uv.lock
grep -q good uv.lock || {{ echo "error: the lock is bad" >&2; exit 2; }}
{python} -m venv --without-pip "$UV_PROJECT_ENVIRONMENT"
cd "$UV_PROJECT_ENVIRONMENT"/lib/python*/site-packages
echo "WHERE = '$(hostname)'" > from_lock.py
"""


@pytest.fixture
def project(bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project folder, which is the current one. Machines do not see it: their /tmp is their own."""
    root = tmp_path / "proj"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("")
    (root / "pkg" / "util.py").write_text("VALUE = 1\n")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    return root


@pytest.fixture
def mesh(project: Path) -> Iterator[Mesh]:
    with create_mesh(2, on=ON, torch=False, sync=True) as mesh:
        yield mesh


def same(mesh: Mesh, source: str) -> Any:
    return mesh.run(source, echo=False).values.same()


def copies(bed: Bed) -> list[str]:
    """The copies of projects on the machines."""
    return [path for name in bed.running for path in bed.files(name) if ".src" in path]


def test_modules_of_the_project_are_imported_from_the_copy_and_changes_are_everywhere_within_a_second(
    mesh: Mesh, project: Path, bed: Bed
) -> None:
    copy = same(mesh, "import importlib, os, pkg.util\nos.getcwd()")
    assert copy != str(project)
    assert same(mesh, "(pkg.util.__file__, pkg.util.VALUE)") == (f"{copy}/pkg/util.py", 1)
    for value in (2, 3):  # of one size, and within a second
        (project / "pkg" / "util.py").write_text(f"VALUE = {value}\n")
        before = time.monotonic()
        synced = mesh.sync()
        assert time.monotonic() - before < 1  # 20 ms on a quiet machine
        assert [(host.machine, host.num_files, host.num_bytes) for host in synced.hosts] == [
            ("n1", 1, 10),
            ("n2", 1, 10),
        ]
        assert same(mesh, "importlib.reload(pkg.util).VALUE") == value
    (project / "pkg" / "util.py").unlink()
    (project / "new.py").write_text("x = 5")
    assert [host.num_removed for host in mesh.sync().hosts] == [1, 1]
    assert same(mesh, "(os.path.exists('pkg/util.py'), __import__('new').x)") == (False, 5)
    mesh.stop()
    when(lambda: not copies(bed))


def test_a_cell_of_a_notebook_finds_what_was_saved_before_it(project: Path) -> None:
    with kernel(cwd=project) as front:
        start = front.run(f"%mesh start --nodes 2 --per-node 1 --on {ON} --sync")
        assert "ranks work in a copy of" in start.text
        assert front.run("import pkg.util, importlib\npkg.util.VALUE").result == "1"
        (project / "pkg" / "util.py").write_text("VALUE = 2\n")

        def value() -> str | None:
            result: str | None = front.run("importlib.reload(pkg.util).VALUE").result
            return result

        assert when(lambda: value() == "2") < WAIT_S
        assert "0 files (0 B) went to n1, n2; 2 in all" in front.run("%mesh sync").text


def test_a_module_that_only_the_notebooks_machine_has_is_an_error_that_names_sync(bed: Bed, project: Path) -> None:
    with create_mesh(2, on=ON, torch=False) as mesh, pytest.raises(CellError) as raised:
        mesh.run("import pkg.util", echo=False)
    assert "%mesh restart --sync brings the project folder" in raised.value.__notes__[-1]


def test_a_machine_that_dies_while_files_travel_is_not_waited_for_and_has_them_when_it_is_healed(
    mesh: Mesh, project: Path, bed: Bed
) -> None:
    for number in range(4):
        (project / f"large{number}.bin").write_bytes(os.urandom(32 << 20))
    (host,) = keepers_among(bed.processes("n2"))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(mesh.sync()))
    thread.start()
    when(lambda: any(".incoming" in path for path in copies(bed)))
    os.kill(host, signal.SIGKILL)
    thread.join(WAIT_S)
    assert [synced.machine for synced in found[0].hosts] == ["n1"]
    mesh.heal()
    sizes = "import os\nsorted(os.path.getsize(name) for name in os.listdir() if name.endswith('bin'))"
    assert same(mesh, sizes) == [32 << 20] * 4
    assert not any(".incoming" in path for path in copies(bed))


def test_a_host_agent_that_is_killed_while_files_travel_ends_the_sync_and_the_next_brings_all(
    mesh: Mesh, project: Path, bed: Bed
) -> None:
    for number in range(4):
        (project / f"large{number}.bin").write_bytes(os.urandom(32 << 20))

    def kill() -> None:
        when(lambda: any(".incoming" in path for path in copies(bed)))
        kill_agent(mesh.name, 1)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(SyncError, match="n2: its host agent was killed while files came; sync again"):
        mesh.sync()
    thread.join(WAIT_S)
    mesh.sync()
    sizes = "import os\nsorted(os.path.getsize(name) for name in os.listdir() if name.endswith('bin'))"
    assert same(mesh, sizes) == [32 << 20] * 4


def test_a_file_that_changes_while_it_travels_has_the_contents_of_one_moment_on_each_machine(
    mesh: Mesh, project: Path, bed: Bed
) -> None:
    place, size = project / "large.bin", 64 << 20
    place.write_bytes(b"1" * size)
    thread = threading.Thread(target=mesh.sync)
    thread.start()
    when(lambda: any(".incoming" in path for path in copies(bed)))
    place.write_bytes(b"2" * size)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    contents = "set(open('large.bin', 'rb').read())"
    assert set(dict(mesh.run(contents, echo=False).values)) == {0, 1}
    assert all(len(found) == 1 for found in mesh.run(contents, echo=False).values.values())
    mesh.sync()
    assert same(mesh, contents) == {ord("2")}


def test_uv_makes_the_environment_on_each_machine_and_its_words_are_shown_with_the_machine(
    bed: Bed, project: Path
) -> None:
    folder = bed.folder / "uv"
    folder.mkdir()
    (folder / "uv").write_text(FAKE_UV.format(python=sys.executable))
    (folder / "uv").chmod(0o755)
    (project / "uv.lock").write_text("good")
    clusters = '[clusters.lab]\non = "{on}"\nbefore = "{before}"\n'
    before = f"export PATH={folder}:$PATH"
    (project / "meshbook.toml").write_text(clusters.format(on=ON, before=before))
    with create_mesh(2, on="lab", torch=False, sync=True, uv=True) as mesh:
        found = mesh.run("import from_lock, pkg.util\nfrom_lock.WHERE", echo=False).values
        assert dict(found) == {0: "n1", 1: "n2"}
    (project / "uv.lock").write_text("bad")
    with pytest.raises(StartError, match=r"n[12]: uv sync --frozen failed with status 2: .*error: the lock is bad"):
        create_mesh(2, on="lab", torch=False, sync=True, uv=True)
    (project / "meshbook.toml").write_text(clusters.format(on=ON, before="export HOME=/nowhere"))
    if not (Path(sys.executable).parent / "uv").exists():
        with pytest.raises(StartError, match=r"n[12]: it has no uv, which --env uv needs .*-m pip install uv"):
            create_mesh(2, on="lab", torch=False, sync=True, uv=True)
    when(lambda: not copies(bed))
