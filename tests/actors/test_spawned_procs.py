"""Which processes `spawn_procs` starts."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from typing import Any

import pytest

from meshbook.actors.base import Actor, endpoint
from meshbook.actors.procs import this_host
from meshbook.errors import CellError
from tests.budget import WAIT_S
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_meshes")

PROGRAM = """
    import sys
    from meshbook.actor import Actor, endpoint, this_host

    class Idle(Actor):
        @endpoint
        def has_torch(self):
            return "torch" in sys.modules

    procs = this_host().spawn_procs()
    print(procs.spawn("idle", Idle).has_torch.call_one().get(100))
    procs.stop().get(30)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("imports_torch", [True, False])
def test_processes_have_torch_if_the_program_has_imported_it(imports_torch: bool) -> None:
    done = run_python(("    import torch\n" if imports_torch else "") + PROGRAM)
    assert done.stdout == f"{imports_torch}\n", done.stderr


def _leave_mark(mark: str) -> threading.Lock:
    os.environ["BOOTSTRAP_MARK"] = mark
    return threading.Lock()  # stays there, for it cannot be sent


async def _leave_mark_later() -> None:
    await asyncio.sleep(0)
    _leave_mark("later")


def _fail() -> None:
    raise ValueError("not ready")


class Marked(Actor):
    @endpoint
    def mark(self) -> str | None:
        return os.environ.get("BOOTSTRAP_MARK")


@pytest.mark.parametrize(
    ("bootstrap", "mark"),
    [(functools.partial(_leave_mark, "at once"), "at once"), (_leave_mark_later, "later")],
    ids=["function", "coroutine function"],
)
def test_bootstrap_has_run_in_each_process_before_any_actor(bootstrap: Any, mark: str) -> None:
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap)
    assert list(procs.spawn("marked", Marked).mark.call().get(WAIT_S).values()) == [mark, mark]
    procs.stop().get(WAIT_S)


def test_a_bootstrap_that_fails_is_the_error_of_the_spawn() -> None:
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=_fail)
    with pytest.raises(CellError, match="ranks 0-1: ValueError: not ready"):
        procs.spawn("marked", Marked)
    procs.stop().get(WAIT_S)


STOPPED_AT_ONCE = """
    import threading
    import meshbook
    from meshbook.actor import this_host
    from meshbook.actors import spawned_procs

    mesh = meshbook.create_mesh(1, torch=False)  # its fork server could make a standby mesh
    spawned_procs.known_sessions.add(mesh.session)
    refill, is_spawned, done = spawned_procs._standby.refill, threading.Event(), threading.Event()

    def refill_late(*args, **kwargs):  # this thread gets no processor until the processes are stopped
        is_spawned.wait()
        procs.stop().get(60)
        refill(*args, **kwargs)
        done.set()

    spawned_procs._standby.refill = refill_late
    procs = this_host().spawn_procs()
    is_spawned.set()
    done.wait(100)
    print(spawned_procs._standby.pop(torch=False))
    mesh.stop()
"""


@pytest.mark.timeout(180)
def test_processes_that_are_stopped_as_soon_as_they_are_up_leave_no_standby_mesh() -> None:
    done = run_python(STOPPED_AT_ONCE)
    assert done.stdout == "None\n", done.stderr
