"""A rank dies, and whoever is to say so stands still for a while: the survivors' error is the reason all the same.

The supervisor, a host or the fork server gets no processor on a busy machine, or a debugger holds it. Survivors see
their connections close at once, and are not to show that alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost
from tests.budget import WAIT_S, when
from tests.gate import Gate
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Ranks ask at once why their collective has failed, and wait for the answer for as long as it takes: what is not
# answered does not pass. They write down that they ask.
SETUP = """
import os
from pathlib import Path
from meshbook.rank.process_groups import exit_questions, group_health

def note(what, text=""):
    (Path(folder) / f"{what}-{rank}").write_text(text)

def ask_at_once():
    group_health.ASK_REASON_AFTER_S = 0.0
    exit_questions.REASON_TIMEOUT_S = 1e6
    wait = exit_questions.ExitQuestions.wait_until_reported

    def wait_until_reported(self, is_known):
        note("asking")
        wait(self, is_known)

    exit_questions.ExitQuestions.wait_until_reported = wait_until_reported

ask_at_once()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Mesh]:
    with create_mesh(3) as mesh:
        mesh.run(SETUP, setup=True)
        yield mesh


@pytest.fixture
def trio(shared: Mesh, tmp_path: Path) -> Mesh:
    shared.heal()
    shared.run(f"folder = {str(tmp_path)!r}", echo=False)
    return shared


def who_noted(gate: Gate, what: str) -> set[int]:
    """The ranks that have written that down."""
    return {int(path.name.rpartition("-")[2]) for path in gate.path.parent.glob(f"{what}-*")}


def is_asked(gate: Gate) -> bool:
    """Whether a survivor asks. Others may wait for that one, whose connections are whole."""
    return bool(who_noted(gate, "asking"))


def begin(mesh: Mesh, gate: Gate, source: str) -> Any:
    """Have the last rank wait at the gate and do this, and the others wait for it in a collective. Returns the cell."""
    last = len(mesh) - 1
    cell = mesh.run(
        f"note('begun')\nif rank == {last}:\n    {gate.wait}\n    {source}\ndist.all_reduce(torch.ones(1))",
        wait=False,
        echo=False,
    )
    when(lambda: len(who_noted(gate, "begun")) == last + 1)
    return cell


KILLED = "os.kill(os.getpid(), 9)"


def check_reason(cell: Any, rank: int) -> None:
    """That the cell's error, and what each survivor raised, is that this rank was killed."""
    error = cell.exception(WAIT_S)
    assert isinstance(error, RankLost)
    assert (error.ranks, error.signal) == ((rank,), "SIGKILL")
    raised = {f"{failure.ename}: {failure.evalue}" for failure in error.failures}
    assert raised <= {f"RankLost: rank {rank} was killed by SIGKILL"}


def test_survivors_show_the_reason_however_long_the_supervisor_stands_still(trio: Mesh, gate: Gate) -> None:
    cell = begin(trio, gate, KILLED)
    with stopped(trio.session.info.supervisor_pid):
        gate.open()
        when(lambda: is_asked(gate))
    check_reason(cell, 2)


def test_a_standby_that_takes_over_answers_what_its_supervisor_was_asked(trio: Mesh, gate: Gate) -> None:
    cell = begin(trio, gate, KILLED)
    supervisor = trio.session.info.supervisor_pid
    with stopped(supervisor):
        gate.open()
        when(lambda: is_asked(gate))
        os.kill(supervisor, signal.SIGKILL)
    error = cell.exception(WAIT_S)
    assert isinstance(error, RankLost)
    assert {failure.ename for failure in error.failures} <= {"RankLost"}


def test_a_connection_that_breaks_though_nobody_has_ended_is_the_error_itself(trio: Mesh, gate: Gate) -> None:
    cell = begin(trio, gate, "from tests.connections import cut_tcp; cut_tcp()")
    gate.open()
    error = cell.exception(WAIT_S)
    assert is_asked(gate)
    assert "gloo/transport" in str(error)
    assert trio.run("t = torch.ones(1)\ndist.all_reduce(t)\nint(t)", echo=False).values.same() == 3
