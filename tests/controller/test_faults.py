"""Ranks that die, hang or freeze: real ones, killed by real signals, on meshes of their own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from meshbook.controller.launch import FORK_SERVER_VARIABLE
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted, NotAttached, RankLost, StartError
from meshbook.wire import keys, messages
from meshbook.wire.process_control import kill_supervisor
from tests.budget import WAIT_S, when
from tests.controller.test_heal import kill
from tests.gate import Gate
from tests.host_processes import pid_of
from tests.kernel.frontend import has_exited
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")


def begun(mesh: Mesh, source: str) -> object:
    """Start a cell in the background and wait until every rank is in it."""
    future = mesh.run(f"print('begun')\n{source}", wait=False, echo=False)
    when(lambda: all("begun" in mesh.logs(rank) for rank in mesh.session.living(mesh.ranks)))
    return future


def test_a_killed_rank_ends_the_cell_and_is_named(trio: Mesh) -> None:
    future = begun(trio, "print('my last words') if rank == 1 else None\nimport time\ntime.sleep(1000)")
    pid = pid_of(trio, 1)
    os.kill(pid, signal.SIGKILL)
    error = future.exception(WAIT_S)  # type: ignore[attr-defined]
    assert isinstance(error, RankLost)
    assert (error.ranks, error.pid, error.signal, error.survivors) == ((1,), pid, "SIGKILL", (0, 2))
    assert "my last words" in error.last_lines
    assert "rank 1" in str(error)
    assert "SIGKILL" in str(error)


def test_a_lost_rank_asked_for_by_number_is_told_and_nothing_is_run(trio: Mesh) -> None:
    kill(trio, 1)
    with pytest.raises(RankLost, match="nothing was run"):
        trio.run("ran = True", ranks=[0, 1])
    assert "ran" not in trio.status().names


def test_a_collective_without_the_lost_rank_ends_with_a_reason_at_once(trio: Mesh) -> None:
    kill(trio, 2)
    with pytest.raises(CellError, match=r"rank 2|peer|Connection"):
        trio.run("dist.all_reduce(torch.ones(1))", timeout=WAIT_S)


def test_a_rank_that_leaves_by_os_exit_is_lost_with_its_status(trio: Mesh) -> None:
    with pytest.raises(RankLost) as raised:
        trio.run("import os\nif rank == 0: os._exit(7)\nimport time\ntime.sleep(1000)")
    assert (raised.value.ranks, raised.value.exit_code, raised.value.signal) == ((0,), 7, None)


def test_what_c_code_wrote_just_before_it_aborted_is_among_the_last_lines_and_its_collective_is_named(
    trio: Mesh,
) -> None:
    with pytest.raises(RankLost) as raised:
        trio.run(
            "import os\n\ndist.all_reduce(torch.ones(2))\n"
            "if rank == 2: os.write(2, b'assertion failed in C\\n'); os.abort()"
        )
    assert raised.value.signal == "SIGABRT"
    assert "assertion failed in C" in raised.value.last_lines
    assert raised.value.last_collective is not None
    assert "all_reduce #" in raised.value.last_collective
    assert "line 3 of the cell" in raised.value.last_collective


def test_the_death_of_an_idle_rank_is_news_at_once(trio: Mesh) -> None:
    news: list[int] = []
    trio.session.lost_listeners.append(lambda exited: news.extend(one.rank for one in exited))
    os.kill(pid_of(trio, 0), signal.SIGKILL)
    when(lambda: news == [0])
    assert "rank 0 lost" in repr(trio)


def test_a_stopped_rank_is_reported_silent_and_runs_on_when_continued(trio: Mesh) -> None:
    pid = pid_of(trio, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        when(lambda: trio.status().ranks[1].state == "silent")
    finally:
        os.kill(pid, signal.SIGCONT)
    when(lambda: trio.status().ranks[1].state == "idle")
    assert list(trio.run("rank").values.values()) == [0, 1, 2]


def test_a_supervisor_that_dies_with_its_standby_takes_its_ranks_along_and_the_client_is_told(trio: Mesh) -> None:
    pids = [pid_of(trio, rank) for rank in trio.ranks]
    future = begun(trio, "import time\ntime.sleep(1000)")
    kill_supervisor(trio.session.info.supervisor_pid)
    with pytest.raises(NotAttached, match="supervisor"):
        future.result(WAIT_S)  # type: ignore[attr-defined]
    when(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids))
    with pytest.raises(NotAttached, match="%mesh start"):
        trio.run("1")


def test_a_supervisor_that_is_told_to_end_by_a_signal_says_so_and_a_hangup_does_nothing(trio: Mesh) -> None:
    supervisor = trio.session.info.supervisor_pid
    os.kill(supervisor, signal.SIGHUP)
    os.kill(supervisor, signal.SIGINT)
    assert list(trio.run("rank").values.values()) == [0, 1, 2]
    future = begun(trio, "import time\ntime.sleep(1000)")
    os.kill(supervisor, signal.SIGTERM)
    error = future.exception(WAIT_S)  # type: ignore[attr-defined]
    assert isinstance(error, NotAttached)
    assert f"its supervisor (pid {supervisor}) was ended by a signal (SIGTERM)" in str(error)
    assert "%mesh restart gives fresh ones" in str(error)


def test_a_mesh_whose_ranks_cannot_start_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match="no GPU is visible here"):
        create_mesh(2, device="cuda")


def test_a_torch_that_cannot_be_imported_fails_the_start_with_its_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.delenv(FORK_SERVER_VARIABLE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = {found.name for found in keys.list_connections()}  # meshes that other tests share
    with pytest.raises(StartError, match="this torch is broken"):
        create_mesh(2)
    when(lambda: {found.name for found in keys.list_connections()} <= before)


@pytest.mark.thorough
def test_a_host_that_stands_still_in_a_stop_does_not_interrupt_the_clean_up(trio: Mesh, tmp_path: Path) -> None:
    begun, cleaning, later, cleaned = (tmp_path / name for name in ("begun", "cleaning", "later", "cleaned"))
    source = f"""
