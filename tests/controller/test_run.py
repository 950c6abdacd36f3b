"""Cells and calls on real ranks, from a script."""

from __future__ import annotations

import asyncio
import os
import textwrap
import threading
import time
from pathlib import Path

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, CellInterrupted, MeshTimeout, TransferError
from tests.budget import WAIT_S, when, when_printed
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")


def test_a_cell_runs_on_every_rank_and_gives_every_ranks_value(mesh: Mesh) -> None:
    assert dict(mesh.run("rank * 10").values) == {0: 0, 1: 10, 2: 20, 3: 30}


def test_what_the_ranks_start_with(mesh: Mesh) -> None:
    source = "(rank, local_rank, world_size, str(device), mesh.mesh_dim_names, tuple(mesh.shape), dist.get_backend())"
    assert mesh.run(source).values[3] == (3, 3, 4, "cpu", ("dp", "tp"), (2, 2), "gloo")


def test_libraries_take_a_rank_for_a_process_of_torchrun_and_not_for_a_prompt(mesh: Mesh) -> None:
    source = "import os, sys; (dist.is_torchelastic_launched(), os.environ['GROUP_RANK'], hasattr(sys, 'ps1'))"
    assert mesh.run(source).values.same() == (True, "0", False)


def test_a_cell_on_some_ranks_leaves_the_others_alone(mesh: Mesh) -> None:
    mesh.run("where = 'nowhere'")
    mesh.run("where = 'here'", ranks="1,3")
    assert dict(mesh.run("where").values) == {0: "nowhere", 1: "here", 2: "nowhere", 3: "here"}


def test_what_cannot_be_called_so_says_it_in_the_line_of_the_caller(mesh: Mesh) -> None:
    def add(x: int) -> int:
        return x + 1

    with pytest.raises(TypeError, match=r"add\(x: .*\) -> .*: got an unexpected keyword argument 'ranks'"):
        mesh.execute(add, 1, ranks=0)
    with pytest.raises(TypeError, match=r"'rank' cannot be called; source text runs with mesh.run\(source\)"):
        mesh.execute("rank")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"this is a function; mesh.execute\(function\) runs a function"):
        mesh.run(add)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no attribute 'mean'; these are values by rank: values\[0\]"):
        mesh.run("rank").values.mean()


def test_ranks_can_be_chosen_by_axis(mesh: Mesh) -> None:
    assert list(mesh.run("rank", ranks="dp=1").values.values()) == [2, 3]
    assert list(mesh.slice(tp=0).run("rank").values.values()) == [0, 2]


def test_output_of_equal_lines_is_shown_once(mesh: Mesh) -> None:
    # once: a line waits for other ranks for a tenth of a second, and one of them may be later on a busy machine
    when(lambda: mesh.run("print('step 1')", echo=False).output == "step 1\n")


