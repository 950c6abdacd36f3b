"""The rules of the tests themselves: what the gate is made of, and how a test may wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest
from tests.suites import GATE, is_in_gate, kind_of

TESTS = Path(__file__).resolve().parent

# A sleep of less is a look, again and again; one of more never ends: somebody stops it.
LONGEST_LOOK_S, SHORTEST_HANG_S = 0.05, 10.0
# What takes a while, and nothing waits for it: by file and length.
SLOW = {
    ("cli/test_run.py", 4.0): "a mesh that is slow to end",
    ("cluster/figures.py", 1.0): "measures",
    ("cluster/bed.py", 1.0): "looks for children, of which there are none",
    ("soak/supervisor_kills.py", 0.1): "a moment of the work, at random",
    ("soak/supervisor_kills.py", 0.2): "a moment of the work, at random",
    ("controller/test_desync.py", 1.0): "a rank that computes while another one leaves",
    ("controller/test_desync.py", 2.0): "a thread that is late for its collective",
    ("controller/test_preemption.py", 0.3): "steps that take so long that some are left",
    ("controller/test_run.py", 0.2): "a cell that an interrupt would hit",
    ("host/test_spares.py", 2.0): "a spare that is slow to answer",
    ("kernel/test_cells.py", 0.15): "a bar that moves",
    ("kernel/test_cells.py", 0.5): "a cell that is asked beside",
    ("kernel/test_interrupts.py", 0.3): "a call into C that comes after the first word",
    ("kernel/test_interrupts.py", 0.4): "a rank that answers when a second press is a press of its own",
    ("zoo/hangs.py", 0.3): "a straggler",
}
# Who may look at all processes, or all shared memory, of the machine: they keep to what is this run's.
MACHINE_WIDE = {
    "cluster/bed.py", "leaks.py", "test_leaks.py", "controller/test_logs.py", "test_suites.py", "host_processes.py"
}  # fmt: skip
# A wait of so many seconds is a limit, of which there is one (tests/budget.py).
SHORTEST_LIMIT_S = 5.0
LIMITS = {"timeout", "timeout_s", "within_s"}


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if "/programs/" not in name:  # as users write them
            yield name, path.read_text()


def sleeps(source: str) -> list[float]:
    """Of all sleeps, also those of cells, the seconds of each that is neither a look nor a hang."""
    found = [float(seconds) for seconds in re.findall(r"sleep\((\d+(?:\.\d+)?)\)", source)]
    return [seconds for seconds in found if LONGEST_LOOK_S < seconds < SHORTEST_HANG_S]


def literal_limits(source: str) -> list[str]:
    """Where a call waits for a number of seconds that stands there."""

    def is_limit(node: ast.expr) -> bool:
        value = node.value if isinstance(node, ast.Constant) else None
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= SHORTEST_LIMIT_S

    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [keyword.value for keyword in call.keywords if keyword.arg in LIMITS]
        if name in ("result", "exception", "get", "join") and len(call.args) == 1:
            given += call.args
        if any(map(is_limit, given)):
            found.append(f"line {call.lineno}: {name}")
    return found


def test_the_gates_files_are_there_and_each_has_one_promise() -> None:
    files = [file for files in GATE.values() for file in files]
    assert [file for file in files if not (TESTS / file).exists()] == []
    assert len(set(files)) == len(files)


def test_the_gate_has_all_that_starts_no_mesh_and_of_the_rest_its_files() -> None:
    assert is_in_gate("pure", "zoo/test_bad_numbers.py")
    assert is_in_gate("processes", "wire/test_buffers.py")
    assert is_in_gate("meshes", "controller/test_run.py")
    assert not is_in_gate("meshes", "controller/test_run.py", is_thorough=True)
    assert not is_in_gate("meshes", "controller/test_desync.py")
    assert not is_in_gate("soak", "soak/test_soak.py")


@pytest.mark.parametrize(
    ("fixtures", "kind"),
    [
        ((), "pure"),
        (("tmp_path", "run"), "pure"),
        (("starts_processes",), "processes"),
        (("mesh", "starts_meshes", "starts_processes"), "meshes"),
        (("starts_kernels", "starts_meshes", "starts_processes"), "kernels"),
        (("notebook", "chromium", "starts_meshes"), "browser"),
    ],
)
def test_a_test_is_what_its_costliest_fixture_starts(fixtures: tuple[str, ...], kind: str) -> None:
    assert kind_of(fixtures) == kind


def test_a_pure_test_that_starts_a_process_fails() -> None:
    import subprocess

    with pytest.raises(RuntimeError, match="a pure test starts a process; it has to use starts_processes"):
        subprocess.Popen(["true"])


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ModuleNotFoundError("", name="torch.nn"), "torch.nn"),
        (ModuleNotFoundError("", name="meshbook.attic"), None),
        (ImportError("", name="tests.rank.test_shell"), "what tests.rank.test_shell needs"),
        (ImportError("", name="meshbook.wire"), None),
        (ValueError(), None),
    ],
)
def test_without_torch_what_is_not_installed_is_no_failure_and_what_is_ours_is(
    error: Exception, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "WITHOUT_TORCH", True)
    assert conftest.what_is_missing(error) == name
    monkeypatch.setattr(conftest, "WITHOUT_TORCH", False)
    assert conftest.what_is_missing(error) is None


def test_nothing_sleeps_as_a_schedule() -> None:
    found = {(name, seconds) for name, source in sources() if name != "test_suites.py" for seconds in sleeps(source)}
    assert found == SLOW.keys()


def test_every_wait_has_the_one_limit() -> None:
    assert {name: found for name, source in sources() if (found := literal_limits(source))} == {}


def test_nothing_compares_what_the_whole_machine_has() -> None:
    pattern = re.compile(r"""psutil\.(pids|process_iter)|listdir\(["']/(dev/shm|proc|tmp)["']\)""")
    assert {name for name, source in sources() if pattern.search(source)} <= MACHINE_WIDE


def test_a_planted_trespass_is_found() -> None:
    assert sleeps("cell = 'time.sleep(0.3); time.sleep(0.01); time.sleep(600)'") == [0.3]
    assert literal_limits("future.result(20)\nrun(timeout=60)\nfuture.result(0.2)\nrun(timeout=WAIT_S)") == [
        "line 1: result",
        "line 2: run",
    ]
