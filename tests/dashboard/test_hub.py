"""Where front ends are served: each is told, none waits for another, and one that is gone costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.actors.procs import this_host
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.dashboard import hub
from meshbook.dashboard.hub import DashboardClient, DashboardHub
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")


class Page:
    """A front end that keeps what it was told."""

    def __init__(self, mesh: Mesh) -> None:
        self.reported: list[dict[str, Any]] = []
        self.gone = False
        self.audience = DashboardClient(mesh, self.hear)

    def hear(self, message: dict[str, Any]) -> None:
        if self.gone:
            raise ConnectionError("the page was closed")
        self.reported.append(message)

    def wait_for(self, true_of: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [message for message in self.reported if true_of(message)]
            return bool(found)

        when(look, "such a message came, which")
        return found[0]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        yield mesh


def test_a_page_that_is_gone_is_forgotten_and_watching_ends_with_the_last_one(mesh: Mesh) -> None:
    desk, first, second = DashboardHub.of(mesh.session), Page(mesh), Page(mesh)
    desk.add_client(first.audience)
    desk.add_client(second.audience)
    for page in (first, second):
        page.wait_for(lambda message: message["kind"] == "layout")
    first.gone = True
    mesh.run("x = 1", echo=False)
    desk.on_request(second.audience, {"kind": "ready"})
    second.wait_for(lambda message: message["kind"] == "update" and message["full"])
    desk.on_request(first.audience, {"kind": "logs", "rank": 0})
    when(lambda: first.audience not in desk._clients, "the page is forgotten, which")
    assert desk.is_subscribed
    desk.remove_client(second.audience)
    desk.remove_client(second.audience)
    assert not desk.is_subscribed


def test_a_page_of_an_idle_mesh_gets_signs_of_life_until_it_has_been_idle_for_long(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_KEEPALIVE_S", 0.0)
    desk, page = DashboardHub.of(mesh.session), Page(mesh)
    desk.add_client(page.audience)
    page.wait_for(lambda message: message["kind"] == "alive")
    monkeypatch.setattr(hub, "_IDLE_TIMEOUT_S", 0.0)
    page.wait_for(lambda message: message["kind"] == "resting")
    monkeypatch.setattr(hub, "_IDLE_TIMEOUT_S", WAIT_S)
    page.reported.clear()
    page.wait_for(lambda message: message["kind"] == "alive")
    desk.remove_client(page.audience)


def test_actors_on_processes_of_their_own_are_in_the_tab_too(mesh: Mesh) -> None:
    desk, page = DashboardHub.of(mesh.session), Page(mesh)
    procs = this_host().spawn_procs({"n": 2}, name="light")
    try:
        assert procs.spawn("counters", Counter).add.call().get(WAIT_S)
        desk.add_client(page.audience)
        assert page.wait_for(lambda message: message["kind"] == "layout")["actors"]
        desk.on_request(page.audience, {"kind": "actors"})
        rows = page.wait_for(lambda message: message["kind"] == "actors")["rows"]
        rows = [row for row in rows if row["actor"] == "counters"]  # this process may have others, of other tests
        assert [(row["actor"], row["rank"].partition("-")[0], row["rank"][-3:]) for row in rows] == [
            ("counters", "light", ": 0"), ("counters", "light", ": 1"),
        ]  # fmt: skip
    finally:
        desk.remove_client(page.audience)
        procs.stop().get(WAIT_S)


def test_a_picture_that_cannot_be_made_is_logged_and_said_once_and_the_next_one_is_shown(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk, page = DashboardHub.of(mesh.session), Page(mesh)
    whole, calls = page.audience.encoder.full_update, []

    def everything(picture: Any) -> Any:
        calls.append(picture)
        if len(calls) < 3:
            raise KeyError("a rank that nobody knows")
        return whole(picture)

    monkeypatch.setattr(page.audience.encoder, "full_update", everything)
    desk.add_client(page.audience)
    for _ in range(4):  # news, so that it is told again at once
        mesh.run("x = 1", echo=False)
    page.wait_for(lambda message: message["kind"] == "layout")
    desk.remove_client(page.audience)
    assert [message["text"] for message in page.reported if message["kind"] == "reply"] == [
        "part of this picture could not be made (KeyError: 'a rank that nobody knows'); the mesh is not affected"
    ]
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


def test_requests_are_answered_while_a_cell_runs_each_to_who_asked_and_once(mesh: Mesh, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    desk, page = DashboardHub.of(mesh.session), Page(mesh)
    desk.add_client(page.audience)
    running = mesh.run(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)", wait=False, echo=False
    )
    try:
        page.wait_for(lambda message: message["kind"] == "update" and "line" in message["columns"])
        desk.on_request(page.audience, {"kind": "stacks", "ranks": "0-1", "view": "a", "id": "a-1"})
        tree = page.wait_for(lambda message: message["kind"] == "stacks")
        assert (tree["view"], tree["ranks"]) == ("a", "0-1")
        for _ in range(3):
            desk.on_request(page.audience, {"kind": "why", "view": "a", "id": "a-2"})
        page.wait_for(lambda message: message["kind"] == "findings" and message["asked"])
        desk.on_request(page.audience, {"kind": "debug", "ranks": "1", "view": "a", "id": "a-4"})
        told = page.wait_for(lambda message: message["kind"] == "reply")
        assert (
            told["text"] == f"the cell cannot ask for commands from here; in a terminal: meshbook debug {mesh.name} 1"
        )
        page.reported.remove(told)
        desk.on_request(page.audience, {"kind": "stacks", "ranks": "<b>", "view": "a", "id": "a-3"})
        assert "list of ranks" in page.wait_for(lambda message: message["kind"] == "reply")["text"]
        for nonsense in (None, 7, [], {}, {"kind": "no such thing"}, {"kind": "logs", "rank": "x"}, {"kind": ["kill"]}):
            desk.on_request(page.audience, nonsense)
        assert len([message for message in page.reported if message["kind"] == "findings" and message["asked"]]) == 1
    finally:
        gate.touch()
        running.result(WAIT_S)
        desk.remove_client(page.audience)


def test_the_end_of_the_mesh_is_told_and_ends_the_watching() -> None:
    with create_mesh(1) as mesh:
        desk, page = DashboardHub.of(mesh.session), Page(mesh)
        desk.add_client(page.audience)
    assert page.wait_for(lambda message: message["kind"] == "gone")["reason"]
    when(lambda: not desk.is_subscribed, "the watching has ended, which")
    when(
        lambda: not any(thread.name == "meshbook-dashboard" for thread in threading.enumerate()),
        "its thread has ended, which",
    )


def test_the_widget_is_one_however_often_it_is_shown_and_a_new_one_once_it_was_closed(mesh: Mesh) -> None:
    widget = mesh.dashboard()
    assert mesh.dashboard() is widget
    part = mesh.slice(rank=slice(0, 1)).dashboard()
    assert part is not widget
    desk = DashboardHub.of(mesh.session)
    widget.close()
    assert desk.is_subscribed
    assert mesh.dashboard() is not widget
    for other in (mesh.dashboard(), part):
        other.close()
        other.close()
    assert not desk.is_subscribed


def test_a_saved_notebook_has_a_table_in_the_place_of_the_live_widget(mesh: Mesh) -> None:
    with_live = mesh.dashboard()._repr_mimebundle_()[0]
    assert "application/vnd.jupyter.widget-view+json" in with_live
    assert "<table>" in with_live["text/html"]
    assert f"meshbook top {mesh.name}" in with_live["text/plain"]
