"""Cells that are rough with the process that they run in: the ranks' next cells, collectives, pulls and Stops work."""

from __future__ import annotations

import ast
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted
from meshbook.host.rlimits import TARGET_FD_LIMIT
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")

REDUCED = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module")
def rough() -> Iterator[Mesh]:
    """Ranks that have been through all that cells of other tests here did to them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, soft), hard))  # a usual one
    with create_mesh(2) as mesh:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        mesh.run("import builtins, os, signal, sys, time\nkept = rank")
        yield mesh


def assert_usable(mesh: Mesh) -> None:
    assert dict(mesh.run(f"print('said')\n{REDUCED}").values) == {0: 2.0, 1: 2.0}
    assert "said" in mesh.run("os.write(1, b'said')", echo=False).output
    with pytest.raises(CellError, match="ZeroDivisionError"):
        mesh.run("1 / 0")
    mesh.run("large = torch.ones(300_000)")
    assert [value.shape for value in mesh.pull("large").values()] == [(300_000,), (300_000,)]
    future = mesh.run("print('at it')\nwhile True: pass", wait=False, echo=False)
    when(lambda: all(mesh.logs(rank).endswith("at it\n") for rank in mesh.ranks))
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    assert dict(mesh.run(REDUCED).values) == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (
            "print = rank = world_size = dist = torch = mesh = None",
            "del print; import torch, torch.distributed as dist; rank = dist.get_rank()",
        ),
        (
            "was = vars(time).copy(); time.monotonic = time.time = time.sleep = time.perf_counter = None",
            "vars(time).update(was)",
        ),
        ("was = builtins.print; builtins.print = lambda *texts: was('mine', *texts)", "builtins.print = was"),
        ("__import__('zmq').Context.instance().destroy()", ""),
        ("sys.stdout.close(); sys.stderr.close(); os.closerange(0, 3)", ""),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", ""),
        ("for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_DFL)", ""),
        ("was = dict(os.environ); os.environ.clear()", "os.environ.update(was)"),
        ("was = sys.path[:]; sys.path.clear()", "sys.path[:] = was"),
    ],
)
def test_what_cells_rebind_and_close_of_their_process_does_not_concern_the_mesh(
    rough: Mesh, spoil: str, mend: str
) -> None:
    rough.run(spoil)
    assert dict(rough.run("kept").values) == {0: 0, 1: 1}
    rough.run(mend)
    assert_usable(rough)


def test_built_in_functions_that_a_cell_has_made_away_with_are_put_back_and_told(rough: Mesh) -> None:
    output = rough.run("builtins.print = builtins.len = None; del builtins.isinstance", echo=False).output
    assert "put back what the cell had made of builtins" in output
    for name in ("print", "len", "isinstance"):
        assert name in output
    assert_usable(rough)


def test_modules_are_put_back_where_a_cell_has_cleared_sys_modules(rough: Mesh) -> None:
    assert "put modules back into sys.modules" in rough.run("sys.modules.clear()", echo=False).output
    rough.run("import torch.nn, json, http.server")
    assert_usable(rough)


def test_a_cell_that_clears_its_globals_leaves_the_names_that_are_there_from_the_start(rough: Mesh) -> None:
    rough.run("globals().clear()")
    assert dict(rough.run("rank").values) == {0: 0, 1: 1}
    rough.run("import builtins, os, signal, sys, time\nkept = rank")
    assert_usable(rough)


def test_a_forked_process_ends_where_its_cell_ends_with_the_status_of_a_script(rough: Mesh) -> None:
    for end, status in (("pass", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os._exit(4)", 4)):
        source = (
            f"child = os.fork()\nif not child:\n    print('of the child')\n    {end}\n"
            "else: status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
        )
        assert "of the child" in rough.run(source, echo=False).output
        assert dict(rough.run("status").values) == {0: status, 1: status}
    assert_usable(rough)


def test_a_rank_without_file_descriptors_says_so_and_groups_are_formed_once_it_has_some(rough: Mesh) -> None:
    """Forming groups takes descriptors, and the others would wait for a minute for the rank that has none."""
    take = (
        "import resource\nlimits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "if rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))), limits[1]))\n"
        "    held = []\n"
        "    try:\n        while True: held.append(os.open('/dev/null', 0))\n"
        "    except OSError: pass\n"
    )
    rough.run(take)
    assert dict(rough.run("kept").values) == {0: 0, 1: 1}
    with pytest.raises(CellError, match="ValueError"):
        rough.run("if rank: raise ValueError\ndist.barrier()")
    with pytest.raises(CellError, match=r"no file descriptors left \(its limit is \d+\): close files"):
        rough.run(REDUCED)
    assert dict(rough.run("kept").values) == {0: 0, 1: 1}
    rough.run("resource.setrlimit(resource.RLIMIT_NOFILE, limits)\nfor fd in globals().pop('held', ()): os.close(fd)")
    assert_usable(rough)


def test_the_supervisor_may_open_more_files_than_the_ranks_whose_limit_is_their_users(rough: Mesh) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = rough.run("import resource\nresource.getrlimit(resource.RLIMIT_NOFILE)").values
    assert dict(limits) == {0: (1000, hard), 1: (1000, hard)}
    supervisor = resource.prlimit(rough.session.info.supervisor_pid, resource.RLIMIT_NOFILE)
    assert supervisor == (min(TARGET_FD_LIMIT, hard), hard)


def test_what_runs_on_ranks_takes_its_time_from_where_user_code_does_not_rebind_it() -> None:
    package = Path(meshbook.__file__).parent
    places = [
        f"{path.relative_to(package)}:{node.lineno}"
        for folder in ("rank", "wire", "actors/runtime")
        for path in (package / folder).rglob("*.py")
        if path.name != "forkserver.py"  # runs no user code
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    ]
    assert not places, "meshbook.clock has these functions"