import time, pathlib
def until(at, path):
    while time.monotonic() < at: pass
    pathlib.Path(path).touch()
try:
    pathlib.Path({str(begun)!r}).touch()
    while True: pass
finally:
    pathlib.Path({str(cleaning)!r}).touch()
    at = time.monotonic()
    until(at + 0.7, {str(later)!r})
    until(at + 1.7, {str(cleaned)!r})
"""
    supervisor = trio.status().supervisor_pid
    command = trio.session.cell_command(source, (1,))
    future = trio.session.request(command)
    when(begun.exists)
    trio.session.interrupt((1,), target=command.call)
    when(cleaning.exists)
    with stopped(supervisor):  # before it repeats the signal, mostly
        when(later.exists)
    assert [part.outcome.status for part in future.result(WAIT_S).outcomes] == ["interrupted"]
    assert cleaned.exists()


def test_a_stop_reaches_a_rank_that_takes_its_cell_late(trio: Mesh) -> None:
    # A rank that is stopped is let go on, gets the signals as one, and reads its cell after that.
    late, session, said = pid_of(trio, 1), trio.session, list[object]()
    os.kill(late, signal.SIGSTOP)
    command = session.cell_command("while True: pass", trio.ranks)
    future = session.request(command, on_output=said.append)
    session.interrupt(trio.ranks, target=command.call)
    assert {part.outcome.status for part in future.result(WAIT_S).outcomes} == {"interrupted"}
    assert "rank 1 was stopped (SIGSTOP), and let go on (SIGCONT) by Stop" in str(said)
    assert dict(trio.run("rank").values) == {0: 0, 1: 1, 2: 2}


@pytest.mark.thorough
def test_a_stop_in_a_hook_of_ipython_ends_the_cell_that_would_follow(trio: Mesh) -> None:
    trio.run(
        "import time\n"
        "def hook(*_):\n"
        "    if rank == 1 and not hook.has_run:\n"
        "        hook.has_run = True\n"
        "        print('in the hook', flush=True)\n"
        "        time.sleep(1000)\n"
        "hook.has_run = False\n"
        "get_ipython().events.register('pre_execute', hook)"
    )
    future = trio.run("went_on = True\nwhile True: time.sleep(0.01)", wait=False, echo=False)
    when(lambda: "in the hook" in trio.logs(1))
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    assert dict(trio.run("'went_on' in globals()").values)[1] is False


@pytest.mark.thorough
def test_a_users_signal_handler_that_raises_between_two_cells_does_not_end_a_rank(trio: Mesh) -> None:
    trio.run(
        "import signal\n"
        "def handle(*_):\n"
        "    raise TimeoutError('the alarm of a cell that is over')\n"
        "signal.signal(signal.SIGUSR1, handle)\n"
        "kept = 42"
    )
    os.kill(pid_of(trio, 1), signal.SIGUSR1)
    when(lambda: "the alarm of a cell that is over" in trio.logs(1))
    assert dict(trio.run("kept").values) == dict.fromkeys(range(3), 42)


@pytest.mark.thorough
def test_what_a_signal_handler_raises_when_the_end_has_been_sent_is_in_the_log(trio: Mesh) -> None:
    source = (
        "import sys\n"
        "def trace(frame, event, arg):\n"
        "    if event == 'return' and frame.f_code.co_name == 'send_frames':\n"
        "        sys.setprofile(None)\n"
        "        raise TimeoutError('later than late')\n"
        "if rank == 1:\n"
        "    sys.setprofile(trace)"
    )
    trio.run(source, timeout=WAIT_S)
    when(lambda: "TimeoutError: later than late" in trio.logs(1))
    assert dict(trio.run("rank", timeout=WAIT_S).values) == {0: 0, 1: 1, 2: 2}


@pytest.mark.thorough
def test_what_a_signal_handler_raises_in_the_ranks_own_lines_ends_its_call_alone(trio: Mesh) -> None:
    source = (
        "import sys\n"
        "def trace(frame, event, arg):\n"  # a profiler raises where a signal handler would, but at a line of our choice
        "    if frame.f_code.co_name == '_report_finished':\n"
        "        sys.setprofile(None)\n"
        "        raise TimeoutError('too late')\n"
        "if rank == 1:\n"
        "    sys.setprofile(trace)"
    )
    with pytest.raises(CellError, match="too late"):
        trio.run(source, timeout=WAIT_S)
    assert dict(trio.run("rank", timeout=WAIT_S).values) == {0: 0, 1: 1, 2: 2}


# A loader whose workers are stuck, one of them on each rank, and a program in a session of its own.
LOADING = """
import os, subprocess, time
from torch.utils.data import DataLoader, Dataset

