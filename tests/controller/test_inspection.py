"""Asking a mesh about itself: while it works, while it hangs, while its ranks die."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.controller.subscription import MeshSnapshot, MeshSubscription
from meshbook.dashboard.exporter import Exporter
from meshbook.errors import MeshShapeError, RankLost, StartError, UsageError
from meshbook.wire import keys, messages
from tests.budget import WAIT_S, when
from tests.host_processes import pid_of

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Rank 1 sleeps at line 4, the others wait for it at line 2.
HANG = "if rank != 1:\n    dist.all_reduce(torch.ones(2))\nelse:\n    __import__('time').sleep(1000)"


@pytest.fixture(scope="module")
def shared() -> Iterator[Mesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHBOOK_STALL_S", "2")  # the supervisor's own patience, so that a test need not have so much
        with create_mesh({"dp": 3}) as mesh:
            yield mesh


@pytest.fixture
def mesh(shared: Mesh) -> Iterator[Mesh]:
    """The shared mesh, which must be whole and idle again after the test."""
    yield shared
    assert dict(shared.run("rank").values) == {0: 0, 1: 1, 2: 2}


def snapshot_when(subscription: MeshSubscription, condition: Callable[[MeshSnapshot], bool]) -> MeshSnapshot:
    """The first snapshot seen that is so."""
    when(lambda: condition(subscription.snapshot))
    return subscription.snapshot


class Hanging:
    """A cell that hangs, until the block ends."""

    def __init__(self, mesh: Mesh, source: str = HANG) -> None:
        self.said: list[Any] = []
        command = mesh.session.cell_command(source, mesh.ranks, label="cell 7")
        self._mesh, self._call = mesh, command.call
        self.future = mesh.session.request(command, on_output=self.said.append)

    def __enter__(self) -> Hanging:
        when(lambda: [(found.ranks, found.others) for found in self._mesh.why().findings] == [((1,), (0, 2))])
        when(lambda: all(self._mesh.stacks()[rank] for rank in self._mesh.ranks))
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._mesh.session.interrupt(self._mesh.ranks, target=self._call)
        assert self.future.result(WAIT_S).outcomes[0].outcome.status == "interrupted"


# ---- a mesh that hangs


def test_a_hanging_mesh_says_why_where_and_how_it_is_from_any_thread(mesh: Mesh) -> None:
    with Hanging(mesh):
        asked: list[Any] = []
        thread = threading.Thread(target=lambda: asked.append(mesh.why()))
        thread.start()
        thread.join(WAIT_S)
        (why,) = asked
        (found,) = why.findings
        assert (found.kind, found.ranks, found.others, found.line) == ("missing-from-collective", (1,), (0, 2), 4)
        assert "Rank 1 sleeps at cell 7, line 4" in str(why)
        assert "<script>" not in why._repr_html_()
        assert [one.title for one in mesh.slice(dp=1).why().findings] == [found.title]

        stacks = mesh.stacks()
        assert set(stacks) == {0, 1, 2}
        assert stacks[1][0].frames[-1].line == 4
        assert "[0,2]" in stacks.text
        assert "dist.all_reduce(torch.ones(2))" in stacks.text  # the cell's own line
        assert "dist.all_reduce" not in mesh.stacks("dp=1").text
        assert "stands still" in mesh.stacks(1, twice=True).text

        when(lambda: "all_reduce #" in str(mesh.health()))
        assert "busy, cell 7 line 4" in str(mesh.health())


def test_the_lines_of_a_cell_that_begins_with_empty_ones_are_shown(mesh: Mesh) -> None:
    with Hanging(mesh, "\n \n" + HANG):
        assert "line 4: __import__('time').sleep(1000)" in mesh.stacks().text


def test_a_cell_that_stands_still_is_explained_under_it_unasked_once(mesh: Mesh) -> None:
    with MeshSubscription(mesh.session, max_updates_per_s=10) as subscription, Hanging(mesh) as hanging:
        picture = snapshot_when(subscription, lambda picture: bool(picture.findings))
        assert picture.findings[0].ranks == (1,)
        snapshot_when(subscription, lambda picture: picture.ranks[0].waits_in is not None)
        when(lambda: bool(hanging.said))
        (items,) = hanging.said
        assert "cell 7, line 4" in str(items)
        assert isinstance(items[0].item, messages.Notice)
    assert len(hanging.said) == 1


def test_a_rank_that_is_killed_while_its_stack_is_taken_delays_nobody(trio: Mesh) -> None:
    future = trio.run(HANG, wait=False, echo=False)
    when(lambda: "line 4" in trio.why().text)
    pid = pid_of(trio, 2)
    answers: list[Any] = []
    asking = [threading.Thread(target=lambda: answers.append(trio.stacks())) for _ in range(8)]
    for number, thread in enumerate(asking):
        thread.start()
        if number == 3:
            os.kill(pid, signal.SIGKILL)
    for thread in asking:
        thread.join(WAIT_S)
    assert len(answers) == 8
    assert all(set(stacks) == {0, 1, 2} for stacks in answers)
    assert isinstance(future.exception(WAIT_S), RankLost)
    assert "killed by SIGKILL" in trio.stacks().text
    assert "killed" in [found.kind for found in trio.why().findings]


# ---- those that watch


def test_a_front_end_that_is_killed_amid_the_news_is_forgotten_and_others_hear_on(mesh: Mesh) -> None:
    source = (
        "import sys\nfrom meshbook.controller.starting import attach\n"
        "from meshbook.controller.subscription import MeshSubscription\n"
        f"mesh = attach({mesh.name!r}, kind='vanishing', observer=True)\n"
        "subscription = MeshSubscription(mesh.session, max_updates_per_s=10)\n"
        "subscription.listeners.append(lambda picture: print(len(picture.ranks), flush=True))\n"
        "sys.stdin.read()"
    )
    with MeshSubscription(mesh.session, max_updates_per_s=10) as subscription:
        with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            try:
                assert select.select([other.stdout], [], [], 30)[0]
                assert other.stdout.readline() == b"3\n"  # it sees the mesh, from another process, as an observer
                assert any("vanishing" in client for client in mesh.status().clients)
            finally:
                other.kill()
        snapshot_when(subscription, lambda picture: not any("vanishing" in client for client in picture.clients))
        at = subscription.snapshot.at
        snapshot_when(subscription, lambda picture: picture.at > at)


def test_several_subscriptions_share_a_connection_and_one_that_fails_or_leaves_is_its_own_affair(mesh: Mesh) -> None:
    def fail(picture: MeshSnapshot) -> None:
        raise RuntimeError("this listener is broken")

    seen: list[MeshSnapshot] = []
    with MeshSubscription(mesh.session, max_updates_per_s=10) as first:
        first.listeners += [fail, seen.append]
        with MeshSubscription(mesh.session, max_updates_per_s=5) as second:
            mesh.run("import meshbook\nfor step in range(5): meshbook.log(loss=1 / (step + 1), step=step)", echo=False)
            snapshot_when(second, lambda picture: bool(picture.scalars.points("loss", 2)))
        snapshot_when(first, lambda picture: len(picture.scalars.points("loss", 2)) >= 5)
        snapshot_when(first, lambda picture: bool(picture.series.points("rss_bytes", 0)))
        count = len(seen)
        snapshot_when(first, lambda picture: len(seen) > count)
    assert [step for step, _, _ in first.snapshot.scalars.points("loss", 2)] == [0, 1, 2, 3, 4]


def test_the_last_picture_outlives_the_mesh_and_says_why_there_is_no_more() -> None:
    with create_mesh(1, torch=False) as mesh:
        connection = SupervisorConnection(keys.find_connection(mesh.name), kind="cli", observer=True)
        connection.listen()
        subscription = MeshSubscription(connection, max_updates_per_s=10)
        mesh.stop()
        picture = snapshot_when(subscription, lambda picture: picture.ended is not None)
    assert picture.ended == "stopped by a script"
    assert picture.ranks[0].state == "dead"
    subscription.close()
    connection.close()


# ---- numbers


def test_memory_and_metrics_come_as_the_frames_that_there_are(mesh: Mesh) -> None:
    mesh.run("import meshbook\nmeshbook.log(accuracy=rank / 2, step=1)", echo=False)
    when(lambda: len([name for name in mesh.metrics(kind="dict")["name"] if name == "accuracy"]) == 3)
    columns = mesh.slice(dp=2).metrics(kind="dict")
    rows = list(zip(columns["name"], columns["rank"], columns["step"], columns["value"], strict=True))
    assert ("accuracy", 2, 1, 1.0) in rows
    assert {rank for _, rank, _, _ in rows} == {2}
    assert all(abs(at - time.time()) < 600 for at in columns["time"])
    memory = mesh.memory(kind="dict")
    assert memory["rank"] == [0, 1, 2]
    assert all(1 << 20 < peak < 1 << 40 for peak in memory["peak_rss_bytes"])
    assert memory["gpu_allocated_bytes"] == [None] * 3
    past = mesh.memory(history=True, kind="dict")
    assert set(past["rank"]) == {0, 1, 2}
    for kind in ("pandas", "polars"):
        pytest.importorskip(kind)
        assert type(mesh.memory(kind=kind)).__module__.startswith(kind)
        assert mesh.memory(kind=kind).shape == (3, 10)


def test_prometheus_is_served_the_same_numbers_on_this_machine_alone(mesh: Mesh) -> None:
    with Exporter(mesh.session) as exporter:
        assert exporter.address.startswith("http://127.0.0.1:")
        page = urllib.request.urlopen(exporter.address, timeout=WAIT_S).read().decode()
        rebound = urllib.request.Request(exporter.address, headers={"Host": "evil.example:80"})
        with pytest.raises(urllib.error.HTTPError, match="403"):  # a name that was made to point here
            urllib.request.urlopen(rebound, timeout=WAIT_S)
        with pytest.raises(StartError, match="cannot be served"):
            Exporter(mesh.session, int(exporter.address.split(":")[2].partition("/")[0]))
    assert f'meshbook_up{{mesh="{mesh.name}"}} 1.0' in page
    assert re.search(rf'meshbook_rank_memory_bytes{{device="cpu",host="\S+",mesh="{mesh.name}",rank="1"}} \d', page)


# ---- asked the wrong way


def test_what_is_asked_wrongly_is_refused_with_a_sentence(mesh: Mesh) -> None:
    with pytest.raises(MeshShapeError, match="rank 9 is not in this mesh of 3 ranks"):
        mesh.stacks(9)
    with pytest.raises(UsageError, match="no frames of kind 'excel'; there are pandas, polars and dict"):
        mesh.memory(kind="excel")
    refused: list[Exception] = []

    def ask(picture: MeshSnapshot) -> None:
        try:
            mesh.why()
        except UsageError as error:
            refused.append(error)

    with MeshSubscription(mesh.session, max_updates_per_s=10) as subscription:
        subscription.listeners.append(ask)
        when(lambda: bool(refused))
    assert "ask from another thread" in str(refused[0])
