"""Processes that wait to become ranks: what they have imported, when they are taken, and when they are not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.spares import describe_spares
from meshbook.controller.starting import create_mesh
from meshbook.errors import MeshShapeError, UsageError
from meshbook.wire.messages import SpareInfo
from tests.budget import when
from tests.controller.test_heal import kill, values
from tests.controller.test_process_deaths import kill_and_wait
from tests.host_processes import pid_of

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Its import waits for a file, prints more than a pipe holds, and leaves the number of its process.
SLOW = """
import os, pathlib, time
while not (pathlib.Path(__file__).parent / "open").exists(): time.sleep(0.01)
print("noise " * 400_000)
(pathlib.Path(__file__).parent / f"imported-{os.getpid()}").touch()
"""
# Their import reads what only a rank has.
OF_RANK = "import os\nrank = int(os.environ.get('RANK', -1))"
OF_GROUP = "import torch.distributed as dist\nhas_group = dist.is_initialized()"
EDITED = "version = 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of modules, from which ranks can import."""
    folder = tmp_path_factory.mktemp("modules")
    for name, source in {"slow": SLOW, "of_rank": OF_RANK, "of_group": OF_GROUP, "edited": EDITED}.items():
        (folder / f"{name}.py").write_text(source)
        os.utime(folder / f"{name}.py", (1e9, 1e9))  # long before a spare imports them
    (folder / "open").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        # and what heals and resizes import: else spares may import that as a rank would take them
        mesh.run("from meshbook.rank.resharding import fsdp, moving", echo=False)
        mesh.run("from meshbook.rank.elastic import rollback\nfrom meshbook.rank.healing import sharing", echo=False)
        mesh.run("import slow, edited", echo=False)
        yield mesh


def warm(mesh: Mesh, folder: Path, num: int = 1) -> list[int]:
    """Have spares that have imported what the ranks have; their pids."""
    mesh.spare(num)
    when(lambda: all(is_warm(info, folder) for info in mesh.spare()) and len(mesh.spare()) == num)
    return [info.pid or 0 for info in mesh.spare()]


def is_warm(info: SpareInfo, folder: Path) -> bool:
    return info.state == "ready" and (folder / f"imported-{info.pid}").exists()


def heal_in_time(mesh: Mesh, folder: Path) -> Any:
    """Heal while what the ranks have imported cannot be imported again."""
    (folder / "open").unlink()
    try:
        return mesh.heal()
    finally:
        (folder / "open").touch()


def test_a_new_rank_is_a_spare_that_has_imported_what_the_ranks_have_and_another_is_made(
    pair: Mesh, folder: Path
) -> None:
    (spare,) = warm(pair, folder)
    kill(pair, 1)
    healed = heal_in_time(pair, folder)
    assert healed.ranks == (1,)
    assert pid_of(pair, 1) == spare
    assert values(pair, "import os\nrank, int(os.environ['RANK']), world_size, 'slow' in globals()") == {
        0: (0, 0, 2, True), 1: (1, 1, 2, True),
    }  # fmt: skip
    assert values(pair, "t = torch.ones(1)\ndist.all_reduce(t)\nint(t)") == {0: 2, 1: 2}
    assert pair.run("print('heard')", ranks=1, echo=False).output == "heard\n"  # and nothing that the spare has printed
    assert warm(pair, folder) != [spare]


def test_a_package_that_reads_the_rank_when_it_is_imported_is_left_to_the_rank(pair: Mesh, folder: Path) -> None:
    before = warm(pair, folder)
    pair.run("import of_rank, of_group", echo=False)
    when(lambda: len(pair.spare()[0].left_out) == 2 and pair.spare()[0].pid not in before)
    (spare,) = warm(pair, folder)
    assert dict(pair.spare()[0].left_out) == {
        "of_rank": "its import reads RANK of the environment",
        "of_group": "its import reads the process group",
    }
    assert "A rank imports these itself: of_rank (its import reads RANK" in str(pair.spare())
    kill(pair, 1)
    pair.heal()
    assert pid_of(pair, 1) == spare
    assert values(pair, "of_rank.rank, of_group.has_group") == {0: (0, True), 1: (1, True)}


def test_a_spare_whose_files_have_changed_since_is_not_used(pair: Mesh, folder: Path) -> None:
    (spare,) = warm(pair, folder)
    (folder / "edited.py").write_text("version = 22")
    kill(pair, 1)
    pair.heal()
    assert pid_of(pair, 1) != spare
    assert values(pair, "edited.version") == {0: 1, 1: 22}


def test_a_spare_that_dies_is_replaced_and_that_is_said_where_spares_are_shown(pair: Mesh, folder: Path) -> None:
    (spare,) = warm(pair, folder)
    os.kill(spare, signal.SIGKILL)
    when(lambda: pair.spare().num_ready == 1 and pair.spare()[0].pid != spare)
    assert "The one before was killed by SIGKILL." in str(pair.spare())
    assert pair.run("print('heard')", ranks=1, echo=False).output == "heard\n"


def test_a_spare_that_does_not_answer_is_not_waited_for(pair: Mesh, folder: Path) -> None:
    (spare,) = warm(pair, folder)
    os.kill(spare, signal.SIGSTOP)
    kill(pair, 1)
    assert pair.heal().ranks == (1,)
    assert pid_of(pair, 1) != spare
    when(lambda: not Path(f"/proc/{spare}").exists())


def test_ranks_that_join_are_spares(pair: Mesh, folder: Path) -> None:
    spares = warm(pair, folder, 2)
    pair.resize(4)
    joined = {pid_of(pair, 2), pid_of(pair, 3)}
    sums = values(pair, "t = torch.ones(1) * rank\ndist.all_reduce(t)\nint(t)")
    pair.resize(2)  # whatever came of it: the tests below have this mesh too
    assert joined == set(spares)
    assert sums == dict.fromkeys(range(4), 6)


def test_zero_ends_them_and_what_is_no_number_of_spares_is_refused(pair: Mesh, folder: Path) -> None:
    spares = warm(pair, folder, 2)
    with pytest.raises(MeshShapeError, match=r"3 spares for 2 ranks of a machine: .* %mesh spare 2 keeps one for each"):
        pair.spare(3)
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(UsageError, match=r"write mesh.spare\(1\)"):
            pair.spare(wrong)  # type: ignore[arg-type]
    assert len(pair.spare()) == 2
    pair.spare(0)
    when(lambda: not any(Path(f"/proc/{spare}").exists() for spare in spares))
    when(lambda: not pair.spare())
    assert "keeps no spares" in str(pair.spare())


def test_what_is_said_of_spares() -> None:
    infos = [SpareInfo(0, "box", 7, "ready"), SpareInfo(0, "box", None, "starting")]
    assert describe_spares("m", infos) == "Mesh m keeps 2 spares: 1 ready."
    assert describe_spares("m", infos[:1]) == "Mesh m keeps 1 spare: ready."


def test_a_supervisor_that_takes_over_has_spares_of_its_own_and_they_become_ranks(pair: Mesh, folder: Path) -> None:
    (former,) = warm(pair, folder)
    kill_and_wait(pair)
    when(lambda: [is_warm(info, folder) and info.pid != former for info in pair.spare()] == [True])
    assert not psutil.pid_exists(former)
    (spare,) = pair.spare()
    kill(pair, 1)
    assert heal_in_time(pair, folder).ranks == (1,)
    assert pid_of(pair, 1) == spare.pid
    pair.spare(0)
