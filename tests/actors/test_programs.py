"""Programs written for Monarch, run unchanged but for the import: here, and on Monarch where it is installed."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshbook import actor

pytestmark = pytest.mark.usefixtures("starts_meshes")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent / "programs"

# Seconds; a program takes two or three on a quiet machine.
DEADLINE_S = 110.0

# Monarch looks after its processes every ten seconds otherwise, and a test would wait for it.
MONARCH = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "2s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "2s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "",
}

SAYS = {
    "ping_pong": """\
['left 0 of 2', 'left 1 of 2']
['right 0 of 2', 'right 1 of 2']
0 {'gpus': 0} ['left hits 0', 'right hits 1', 'left hits 2', 'right hits 3', 'left hits 4']
1 {'gpus': 1} ['left hits 0', 'right hits 1', 'left hits 2', 'right hits 3', 'left hits 4']
hits on the right: [2, 2]
one: ['right hits 2', 'left hits 3']
called together: ["{'gpus': 0} of {'gpus': 2}, 0 of 2", "{'gpus': 1} of {'gpus': 2}, 1 of 2"]
called alone: {} of {}, 1 of 2
called as a slice: ["{'gpus': 0} of {'gpus': 1}, 1 of 2"]
flattened: ["{'player': 0} of {'player': 2}, 0 of 2", "{'player': 1} of {'player': 2}, 1 of 2"]
""",
    "pipeline": """\
from source 0 [0, 1, 2, 3]
from source 1 [0, 1, 2, 3]
scaled: [0, 10, 20, 30, 0, 10, 20, 30]
sum over the mesh: 140
answered later: [10, 20, 30]
through the port: ValueError source 0 is empty
both sent: [40, 40]
streamed: [60, 60]
chosen: 50
a method that is no endpoint: [11, 11]
""",
    "parameter_server": """\
workers: 3 3 {'host_row': 1, 'gpus': 3}
a ValueMesh: True 3 ['host_row', 'gpus']
learned: True
weights: [3.0, -2.0, 1.0]
pushes: 180
a slice: 2
in order: 187
the error crossed two calls: True
it lives: 187
""",
    "supervision": """\
ActorError: True KeyError
it lives: worker 1
raised at the manager: SupervisionError
its other worker: True
the manager heard: True, unhandled: 0
an open call: SupervisionError
the hook was called: True
""",
    "rl_loop": """\
lost a generator: SupervisionError
before: True after: True generators left: 1
""",
}


MORE = ("pipeline", "parameter_server", "rl_loop")  # than the gate runs on Monarch too


def run(name: str, api: str) -> str:
    environment = {**os.environ, "ACTORS": api, "PYTHONPATH": str(ROOT), **(MONARCH if api == "monarch" else {})}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Monarch begins its output with a line of its own.
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("Monarch internal"))


@pytest.mark.parametrize("name", SAYS)
def test_a_program_written_for_monarch_runs_here(name: str) -> None:
    assert run(name, "meshbook") == SAYS[name]


@pytest.mark.monarch
@pytest.mark.parametrize(
    "name", ["ping_pong", "supervision", *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)]
)
def test_the_same_program_says_the_same_on_monarch(name: str) -> None:
    assert run(name, "monarch") == SAYS[name]


def test_no_program_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAYS)


# ---------------------------------------------------------------------------------------------------------------------
# The names


def table() -> dict[str, str]:
    """docs/actors.md: name of `monarch.actor` -> "yes", "differs" or "no"."""
    rows = re.findall(r"^\| `(\w+)` \| (yes|no|differs) \|(.*)\|$", (ROOT / "docs" / "actors.md").read_text(), re.M)
    assert all(why.strip() for _, here, why in rows if here != "yes"), "who differs says why"
    return {name: here for name, here, _ in rows}


def test_the_table_of_names_tells_the_truth() -> None:
    listed = table()
    assert {name for name, here in listed.items() if here != "no"} == {
        name for name in listed if name in actor.__all__ and hasattr(actor, name)
    }
    assert {name for name, here in listed.items() if here == "no"} == set(actor.NOT_HERE)
    assert set(listed) | {
        "ActorMesh", "Buffer", "RDMABuffer", "SupervisionError", "as_completed", "interrupt", "pull",
        "redefine",
    } == set(actor.__all__) | set(actor.NOT_HERE)  # fmt: skip


def test_a_name_that_is_not_here_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"has no attach_to_workers: hosts are started by .*mesh.spawn"):
        from meshbook.actor import attach_to_workers  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'acotr'"):
        actor.acotr  # noqa: B018  (asking is the test)


@pytest.mark.monarch
def test_the_table_has_every_name_of_monarchs() -> None:
    assert set(table()) == set(importlib.import_module("monarch.actor").__all__)