class Stuck(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        print("worker", os.getpid())
        time.sleep(600)

print("daemon", subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
next(iter(DataLoader(Stuck(), num_workers=1)))
"""


# A process group in a cycle that nobody holds, as broken groups are, and workers that collect.
DROPPED = """
import gc
from torch.utils.data import DataLoader, Dataset

class Collecting(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return gc.collect()

class Cycle:
    def __init__(self):
        self.me = self
        self.group = dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)

gc.disable()
try:
    Cycle()
    for batch in DataLoader(Collecting(), num_workers=1, timeout=20):
        pass
finally:
    gc.enable()
"""


@pytest.mark.thorough
def test_workers_do_not_collect_what_their_rank_has_dropped(trio: Mesh) -> None:
    trio.run(DROPPED, timeout=WAIT_S)


def pids_of(mesh: Mesh, rank: int, what: str) -> list[int]:
    return [int(pid) for pid in re.findall(rf"{what} (\d+)", mesh.logs(rank))]


def test_each_rank_leads_a_session_for_linux_shares_the_cores_between_sessions(trio: Mesh) -> None:
    assert dict(trio.execute(os.getsid, 0)) == {rank: pid_of(trio, rank) for rank in range(3)}


@pytest.mark.parametrize("start_method", ["fork", "fresh"])
@pytest.mark.thorough
def test_what_a_rank_has_started_ends_with_it_but_for_what_has_a_session_of_its_own(start_method: str) -> None:
    with create_mesh(2, start_method=start_method) as mesh:
        mesh.run(LOADING, wait=False, echo=False)
        when(lambda: all(pids_of(mesh, rank, "worker") for rank in (0, 1)))
        workers = [pids_of(mesh, rank, "worker")[0] for rank in (0, 1)]
        daemons = [pids_of(mesh, rank, "daemon")[0] for rank in (0, 1)]
        try:
            os.kill(pid_of(mesh, 0), signal.SIGKILL)
            when(lambda: has_exited(workers[0]))
            assert not has_exited(workers[1])
            mesh.stop()
            when(lambda: has_exited(workers[1]))
            assert not any(map(has_exited, daemons))
        finally:
            for pid in daemons:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_an_error_in_a_ranks_service_thread_is_told_in_the_next_cell_and_the_rank_lives_on(mesh: Mesh) -> None:
    mesh.run(
        "import gc\n"
        "objects = next(o for o in gc.get_objects() if type(o).__name__ == 'RankObjects')\n"
        "def release(refs, segments): raise RuntimeError('cannot start new thread')\n"
        "if rank == 1: objects.values.release = release",
        echo=False,
    )
    mesh.session.connection.send(messages.Release(ranks=(0, 1), refs=("x",)))
    when(lambda: "in release" in mesh.logs(1))
    reported = mesh.run("vars(objects.values).pop('release', None) and None", echo=False).output
    assert "carrying out Release: RuntimeError: cannot start new thread. The rank goes on" in reported
    assert "cannot start" not in mesh.run("pass", echo=False).output
    assert mesh.status().ranks[1].state == "idle"


FAILING_END = """
import gc
groups = next(one for one in gc.get_objects() if type(one).__name__ == "Executor")._groups
turns = [1, 2]
def conclude(*args):
    turns.pop()
    if not turns:
        del groups.conclude
    raise RuntimeError("the end of the call fails")
groups.conclude = conclude
"""


@pytest.mark.thorough
def test_a_call_whose_end_fails_again_and_again_is_reported_all_the_same(trio: Mesh) -> None:
    """Else its host would wait for it for ever, and with it every call that comes after."""
    with pytest.raises(CellError, match="the end of the call fails"):
        trio.run(FAILING_END, ranks=1, wait=False, echo=False).result(WAIT_S)
    assert dict(trio.run("rank", echo=False).values) == {rank: rank for rank in trio.ranks}


@pytest.mark.thorough
def test_output_that_cannot_be_sent_is_reported_and_the_rank_goes_on(trio: Mesh, gate: Gate) -> None:
    """It is sent while the cell runs, with a number; its host waited for that number before it took the cell's end."""
    display = "from IPython.display import display\ndisplay({'text/plain': 'large', 'a/b': 1 << 70}, raw=True)"
    future = trio.run(f"{display}\n{gate.wait}", ranks=1, wait=False, echo=False)
    when(lambda: "OverflowError" in trio.logs(1))
    gate.open()
    future.result(WAIT_S)
    assert dict(trio.run("rank", echo=False).values) == {rank: rank for rank in trio.ranks}
