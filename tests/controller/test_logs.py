"""Logs of all ranks as one: searched while cells run and ranks hang, of dead ranks, across hosts, after faults."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import psutil
import pytest

from meshbook.controller.logs import LogHit, parse_since
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach, create_mesh
from meshbook.errors import CellError, MeshShapeError, NotAttached, UsageError
from meshbook.wire.processes import forks_of
from tests.budget import WAIT_S, when
from tests.controller.test_heal import kill
from tests.gate import Gate
from tests.host_processes import keeper_of, pid_of
from tests.leaks import MARKER

pytestmark = pytest.mark.usefixtures("starts_meshes")

# A search for this does not end: the time doubles with each letter.
ENDLESS, FODDER = "(a+)+$", "a" * 60 + "!"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


def searches(mesh: Mesh) -> list[psutil.Process]:
    """The processes that search for a mesh of this run of tests; another one may be under way beside it."""
    found = []
    for process in psutil.process_iter():
        try:
            is_search = "meshbook.host.log_search" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
            if is_search and process.environ().get(MARKER) == os.environ[MARKER]:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Following:
    """Hits that are followed, on a thread of their own."""

    def __init__(self, mesh: Mesh, **options: Any) -> None:
        self.hits: list[LogHit | str] = []
        self._stop = threading.Event()
        self._follow = mesh.follow_logs(**options)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for hit in self._follow:
            self.hits.append(hit)
            if self._stop.is_set():
                break
        self._follow.close()

    def texts(self) -> list[str]:
        return [str(hit) for hit in self.hits]

    def ranks_of(self, text: str) -> set[int]:
        """The ranks that have printed a line with this text. Those that print at once share a hit."""
        return {rank for hit in self.hits if isinstance(hit, LogHit) and text in hit.text for rank in hit.ranks}

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def end_with(self, one_more: Callable[[], object]) -> None:
        """End with the next hit."""
        self._stop.set()
        one_more()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __exit__(self, *_exc_info: object) -> None:
        self._stop.set()


# ---- a search


def test_equal_lines_are_one_with_their_ranks_and_time_and_others_show_what_differs(mesh: Mesh) -> None:
    begin = time.time()
    mesh.run("print('one: all the same')\nprint(f'one: loss={rank / 2}')", echo=False)
    mesh.run("print('one: only here')", ranks=(2,), echo=False)
    found = mesh.logs(grep="^one:")
    assert [(hit.ranks, hit.text) for hit in found] == [
        ((0, 1, 2, 3), "one: all the same"),
        ((0, 1, 2, 3), "one: loss={0.0, 0.5, 1.0, 1.5}"),
        ((2,), "one: only here"),
    ]
    assert all(begin - 1 <= hit.time <= time.time() for hit in found)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \[2\] one: only here", str(found[2]))


def test_ranks_context_and_the_time_narrow_a_search(mesh: Mesh) -> None:
    mesh.run("print('two: before\\ntwo: HIT\\ntwo: after')", echo=False)
    assert [hit.ranks for hit in mesh.logs(grep="two: HIT", ranks="dp=1")] == [(2, 3)]
    assert [hit.ranks for hit in mesh.slice(tp=0).logs(grep="two: HIT")] == [(0, 2)]
    assert [hit.ranks for hit in mesh.logs(3, grep="two: HIT")] == [(3,)]
    (hit,) = mesh.logs(grep="two: HIT", context=1, since="1h")
    assert (hit.text, hit.matching) == ("two: before\ntwo: HIT\ntwo: after", (1,))
    assert "> two: HIT" in str(hit)
    assert len(mesh.logs(grep="two:", since=datetime.now() + timedelta(seconds=-0.0))) == 0


def test_the_error_of_a_cell_is_found_although_no_rank_printed_it(mesh: Mesh) -> None:
    with pytest.raises(CellError):
        mesh.run("{}['three']", ranks=(1,), echo=False)
    assert [hit.ranks for hit in mesh.logs(grep="KeyError: 'three'")] == [(1,)]


def test_nothing_found_says_since_when_output_is_kept_and_its_bound(mesh: Mesh) -> None:
    mesh.run("print('four')", echo=False)
    text = str(mesh.logs(grep="there is no such line", ranks=(0, 1)))
    assert text.startswith("There are no lines of ranks 0-1 that match 'there is no such line'.\nOutput is kept since ")
    assert "of at most 256 MiB" in text


def test_only_the_newest_hits_are_returned_and_the_others_counted(mesh: Mesh) -> None:
    mesh.run("for number in range(20): print('five', number)", ranks=(0,), echo=False)
    found = mesh.logs(grep="^five", limit=2)
    assert [hit.text for hit in found] == ["five 18", "five 19"]
    assert found.num_left_out == 18
    assert "18 earlier lines of ranks are not shown" in str(found)


def test_a_search_is_answered_while_a_cell_runs_and_a_rank_is_stopped(mesh: Mesh, gate: Gate) -> None:
    pid = pid_of(mesh, 3)
    running = mesh.run(f"print('six: begun', flush=True)\n{gate.wait}", wait=False, echo=False)
    when(lambda: [hit.ranks for hit in mesh.logs(grep="six: begun")] == [(0, 1, 2, 3)])
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [hit.ranks for hit in mesh.logs(grep="six: begun")] == [(0, 1, 2, 3)]
    finally:
        os.kill(pid, signal.SIGCONT)
    gate.open()
    running.result(WAIT_S)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"grep": "loss=(nan"}, UsageError, "at position 5:\n  loss=(nan\n       ^\n"),
        ({"since": "yesterday"}, UsageError, "write how long ago (30s, 5m, 2h, 1d), or when, as 2026-11-26T14:05"),
        ({"since": datetime.now() + timedelta(days=1)}, UsageError, "is in the future"),
        ({"context": 99}, UsageError, "0 to 20"),
        ({"grep": "x", "ranks": "7"}, MeshShapeError, "rank 7 is not in this mesh"),
    ],
)
def test_a_slip_is_answered_with_what_to_write(
    mesh: Mesh, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as raised:
        mesh.logs(**options)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1.5 h", 5400), ("1d", 86400), (12.5, 12.5)]
)
def test_a_time_ago(text: str | float, seconds: float) -> None:
    assert parse_since(text) == seconds


# ---- following


def test_what_is_printed_is_followed_until_one_has_enough(mesh: Mesh) -> None:
    mesh.run("print('seven: before')", echo=False)
    with Following(mesh, grep="^seven", since="1h") as following:
        when(lambda: "seven: before" in str(following.texts()))
        mesh.run("print('seven: step', rank)", echo=False)
        when(lambda: following.ranks_of("seven: step") == {0, 1, 2, 3})
        following.end_with(lambda: mesh.run("print('seven: last')", echo=False))
    when(lambda: searches(mesh) == [])


# ---- faults


def test_a_search_that_does_not_end_is_ended_with_its_client_and_disturbs_nobody(mesh: Mesh) -> None:
    mesh.run(f"print('{FODDER}')", echo=False)
    other = attach(mesh.name)

    def search() -> None:
        with pytest.raises(NotAttached):
            other.logs(grep=ENDLESS)

    thread = threading.Thread(target=search)
    thread.start()
    when(lambda: any(process.cpu_times().user > 0.3 for process in searches(mesh)))
    assert len(mesh.logs(grep="^aaa")) == 1  # meanwhile
    other.detach()
    thread.join(WAIT_S)
    when(lambda: searches(mesh) == [])


def test_a_search_whose_process_is_killed_says_so(mesh: Mesh) -> None:
    mesh.run(f"print('{FODDER}')", echo=False)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(mesh.logs(grep=ENDLESS)))
    thread.start()
    when(lambda: any(process.cpu_times().user > 0.3 for process in searches(mesh)))
    searches(mesh)[0].kill()
    thread.join(WAIT_S)
    (found,) = answers
    assert [problem.partition(": ")[2] for problem in found.problems] == ["the process that searched has ended"]


def test_what_dead_and_replaced_ranks_printed_is_found(mesh: Mesh) -> None:
    mesh.run("print('eight: first process')", echo=False)
    kill(mesh, 1)
    assert [hit.ranks for hit in mesh.logs(grep="^eight")] == [(0, 1, 2, 3)]
    assert [hit.ranks for hit in mesh.logs(grep="rank 1 was killed by SIGKILL")] == [(1,)]
    mesh.heal()
    mesh.run("print('eight: second process')", ranks=(1,), echo=False)
    texts = [hit.text for hit in mesh.logs(grep="^eight", ranks=1)]
    assert texts == ["eight: first process", "eight: second process"]


def test_what_was_printed_before_and_after_the_supervisor_was_killed_is_found_and_followed(mesh: Mesh) -> None:
    mesh.run("print('nine: before')", echo=False)
    with Following(mesh, grep="^nine") as following:
        when(lambda: "nine: before" in str(following.texts()))
        supervisor = mesh.status().supervisor_pid
        when(lambda: forks_of(supervisor) != [])
        os.kill(supervisor, signal.SIGKILL)
        mesh.run("print('nine: after')", echo=False)
        when(lambda: following.ranks_of("nine: after") == {0, 1, 2, 3})
        assert [(hit.ranks, hit.text) for hit in mesh.logs(grep="^nine")] == [
            ((0, 1, 2, 3), "nine: before"),
            ((0, 1, 2, 3), "nine: after"),
        ]
        following.end_with(lambda: mesh.run("print('nine: last')", echo=False))
    when(lambda: searches(mesh) == [])


def test_hits_of_several_hosts_are_one_and_a_lost_host_is_named() -> None:
    with create_mesh(3, num_hosts=2, torch=False) as mesh:
        mesh.run("print('ten: all')\nprint(f'ten: loss={rank}.5')", echo=False)
        assert [(hit.ranks, hit.text) for hit in mesh.logs(grep="^ten")] == [
            ((0, 1, 2), "ten: all"),
            ((0, 1, 2), "ten: loss={0.5, 1.5, 2.5}"),
        ]
        os.kill(keeper_of(mesh.name, 1), signal.SIGKILL)
        when(lambda: mesh.session.lost == (2,))
        found = mesh.logs(grep="^ten")
        assert [hit.ranks for hit in found] == [(0, 1), (0, 1)]
        assert found.problems == ("host 1 was killed by signal 9: what its ranks printed cannot be read",)
        mesh.heal()
        assert [hit.ranks for hit in mesh.logs(grep="^ten")] == [(0, 1, 2), (0, 1, 2)]
