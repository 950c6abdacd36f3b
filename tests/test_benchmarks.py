"""The benchmarks run, and their report says what was measured. How fast anything is, is never tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyperf
import pytest

from benchmarks.report import Report, figure, verdict
from benchmarks.workbench import take_turns

ROOT = Path(__file__).resolve().parent.parent


def run_suite(*arguments: str, json_to: Path) -> tuple[subprocess.CompletedProcess[str], list[pyperf.Benchmark]]:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--json", str(json_to)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    return done, list(pyperf.BenchmarkSuite.load(str(json_to))) if json_to.exists() else []


def test_a_quick_run_measures_prints_and_writes_its_figures(tmp_path: Path) -> None:
    some = ("pure", "bulk", "stop")
    done, found = run_suite(*some, json_to=tmp_path / "build" / "bench.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {benchmark.get_name().split(":")[0] for benchmark in found} == set(some)
    by_name = {benchmark.get_name(): benchmark for benchmark in found}
    assert by_name["bulk: a copy"].get_unit() == "second"
    assert 0 < by_name["bulk: a copy"].median() < by_name["bulk: numpy: push, cold"].median() + 60
    promises = [benchmark for benchmark in found if ": promise: " in benchmark.get_name()]
    assert {benchmark.get_name().split(":")[0] for benchmark in promises} == set(some)
    for benchmark in promises:
        assert benchmark.get_metadata()["shown"] in done.stdout


def test_a_benchmark_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done, found = run_suite("no_such_thing", json_to=tmp_path / "bench.json")
    assert done.returncode == 2
    assert "no_such_thing" in done.stderr
    assert "round_trip" in done.stderr
    assert found == []


def test_a_promise_holds_up_to_its_limit_and_not_beyond() -> None:
    report = Report("trip", "there and back")
    report.promise("at the limit", 4.0, 4.0, "ms")
    report.promise("beyond it", 4.1, 4.0, "ms")
    assert [promise.held for promise in report.promises] == [True, False]
    assert verdict(report.suite()) == [
        "1 of 2 promises held",
        "  trip: promise: beyond it: 4.10 of at most 4.00 ms: NOT held",
        "  trip: promise: at the limit: 4.00 of at most 4.00 ms: held",
    ]


def test_a_row_says_what_multiple_it_is_of_another() -> None:
    report = Report("trip", "there and back")
    report.add("bare", [1.0, 2.0, 3.0], "ms")
    assert report.add("ours", [5.0, 6.0, 100.0], "ms", against="bare") == 6.0
    assert report.ratio("ours") == 3.0
    assert "3.00 x bare" in "\n".join(report.lines())
    with pytest.raises(ValueError, match="no row 'theirs'; there are bare, ours"):
        report.add("more", 1.0, "ms", against="theirs")
    with pytest.raises(ValueError, match="nothing was measured"):
        report.add("never", [], "ms")


def test_a_difference_is_taken_round_by_round() -> None:
    report = Report("trip", "there and back")
    report.add("plain", [1.0, 50.0, 2.0], "ms")  # the machine was busy in the second round, for both
    report.add("ours", [2.0, 51.0, 4.0], "ms")
    assert report.difference("over plain", "ours", "plain") == 1.0


def test_a_report_is_a_suite_of_pyperf_in_its_units(tmp_path: Path) -> None:
    report = Report("trip", "there and back")
    report.add("bare", [1.0, 2.0], "ms")
    report.add("memory", 3.0, "MiB")
    report.add("shrunk", -1.0, "MiB")
    report.promise("twice", 2.0, 4.0, "x")
    report.suite().dump(str(tmp_path / "bench.json"))
    loaded = pyperf.BenchmarkSuite.load(str(tmp_path / "bench.json"))
    assert loaded.get_benchmark_names() == ["trip: bare", "trip: memory", "trip: shrunk", "trip: promise: twice"]
    assert loaded.get_benchmark("trip: bare").get_values() == (0.001, 0.002)
    assert loaded.get_benchmark("trip: memory").get_values() == (3 * 2**20,)
    assert loaded.get_benchmark("trip: shrunk").median() == pytest.approx(0.0, abs=1e-9)
    assert verdict(loaded) == ["1 of 1 promises held", "  trip: promise: twice: 2.00 of at most 4.00 x: held"]


def test_turns_are_taken_by_all_with_another_first_in_every_round() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = take_turns({name: lambda name=name: contestant(name) for name in "abc"}, 3, warm_up=1)  # type: ignore[misc]
    assert order == [*"abc", *"bca", *"cab", *"abc"]
    assert taken["a"] == [6.0, 8.0, 10.0]


@pytest.mark.parametrize(("value", "words"), [(0.1234, "0.12"), (12.34, "12.3"), (1234.5, "1,234"), (-0.5, "-0.50")])
def test_figures_have_three_digits_that_count(value: float, words: str) -> None:
    assert figure(value) == words