def test_a_future_is_there_at_once_and_done_at_the_end(mesh: Mesh, gate: Gate) -> None:
    future = mesh.run(f"{gate.wait}\nrank", wait=False)
    assert not future.done()
    with pytest.raises(MeshTimeout, match="it goes on"):
        future.result(timeout=0.05)
    gate.open()
    assert dict(future.result(WAIT_S).values) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_what_a_thread_prints_after_its_cell_is_shown(
    mesh: Mesh, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.run(
        f"""
        import threading
        def report():
            {gate.wait}
            print("step 1000 is done")
        thread = threading.Thread(target=report)
        thread.start()
        """
    )
    assert "step 1000" not in capsys.readouterr().out
    gate.open()
    when_printed("step 1000 is done\n", capsys)
    mesh.run("thread.join()")


def test_a_future_can_be_awaited(mesh: Mesh) -> None:
    async def wait() -> int:
        return int((await mesh.run("41 + 1", wait=False)).values.same())

    assert asyncio.run(wait()) == 42


def test_a_cell_that_takes_too_long_is_interrupted_and_says_so(mesh: Mesh) -> None:
    with pytest.raises(MeshTimeout, match="was interrupted"):
        mesh.run("import time\ntime.sleep(1000)", timeout=0.2)
    assert mesh.run("1").values.same() == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1000)",
        "while True: pass",
        "dist.all_reduce(torch.ones(3)) if rank != 3 else __import__('time').sleep(1000)",
        "dist.barrier() if rank != 3 else __import__('time').sleep(1000)",
        "dist.recv(torch.ones(3), 1) if rank == 0 else __import__('time').sleep(1000)",
        "import threading; threading.Event().wait()",
        "import asyncio\nawait asyncio.sleep(1000)",
        "!sleep 1000",
    ],
    ids=["sleep", "loop", "all_reduce", "barrier", "recv", "lock", "await", "child"],
)
def test_stop_ends_whatever_the_ranks_are_in_and_the_next_cell_works(mesh: Mesh, source: str) -> None:
    future = mesh.run(source, wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 4.0


def test_asyncio_tasks_that_a_cell_has_begun_run_on_when_it_has_ended(mesh: Mesh, tmp_path: Path) -> None:
    source = f"""
    import asyncio
    async def tick():
        while True:
            with open(f"{tmp_path}/{{rank}}", "a") as marks:
                marks.write("x")
            await asyncio.sleep(0.01)
    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    """
    mesh.run(textwrap.dedent(source))
    marks = [tmp_path / str(rank) for rank in mesh.ranks]
    when(lambda: all(path.exists() and path.stat().st_size > 3 for path in marks))
    assert mesh.run("ticking.cancel()\n'next'").values.same() == "next"


def test_stop_ends_a_callback_that_keeps_its_rank_between_cells(mesh: Mesh, tmp_path: Path) -> None:
    source = f"""
    import asyncio
    def block():
        open(f"{tmp_path}/{{rank}}", "w").close()
        while True: pass
    _ = asyncio.get_running_loop().call_later(0.01, block)
    await asyncio.sleep(0)
    """
    mesh.run(textwrap.dedent(source))
    when(lambda: all((tmp_path / str(rank)).exists() for rank in mesh.ranks), "all ranks' callbacks")
    future = mesh.run("1", wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    future.interrupt()
    future.exception(WAIT_S)  # the cell, which waited, may be stopped too
    assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 4.0


def test_an_interrupt_that_comes_late_does_not_hit_the_next_cell(mesh: Mesh) -> None:
    command = mesh.session.cell_command("1", mesh.ranks)
    mesh.session.request(command).result(WAIT_S)
    mesh.session.interrupt(mesh.ranks, target=command.call)
    assert mesh.run("import time\ntime.sleep(0.2)\n'whole'").values.same() == "whole"


def test_an_interrupt_of_some_ranks_lets_the_others_finish(mesh: Mesh, gate: Gate) -> None:
    begun = f"begun {gate.path}"
    future = mesh.run(f"print({begun!r})\n{gate.wait}\n'done'", wait=False, echo=False)
    when(lambda: begun in mesh.logs(1))
    mesh.interrupt("1")
    mesh.run("None", ranks=[1])  # rank 1 is free again before the others are
    gate.open()
    error = future.exception(WAIT_S)
    assert isinstance(error, CellInterrupted)
    assert error.succeeded == (0, 2, 3)


def test_cells_of_two_futures_run_one_after_the_other(mesh: Mesh) -> None:
    mesh.run("order = []")
    futures = [mesh.run(f"order.append({n})", wait=False) for n in range(5)]
    for future in futures:
        future.result(WAIT_S)
    assert mesh.run("order").values.same() == [0, 1, 2, 3, 4]


def test_a_cell_finds_no_arguments_of_its_ranks_process(mesh: Mesh) -> None:
    mesh.run(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float, default=0.1)"
    )
    assert mesh.run("parser.parse_args().lr").values.same() == 0.1


def test_a_function_is_called_on_every_rank(mesh: Mesh) -> None:
    offset = 5

    def shifted(by: int, *, times: int = 1) -> int:
        import torch.distributed as dist

        return (dist.get_rank() + by) * times + offset

    assert dict(mesh.execute(shifted, 1, times=10)) == {0: 15, 1: 25, 2: 35, 3: 45}


def test_a_decorated_function_runs_on_the_ranks_when_called(mesh: Mesh) -> None:
    @mesh.remote
    def pid() -> int:
        return os.getpid()

    assert len(set(pid().values())) == 4
    assert os.getpid() not in pid().values()
    assert list(pid.on(mesh.slice(dp=0))().keys()) == [0, 1]


def test_a_decorated_function_is_interrupted_after_its_time_limit_and_the_ranks_go_on(mesh: Mesh, gate: Gate) -> None:
    @mesh.remote
    def waits(path: str, timeout: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return timeout  # an argument of the function's own

    with pytest.raises(MeshTimeout, match=r"waits\(\) did not end within 0.5 s and was interrupted"):
        waits.within(0.5)(str(gate.path), timeout="mine")
    gate.open()
    assert waits.within(60)(str(gate.path), timeout="mine").same() == "mine"


def test_a_decorated_body_runs_at_once_and_its_names_bind_on_the_ranks(mesh: Mesh) -> None:
    @mesh.cell
    def setup() -> object:
        bound_here = rank + 100  # type: ignore[name-defined]  # noqa: F821
        return bound_here

    assert dict(setup.values) == {0: 100, 1: 101, 2: 102, 3: 103}
    assert mesh.pull("bound_here")[2] == 102


def test_an_argument_that_cannot_be_pickled_is_named(mesh: Mesh) -> None:
    with pytest.raises(TransferError, match="lock"):
        mesh.execute(len, {"config": {"lock": threading.Lock()}})


def test_a_result_that_cannot_be_pickled_is_shown_and_named_when_it_is_pulled(mesh: Mesh) -> None:
    values = mesh.run("import threading; threading.Lock()").values
    assert "lock" in repr(values)
    with pytest.raises((TransferError, CellError), match="lock"):
        _ = values[0]


def test_history_and_logs_tell_what_was_run_and_said(mesh: Mesh) -> None:
    mesh.run("print('said for the log')", echo=False)
    assert mesh.history()[-1].source == "print('said for the log')"
    assert "said for the log" in mesh.logs(2)
