"""Ctrl-C while a call is waited for in the foreground."""

from __future__ import annotations

import os
import signal

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.sigint import SigintLatch, defer_sigint
from meshbook.errors import CellInterrupted
from meshbook.wire import messages
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_press_while_a_report_is_handled_loses_nothing_of_it_and_stops_the_call(mesh: Mesh) -> None:
    session, shown = mesh.session, []

    def show(items: tuple[messages.FoldedItem, ...]) -> None:
        if not shown:
            press()
        shown.append("".join(str(item) for item in items))

    command = session.cell_command("import time\nprint('first')\ntime.sleep(1000)", mesh.ranks)
    finished = session.foreground.run(command, on_output=show)
    with pytest.raises(CellInterrupted):
        session.raise_for_status(finished, mesh.ranks, label="the call")
    assert "first" in shown[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_that_comes_as_the_call_ends_raises_behind_it(mesh: Mesh) -> None:
    session = mesh.session
    command = session.cell_command("print('only')", mesh.ranks)
    future = session.request(command)
    future.result(WAIT_S)
    future.add_done_callback = lambda done: (done(future), press())  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        session.foreground.wait(command, future)
    assert session.foreground.interrupt(may_escalate=False) is False


def test_a_stop_that_comes_to_ranks_that_have_ended_raises_unless_the_result_is_to_be_kept(mesh: Mesh) -> None:
    session = mesh.session

    def stop_when_ended(_: object) -> None:
        when(lambda: len(session.connection.pending) == 0)
        session.foreground.interrupt(may_escalate=False)

    command = session.cell_command("print('only')", mesh.ranks)
    with pytest.raises(CellInterrupted, match="was stopped as it ended"):
        session.foreground.run(command, on_output=stop_when_ended)
    command = session.cell_command("print('only')", mesh.ranks)
    finished = session.foreground.run(command, on_output=stop_when_ended, keep_result=True)
    assert {part.outcome.status for part in finished.outcomes} == {"ok"}


def test_a_press_is_noted_and_a_second_raises_while_nobody_has_looked() -> None:
    woken = []
    with SigintLatch(lambda: woken.append(1)) as presses:
        press()
        assert (woken, presses.pop(), presses.pop()) == ([1], True, False)
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert presses.pop()
        with pytest.raises(KeyboardInterrupt), presses.handler_restored():
            press()
        press()
        assert presses.pop()


def test_a_handler_of_the_users_that_raises_nothing_is_called_and_stops_nothing() -> None:
    called = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append(1))
    try:
        with SigintLatch(lambda: called.append(2)) as presses:
            press()
            assert (called, presses.pop()) == ([1], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_lines_that_must_be_done_whole_are_and_the_press_raises_behind_them() -> None:
    done = []

    def act() -> None:
        with defer_sigint():
            press()
            with defer_sigint():
                press()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_wait_inside_such_lines_hears_of_presses_and_so_does_one_inside_a_wait() -> None:
    with defer_sigint(), SigintLatch(lambda: None) as presses:
        press()
        assert presses.pop()
        with SigintLatch(lambda: None) as inner:
            press()
            assert (inner.pop(), presses.pop()) == (True, False)


def test_a_stop_pressed_as_the_call_is_sent_stops_it(mesh: Mesh) -> None:
    session = mesh.session
    session.before_call_hooks.append(press)
    try:
        command = session.cell_command("import time; time.sleep(1000)", mesh.ranks)
        finished = session.foreground.run(command)
    finally:
        session.before_call_hooks.remove(press)
    with pytest.raises(CellInterrupted):
        session.raise_for_status(finished, mesh.ranks, label="the call")
