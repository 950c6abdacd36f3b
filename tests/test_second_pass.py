"""What failed is run again, alone, and what that makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_assertrepr_compare
from tests.second_pass import cause_of

pytestmark = pytest.mark.usefixtures("starts_processes")

ROOT = Path(__file__).resolve().parent.parent

# A test that fails as often as its file lacks lines.
SOMETIMES = """
import os, pathlib, time
import pytest

def fails(times):
    runs = pathlib.Path(f"runs-{os.environ['PYTEST_CURRENT_TEST'].split('::')[-1].split()[0]}")
    with runs.open("a") as file:
        file.write("x")
    return len(runs.read_text()) <= times

def test_passes():
    pass
"""


def second_pass(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    """The exit status and the output for a file of tests."""
    (folder / "test_toy.py").write_text(SOMETIMES + tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = numbers: compares numbers\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts in less time
    environment["PYTEST_ADDOPTS"] = "-p xdist.plugin -p pytest_timeout"
    command = [sys.executable, "-m", "tests.second_pass", *arguments, "test_toy.py"]
    result = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return result.returncode, result.stdout


def last_line(output: str) -> str:
    """Without its seconds and without the signs around it."""
    return re.sub(r" in [\d.]+s.*", "", output.strip().splitlines()[-1].strip("= "))


def test_all_pass_at_once_and_the_last_line_is_pytests_own(tmp_path: Path) -> None:
    status, output = second_pass(tmp_path, "")
    assert status == 0
    assert last_line(output) == "1 passed"
    assert "Run again" not in output


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fails_once_is_flaky_and_is_listed(tmp_path: Path, workers: str) -> None:
    tests = "def test_a(): assert not fails(1), 'a rank was late'"
    status, output = second_pass(tmp_path, tests, f"--numprocesses={workers}")
    assert status == 0
    assert last_line(output) == "2 passed"
    assert re.search(
        r"FLAKY test_toy.py::test_a \(call, 0.\d s, load [\d.]+.*\)\n +AssertionError: a rank was late", output
    )
    (flaky,) = json.loads((tmp_path / "build" / "flaky.json").read_text())
    assert (flaky["test"], flaky["why"]) == ("test_toy.py::test_a", "AssertionError: a rank was late")


def test_what_fails_three_times_has_failed(tmp_path: Path) -> None:
    tests = "def test_a(): assert not fails(3)\ndef test_b(): assert not fails(2)"
    status, output = second_pass(tmp_path, tests)
    assert status == 1
    assert last_line(output) == "1 failed, 2 passed"
    assert output.count("Run again, alone") == 4
    assert "FAILED test_toy.py::test_a" in output
    assert "FLAKY test_toy.py::test_b" in output


def test_what_fails_in_its_test_and_in_its_teardown_counts_once(tmp_path: Path) -> None:
    tests = """
@pytest.fixture
def broken():
    yield
    assert not fails(2)

def test_a(broken): assert not fails(1)
"""
    status, output = second_pass(tmp_path, tests)
    assert status == 0
    assert last_line(output) == "2 passed"
    assert output.count("FLAKY") == 1


def test_a_difference_of_numbers_is_never_run_again_and_a_timeout_is(tmp_path: Path) -> None:
    tests = """
@pytest.mark.numbers
def test_difference(): assert not fails(1)

@pytest.mark.numbers
def test_late():
    if fails(1):
        raise TimeoutError("the ranks did not come")
"""
    status, output = second_pass(tmp_path, tests)
    assert status == 1
    assert last_line(output) == "1 failed, 2 passed"
    assert "FAILED test_toy.py::test_difference" in output
    assert "FLAKY test_toy.py::test_late" in output


def test_a_difference_that_takes_too_long_to_explain_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import time\ndef pytest_assertrepr_compare(): time.sleep(60)")
    tests = """
@pytest.mark.numbers
@pytest.mark.timeout(1)
def test_difference(): assert [1] == ([2] if fails(1) else [1])
"""
    status, output = second_pass(tmp_path, tests)
    assert status == 1
    assert "Timeout" in output
    assert last_line(output) == "1 failed, 1 passed"


def test_many_failures_are_no_chance(tmp_path: Path) -> None:
    status, output = second_pass(
        tmp_path, "@pytest.mark.parametrize('n', range(16))\ndef test_a(n): assert not fails(1)"
    )
    assert status == 1
    assert last_line(output) == "16 tests failed, more than 15: none is run again."


def test_a_fixture_that_fails_for_a_whole_file_is_one_failure() -> None:
    def causes(when: str) -> set[tuple[str, ...]]:
        return {cause_of({"test": f"test_toy.py::test_a[{n}]", "when": when, "why": "no port"}) for n in range(16)}

    assert len(causes("setup")) == 1
    assert len(causes("call")) == 16


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_crash_is_never_run_again(tmp_path: Path, workers: str) -> None:
    tests = "def test_a():\n    if fails(1): os.abort()"
    status, output = second_pass(tmp_path, tests, f"--numprocesses={workers}")
    assert status != 0
    assert "Run again" not in output


@pytest.mark.parametrize("option", ["--verbose", "--continue-on-collection-errors"])
def test_a_module_that_cannot_be_imported_is_red(tmp_path: Path, option: str) -> None:
    (tmp_path / "test_other.py").write_text("raise ImportError('no such thing')")
    status, output = second_pass(tmp_path, "", option, "test_other.py")
    assert status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.TESTS_FAILED)
    assert "Run again" not in output


def test_large_values_are_compared_by_their_first_difference() -> None:
    large = {0: [list(range(10_000)), b"parameters"], 1: [0.5]}
    other = {0: [list(range(10_000)), b"parametErs"], 1: [0.25]}
    assert pytest_assertrepr_compare("==", large, other) == ["large values differ", "first at [0][1][7]: 101 != 69"]
    assert pytest_assertrepr_compare("==", large, None) is not None
    assert pytest_assertrepr_compare("==", [1], [2]) is None


def test_a_test_that_is_skipped_when_it_is_run_again_has_not_passed(tmp_path: Path) -> None:
    status, output = second_pass(tmp_path, "def test_a():\n    if not fails(1): pytest.skip()\n    assert False")
    assert status == 1
    assert last_line(output) == "1 failed, 1 passed"
