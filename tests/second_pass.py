"""Runs pytest, and then each test that failed again: by itself, in a new process, when nothing else runs.

    python -m tests.second_pass [pytest's arguments]

About half of the tests start real processes and depend on time, on machines that others share. What passes when it
is run again, at most twice, is flaky: it is listed with its first failure and with how busy the machine was then, is
added to build/flaky.json, and is a defect to be mended; but the exit status is 0. What fails again is a failure. So is
at once:

- a failed assertion in a test marked `numbers`: a number that is wrong once is wrong. If a wait of such a test took too
  long, or a cell of it raised, it is run again;
- everything, if more than MOST tests failed;
- whatever ends pytest itself, or one of its workers: a crash, an interrupt, a module that cannot be imported.

As a plugin of the processes that it starts, this file notes what failed there in the file that $SECOND_PASS_NOTES
names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NOTES = "SECOND_PASS_NOTES"
MOST = 15  # more failures than these are no chance
TRIES = 2
FLAKY = Path("build/flaky.json")


class LeftBehind(pytest.fail.Exception):
    """What a file of tests began goes on after it. It is run again as a whole."""


# As a plugin ----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the test ran: say whether what failed is a comparison, and how busy the machine is."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.surroundings = {
            "compared": is_comparison(call.excinfo.value),
            "whole_file": isinstance(call.excinfo.value, LeftBehind),
            "load": round(os.getloadavg()[0], 1),
            "pressure": cpu_pressure(),
        }
    return report


def is_comparison(error: BaseException) -> bool:
    """Whether an assertion failed; not a wait that took too long, or a cell that raised.

    pytest explains a failed comparison at length. If the test's time ends there, the comparison has failed all the
    same.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "_call_reprcompare":
            return True
        traceback = traceback.tb_next
    return isinstance(error, AssertionError)


def cpu_pressure() -> float | None:
    """In how much of the last 10 s some task waited for a processor, in percent; None: the kernel does not say."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split()
    except OSError:
        return None
    return float(some[1].removeprefix("avg10="))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In the process that reports: note what failed, and how many did not."""
    if (notes := os.environ.get(NOTES)) is None:
        return
    stats = terminalreporter.stats
    failures: dict[str, dict[str, Any]] = {}
    reports = [*stats.get("failed", ()), *stats.get("error", ())]
    if not all(isinstance(report, pytest.TestReport) for report in reports):  # a file of tests cannot be imported
        return
    for report in reports:
        failure = {
            "test": report.nodeid,
            "when": report.when,
            "why": reason(report),
            "seconds": round(report.duration, 1),
            "numbers": "numbers" in report.keywords,
            **getattr(report, "surroundings", {"crashed": True}),  # pytest-xdist reports for a worker that has ended
        }
        failures.setdefault(report.nodeid, failure)
    passed = {report.nodeid for report in stats.get("passed", ())} - set(failures)
    others = {word: len(stats.get(word, ())) for word in ("skipped", "deselected", "xfailed")}
    Path(notes).write_text(json.dumps({"failures": [*failures.values()], "passed": len(passed), **others}))


def reason(report: pytest.TestReport) -> str:
    """The first line of the exception, as pytest's own list of failures has it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return lines[0][:300] if lines else ""


# As a program ---------------------------------------------------------------------------------------------------------


def run_pytest(arguments: list[str]) -> tuple[int, dict[str, Any] | None]:
    """pytest's exit status, and what the plugin has noted; None: pytest did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.second_pass", *arguments]
        status = subprocess.Popen(command, env={**os.environ, NOTES: str(notes)}).wait()
        return status, json.loads(notes.read_text()) if notes.exists() else None


def is_red_at_once(failure: dict[str, Any]) -> bool:
    return failure.get("crashed", False) or (failure["numbers"] and failure["compared"])


def cause_of(failure: dict[str, Any]) -> tuple[str, ...]:
    """A fixture that fails for a whole file of tests is one cause."""
    file = failure["test"].partition("::")[0]
    return (file, failure["why"]) if failure["when"] == "setup" else (failure["test"],)


def passes_alone(failure: dict[str, Any]) -> bool:
    test = failure["test"].partition("::")[0] if failure.get("whole_file") else failure["test"]
    for number in range(1, TRIES + 1):
        print(f"\nRun again, alone ({number} of {TRIES}): {test}", flush=True)
        status, notes = run_pytest(["--numprocesses=0", test])
        if status == 0 and notes is not None and notes["passed"]:
            return True
    return False


def describe(failure: dict[str, Any]) -> str:
    pressure = (
        "" if failure.get("pressure") is None else f", processors waited for {failure['pressure']:.0f}% of the time"
    )
    busy = f"load {failure['load']}{pressure}" if "load" in failure else "its process has ended"
    return f"{failure['test']} ({failure['when']}, {failure['seconds']} s, {busy})\n      {failure['why']}"


def closing_line(notes: dict[str, Any], num_red: int, num_flaky: int, seconds: float) -> str:
    """As pytest's own last line, with the second pass counted."""
    counts = {"failed": num_red, "passed": notes["passed"] + num_flaky}
    counts |= {word: notes[word] for word in ("skipped", "deselected", "xfailed")}
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f" {words} in {seconds:.2f}s ".center(80, "=")


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets it too, and says how it ended
    status, notes = run_pytest(arguments)
    if status != pytest.ExitCode.TESTS_FAILED or notes is None:
        return status
    failures = notes["failures"]
    if (num_causes := len({cause_of(failure) for failure in failures})) > MOST:
        print(f"{num_causes} tests failed, more than {MOST}: none is run again.", flush=True)
        return status
    flaky = [failure for failure in failures if not is_red_at_once(failure) and passes_alone(failure)]
    red = [failure for failure in failures if failure not in flaky]
    if flaky:
        FLAKY.parent.mkdir(exist_ok=True)
        known = json.loads(FLAKY.read_text()) if FLAKY.exists() else []
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        FLAKY.write_text(json.dumps([*known, *({"at": at, **failure} for failure in flaky)], indent=1) + "\n")
    print(flush=True)
    for word, some in (("FLAKY", flaky), ("FAILED", red)):
        for failure in some:
            print(f"{word} {describe(failure)}")
    print(closing_line(notes, len(red), len(flaky), time.monotonic() - began), flush=True)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
