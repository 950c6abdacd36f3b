"""`meshbook why`, `stacks` and `top`, of a mesh that hangs in somebody else's notebook."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from meshbook import create_mesh
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellInterrupted
from tests.budget import WAIT_S, when
from tests.cli.commands import meshbook, read_until, terminal, typed

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh(run: object) -> Iterator[Mesh]:
    """Rank 1 sleeps at line 4, rank 0 waits for it."""
    os.environ["MESHBOOK_STALL_S"] = "0"
    try:
        with create_mesh({"dp": 2}, name="hanging") as mesh:
            source = "if rank == 0:\n    dist.barrier()\nelse:\n    __import__('time').sleep(1000)"
            future = mesh.run(source, wait=False, echo=False)
            when(lambda: "line 4" in mesh.why().text)
            yield mesh
            future.interrupt()
            future.exception(WAIT_S)
    finally:
        del os.environ["MESHBOOK_STALL_S"]


def test_why_names_the_rank_and_the_line(mesh: Mesh) -> None:
    done = meshbook("why")
    assert done.status == 0
    assert "Rank 1 sleeps at the cell, line 4 and has not come to barrier #1, where rank 0 waits" in done.out
    assert "\x1b" not in done.out  # it is not a terminal
    (found,) = json.loads(meshbook("why", "hanging", "--json").out)
    assert (found["kind"], found["ranks"], found["line"]) == ("missing-from-collective", [1], 4)


def test_stacks_shows_the_ranks_that_were_chosen(mesh: Mesh) -> None:
    done = typed("stacks", "--ranks", "dp=1", "--twice")
    assert done.status == 0
    assert "[1] > the cell, line 4" in done.out
    assert "(stands still)" in done.out
    assert "dist.barrier()" not in done.out
    wrong = typed("stacks", "hanging", "--ranks", "7")
    assert (wrong.status, wrong.err) == (1, "meshbook: rank 7 is not in this mesh of 2 ranks (0-1)\n")


def test_debug_stops_a_rank_and_asks_on_the_terminal(mesh: Mesh) -> None:
    with terminal("debug", "1") as (debug, tty):
        shown = read_until(tty, "(rank 1 · h lists the commands · 0 not stopped)")
        os.write(tty, b"p 40 + rank\n")
        read_until(tty, "41")
        os.write(tty, b"c\n")
        read_until(tty, "goes on")
        assert debug.wait(WAIT_S) == 0
    assert "stopped within the cell, line 4" in shown or "-> __import__('time').sleep(1000)" in shown


def test_top_serves_prometheus_until_it_is_told_to_end(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "meshbook", "top", "--prometheus", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        try:
            assert select.select([top.stdout], [], [], 60)[0]
            name, address = top.stdout.readline().split()
            page = urllib.request.urlopen(address, timeout=WAIT_S).read().decode()
            top.send_signal(signal.SIGINT)
            assert top.wait(WAIT_S) == 130
        finally:
            top.kill()
    assert name == "hanging:"
    assert 'meshbook_ranks{mesh="hanging",state="busy"} 2.0' in page


def test_the_page_of_a_mesh_ends_with_the_mesh() -> None:
    with create_mesh(1, name="short", process_group=False) as short:
        command = [sys.executable, "-m", "meshbook", "top", "short", "--web"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            try:
                assert select.select([top.stdout], [], [], 60)[0]
                assert top.stdout.readline().startswith("short: http://127.0.0.1:")
                short.stop()
                assert top.wait(WAIT_S) == 0
            finally:
                top.kill()


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (("debug", "hanging", "0-1"), 2, "nobody to type commands here"),
        (("why", "nobody"), 1, "no mesh is named 'nobody'; running: hanging"),
        (("top", "--port", "80"), 2, "--port is the page's; write it like: meshbook top --web --port 8000"),
        (("top", "--prometheus", "-1"), 2, "'-1' is not a port; write a number"),
        (("top", "--web", "--prometheus", "1"), 2, "not allowed with argument"),
    ],
)
def test_a_slip_of_the_keyboard_gets_a_sentence(
    mesh: Mesh, words: tuple[str, ...], status: int, complaint: str
) -> None:
    done = typed(*words)
    assert done.status == status
    assert complaint in done.err


def test_health_and_memory_are_tables_and_json(mesh: Mesh) -> None:
    when(lambda: "barrier #1 since" in typed("health").out)  # with the next heartbeat
    assert {row["rank"] for row in json.loads(typed("health", "--json").out)} == {0, 1}
    assert typed("memory", "hanging").out.startswith("Mesh hanging: memory of each rank.")
    assert json.loads(typed("memory", "--json").out)["rank"] == [0, 1]


def test_a_cell_is_stopped_and_a_rank_killed_from_the_terminal() -> None:
    with create_mesh(2, name="steered") as mesh:
        future = mesh.run("__import__('time').sleep(1000)", wait=False, echo=False)
        done = typed("interrupt", "steered")
        assert (done.status, done.out) == (0, "Stop was sent to ranks 0-1.\n")
        with pytest.raises(CellInterrupted):
            future.result(WAIT_S)
        wrong = typed("kill", "steered")
        assert (wrong.status, wrong.err) == (
            2,
            "meshbook: which ranks? Write it like: meshbook kill 2, or meshbook kill all\n",
        )
        assert typed("kill", "steered", "1").out == "Killed rank 1.\n"
        when(lambda: mesh.session.lost == (1,))
