"""The benchmarks run, and their report says what was measured. How fast anything is, is never tested."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyperf
import pytest

from benchmarks.faulty_training import RANKS, WARM_UP_STEPS, Course, Kill, Reporter, Seen, Watch, course_of, schedule
from benchmarks.report import Report, figure, verdict
from benchmarks.workbench import take_turns
from tests.budget import WAIT_S

ROOT = Path(__file__).resolve().parent.parent


def run_suite(*arguments: str, json_to: Path) -> tuple[subprocess.CompletedProcess[str], list[pyperf.Benchmark]]:
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--json", str(json_to)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    return done, list(pyperf.BenchmarkSuite.load(str(json_to))) if json_to.exists() else []


@pytest.mark.usefixtures("starts_meshes")
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


@pytest.mark.usefixtures("starts_meshes")
def test_a_benchmark_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done, found = run_suite("no_such_thing", json_to=tmp_path / "bench.json")
    assert done.returncode == 2
    assert "no_such_thing" in done.stderr
    assert "round_trip" in done.stderr
    assert found == []


@pytest.mark.usefixtures("starts_processes")
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
    assert report.add("ours", [5.0, 6.0, 100.0, 7.0], "ms", against="bare") == 6.5
    assert report.ratio("ours") == 3.25
    assert "3.25 x bare" in "\n".join(report.lines())
    with pytest.raises(ValueError, match="no row 'theirs'; there are bare, ours"):
        report.add("more", 1.0, "ms", against="theirs")
    with pytest.raises(ValueError, match="nothing was measured"):
        report.add("never", [], "ms")


def test_differences_and_multiples_are_taken_round_by_round() -> None:
    report = Report("trip", "there and back")
    report.add("plain", [1.0, 50.0, 2.0], "ms")  # the machine was busy in the second round, for both
    report.add("ours", [2.0, 51.0, 4.0], "ms", against="plain")
    assert report.difference("over plain", "ours", "plain") == 1.0
    assert report.ratio("ours") == 2.0


@pytest.mark.usefixtures("starts_processes")
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


# ---- a training during which ranks are killed


def by_new_process(rank: int, seen: list[Seen]) -> list[Seen]:
    """The same reports, this rank's by another process."""
    return [replace(one, pid=99) if one.rank == rank else one for one in seen]


def step_of(step: int, at: float, ranks: tuple[int, ...] = (0, 1, 2, 3), first_pid: int = 10) -> list[Seen]:
    """Reports of a step that has ended on these ranks, 0.1 s after they were halfway; rank 3 is a little later."""
    halfway = [Seen("halfway", rank, step, first_pid + rank, at - 0.1) for rank in ranks]
    ended = [Seen("ended", rank, step, first_pid + rank, at + 0.01 * (rank == 3), len(ranks)) for rank in ranks]
    return halfway + ended


WARMED_UP = [one for step in range(WARM_UP_STEPS) for one in step_of(step, float(step))]
FIRST = WARM_UP_STEPS  # the first step that counts; the step before it ended at second FIRST - 1


def test_a_training_that_waits_for_the_killed_rank_takes_the_step_again_and_leaves_nothing_out() -> None:
    failed = [Seen("halfway", rank, FIRST, 10 + rank, FIRST - 0.1) for rank in range(RANKS)]
    back = [
        Seen(one.what, one.rank, one.step, 99 if one.rank == 1 else one.pid, one.at, 4) for one in step_of(FIRST, 7.0)
    ]
    course = course_of([*WARMED_UP, *failed, *back], [(5.0, 1)], last_step=FIRST)
    assert course == Course(
        seconds=pytest.approx(7.0 - (FIRST - 1)),
        survivors_s=(pytest.approx(2.01),),
        all_s=(pytest.approx(2.01),),
        num_not_back=0,
        num_failed=1,
        num_left_out=0,
        digests=frozenset({""}),
    )


def test_a_training_that_goes_on_without_the_killed_rank_leaves_its_batches_out() -> None:
    without = [one for step in (FIRST, FIRST + 1) for one in step_of(step, step + 1.0, ranks=(0, 2, 3))]
    seen = [*WARMED_UP, *without, *by_new_process(1, step_of(FIRST + 2, 9.0))]
    course = course_of(seen, [(5.0, 1)], last_step=FIRST + 2)
    assert (course.survivors_s, course.all_s) == ((pytest.approx(1.01),), (pytest.approx(4.01),))
    assert (course.num_failed, course.num_left_out, course.num_not_back) == (0, 2, 0)
    never = course_of([*WARMED_UP, *without], [(5.0, 1)], last_step=FIRST + 1)
    assert (never.all_s, never.num_not_back) == ((), 1)


def test_a_training_whose_other_ranks_died_with_the_killed_one_gives_no_figures() -> None:
    anew = step_of(FIRST, 7.0, first_pid=20)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2, 3\] ended although nobody killed them"):
        course_of([*WARMED_UP, *anew], [(5.0, 1)], last_step=FIRST)


def test_a_training_that_did_not_get_to_its_end_gives_no_figures() -> None:
    with pytest.raises(RuntimeError, match=f"steps {FIRST - 1} and {FIRST} were not both ended"):
        course_of(WARMED_UP, [], last_step=FIRST)


def test_a_schedule_is_its_seeds_and_leaves_each_killed_rank_time_to_be_back() -> None:
    kills = schedule(5, 200, 3)
    assert kills == schedule(5, 200, 3) != schedule(6, 200, 3)
    assert len({kill.rank for kill in kills}) == 3
    steps = [kill.step for kill in kills]
    assert all(later - earlier >= 50 for earlier, later in zip(steps, [*steps[1:], WARM_UP_STEPS + 200], strict=True))
    with pytest.raises(ValueError, match="4 kills of 4 ranks"):
        schedule(5, 200, 4)


@pytest.mark.usefixtures("starts_processes")
def test_the_rank_whose_turn_it_is_is_killed_once_halfway_through_its_step(tmp_path: Path) -> None:
    source = (
        "import sys; from benchmarks.faulty_training import Reporter\n"
        "reporter = Reporter(sys.argv[1], 2)\n"
        "for step in range(3): reporter.report('halfway', step)\n"
        "sys.stdin.read()"
    )
    with Watch(tmp_path, [Kill(step=1, rank=2)], last_step=1) as watch:
        with subprocess.Popen([sys.executable, "-c", source, watch.path], cwd=ROOT, stdin=subprocess.PIPE) as process:
            assert process.wait(WAIT_S) == -signal.SIGKILL
        for rank, what, step in ((2, "halfway", 2), (0, "ended", 1)):
            with closing(Reporter(watch.path, rank)) as reporter:
                reporter.report(what, step)
        assert watch.over.wait(WAIT_S)
    assert [rank for _, rank in watch.killed] == [2]
