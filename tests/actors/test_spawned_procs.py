"""Which processes `spawn_procs` starts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.budget import WAIT_S

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
    source = ("import torch\n" if imports_torch else "") + textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert done.stdout == f"{imports_torch}\n", done.stderr


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
    source = textwrap.dedent(STOPPED_AT_ONCE)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert done.stdout == "None\n", done.stderr
