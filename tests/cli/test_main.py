"""`meshbook list`, `status`, `stop` and what a slip of the keyboard is answered with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshbook as package
from meshbook import create_mesh, list_meshes
from meshbook.controller.mesh import Mesh
from meshbook.wire import keys
from tests.budget import WAIT_S, when
from tests.cli.commands import meshbook, typed
from tests.kernel.frontend import has_exited
from tests.ptrace import ptrace_stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh(run: object) -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 1}, name="shown") as mesh:
        mesh.run("weights = rank")
        yield mesh


# ---- a mesh that runs


def test_list_shows_every_mesh(mesh: Mesh) -> None:
    done = meshbook("list")
    assert done.status == 0
    head, row = done.out.splitlines()
    assert re.fullmatch(r"name +size +state +up +attached", head)
    assert re.fullmatch(rf"shown +2 ranks \(dp=2, tp=1\) +idle +\d+ s +script \(pid {os.getpid()}\)", row)


def test_list_for_programs_is_json(mesh: Mesh) -> None:
    (found,) = json.loads(typed("list", "--json").out)
    assert found["name"] == "shown"
    assert found["pid"] == mesh.session.info.supervisor_pid
    assert found["info"]["spec"]["axes"] == {"dp": 2, "tp": 1}
    assert [rank["state"] for rank in found["info"]["ranks"]] == ["idle", "idle"]


def test_status_needs_no_name_when_there_is_one_mesh(mesh: Mesh) -> None:
    done = typed("status")
    assert done.status == 0
    assert done.out.startswith("Mesh shown: 2 ranks (dp=2, tp=1), process group ready (gloo), up ")
    assert re.search(r"^1 +idle +cpu", done.out, re.MULTILINE)
    assert "Names on the ranks: weights." in done.out
    assert _but_memory(typed("status", "shown").out) == _but_memory(done.out)


def _but_memory(shown: str) -> list[str]:
    """The rows of two ranks, without what they use, which is another from second to second."""
    return [re.sub(r"\d+ MiB", "MiB", line) for line in shown.splitlines()[1:3]]


def test_status_for_programs_is_json(mesh: Mesh) -> None:
    info = json.loads(typed("status", "shown", "--json").out)
    assert info["names"] == ["weights"]
    assert info["groups"] == "ready"


def test_asking_leaves_no_trace(mesh: Mesh) -> None:
    meshbook("status")
    list_meshes()
    assert mesh.status().clients == (f"script (pid {os.getpid()})",)


def test_status_shows_the_running_cell_and_its_line(mesh: Mesh) -> None:
    future = mesh.run("import time\nprint('begun')\nwhile True:\n    time.sleep(0.05)", wait=False, echo=False)
    try:
        pattern = re.compile(r"^0 +busy, the cell line [34]", re.MULTILINE)
        when(lambda: pattern.search(typed("status").out))  # the line comes with a rank's next beat
    finally:
        future.interrupt()
        future.exception(WAIT_S)


def test_an_unknown_name_is_answered_with_those_that_run(mesh: Mesh) -> None:
    for words in (("status", "nope"), ("stop", "nope"), ("attach", "nope")):
        done = typed(*words)
        assert (done.status, done.out) == (1, "")
        assert done.err == "meshbook: no mesh is named 'nope'; running: shown\n"


def test_several_meshes_need_a_name(mesh: Mesh) -> None:
    with create_mesh(1, name="second"):
        for words in (("status",), ("stop",), ("attach",)):
            done = typed(*words)
            assert done.status == 1
            assert done.err == "meshbook: 2 meshes are running (shown, second); say which one\n"


# ---- ending


def test_stop_ends_a_mesh_and_all_that_is_on_it(run: object) -> None:
    mesh = create_mesh(1, name="to-be-stopped")
    pids = [mesh.session.info.supervisor_pid, mesh.run("import os; os.getpid()").values[0]]
    done = meshbook("stop", "to-be-stopped")
    assert (done.status, done.out, done.err) == (0, "to-be-stopped has ended\n", "")
    assert [pid for pid in pids if not has_exited(pid)] == []
    assert not (keys.runtime_folder() / "to-be-stopped").exists()


@pytest.mark.thorough
def test_a_supervisor_that_does_not_answer_is_ended_all_the_same(run: object) -> None:
    mesh = create_mesh(1, name="stuck")
    rank = mesh.run("import os; os.getpid()").values[0]
    with ptrace_stopped(mesh.session.info.supervisor_pid):
        assert "does not answer" in typed("list").out
        done = typed("stop", "stuck")
    assert (done.status, done.out) == (0, "stuck did not answer and was killed\n")
    when(lambda: has_exited(rank), "the end of the rank")
    assert not (keys.runtime_folder() / "stuck").exists()
    mesh.session.close()


def test_stop_all_ends_every_mesh_of_this_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A runtime folder of its own, so that the other tests' meshes live.
    folder = str(tmp_path_factory.mktemp("r"))
    os.chmod(folder, 0o700)
    program = (
        "import meshbook, sys\nfor name in 'ab': meshbook.create_mesh(1, name=name, process_group=False).detach(60)"
    )
    env = {"MESHBOOK_RUNTIME_DIR": folder}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, check=True, timeout=WAIT_S)
    assert sorted(line.split()[0] for line in typed("list", env=env).out.splitlines()[1:]) == ["a", "b"]
    done = typed("stop", "--all", env=env)
    assert (done.status, done.out) == (0, "a has ended\nb has ended\n")
    assert typed("stop", "--all", env=env).out == "no mesh is running\n"


# ---- nothing to work with, and slips of the keyboard


@pytest.fixture
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    return {"MESHBOOK_RUNTIME_DIR": str(folder)}


@pytest.mark.parametrize("words", [("status",), ("attach",), ("stop",), ("status", "x")])
def test_without_a_mesh_the_terminal_is_told_how_to_start_one(nowhere: dict[str, str], words: tuple[str, ...]) -> None:
    done = typed(*words, env=nowhere)
    assert (done.status, done.err) == (1, "meshbook: no mesh is running; meshbook repl -n 4 starts one\n")


def test_an_empty_list_is_no_failure(nowhere: dict[str, str]) -> None:
    assert typed("list", env=nowhere).out == "no mesh is running\n"
    assert json.loads(typed("list", "--json", env=nowhere).out) == []


def test_what_a_dead_mesh_left_is_told_of_and_removed(nowhere: dict[str, str], run: object) -> None:
    # Left first: who is attached when a supervisor dies removes what it leaves.
    program = (
        "import meshbook; m = meshbook.create_mesh(1, name='dead'); m.detach(60); "
        "meshbook.wire.process_control.kill_supervisor(m.session.info.supervisor_pid)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **nowhere}, check=True, timeout=WAIT_S)
    done = typed("list", env=nowhere)
    assert done.out == "no mesh is running\n"
    assert os.listdir(Path(nowhere["MESHBOOK_RUNTIME_DIR"]) / "meshbook") == []


def test_a_folder_that_others_can_read_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("open") / "meshbook"
    folder.mkdir(mode=0o755)
    done = typed("list", env={"MESHBOOK_RUNTIME_DIR": str(folder.parent)})
    assert done.status == 1
    assert done.err.startswith(f"meshbook: the folder {folder} is open to others (mode 0755, wanted 0700)")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("frobnicate",), "there is no command 'frobnicate'; there are repl, list"),
        (("sttus",), "there is no command 'sttus'; did you mean status?"),
        (("repl", "-n", "many"), "'many' is not a number of ranks; write it like -n 4"),
        (("repl", "--axes", "dp:2"), "'dp:2' does not name the axes of a mesh; write them like dp=2,tp=2"),
        (("repl", "-n", "3", "--axes", "dp=2"), "axes dp=2 make 2 ranks, but -n asks for 3"),
        (("repl", "--name", "a/b"), "'a/b' cannot name a mesh"),
        (("run",), "the following arguments are required: FILE.ipynb|FILE.py"),
        (("run", "x.ipynb", "--timeout", "soon"), "'soon' is not a number of seconds"),
        (("stop", "x", "--all"), "x or --all, not both"),
        (("install", "--user", "--prefix", "/x"), "not allowed with argument --user"),
    ],
)
def test_a_slip_of_the_keyboard_ends_with_status_2(words: tuple[str, ...], sentence: str) -> None:
    done = typed(*words)
    assert done.status == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_the_version_is_the_packages() -> None:
    assert meshbook("--version").out == f"meshbook {package.__version__}\n"


def test_help_names_every_command() -> None:
    out = typed("--help").out
    for word in ("repl", "list", "status", "attach", "run", "stop", "doctor", "install"):
        assert re.search(rf"^    {word} +\S", out, re.MULTILINE)


def test_a_reader_that_leaves_early_is_no_error(mesh: Mesh) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m meshbook list --json | head -c 1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "[0\n"
    assert done.stderr == ""


def test_arguments_of_a_script_that_are_not_behind_two_dashes_are_answered_with_how_to_write_them() -> None:
    done = typed("run", "train.py", "-n", "2", "--epochs", "3")
    assert done.status == 2
    assert "arguments follow --: meshbook run FILE.py -- --epochs 3" in done.err
    assert "follow --" not in typed("list", "--epochs").err


def test_help_shows_the_mark_of_a_cell_as_it_is_written() -> None:
    assert "a script with `# %%` cells" in " ".join(typed("run", "--help").out.split())
    assert "a script with `# %%` cells" in " ".join(typed("--help").out.split())
