"""A host's looks at real ranks: answering, silent, stopped, dying. One host for all tests that leave it whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from meshbook.diagnose.findings import explain
from meshbook.host import procfs
from meshbook.wire import messages
from meshbook.wire.messages import RankSnapshot, ThreadStack
from tests.budget import WAIT_S
from tests.host.host_driver import HostDriver, running_host
from tests.standstill import starved


@pytest.fixture(scope="module")
def shared_host(starts_processes: None) -> Iterator[HostDriver]:
    with running_host(3, torch=True) as made:
        yield made


@pytest.fixture
def ranks(shared_host: HostDriver) -> Iterator[HostDriver]:
    """The shared host, which must be whole and idle again after the test."""
    shared_host.reports.clear()
    yield shared_host
    shared_host.take_snapshots_until(
        lambda reported: (
            [(snapshot.rank, snapshot.source, snapshot.call) for snapshot in reported.values()]
            == [(rank, "inside", None) for rank in shared_host.ranks]
        )
    )


def main(snapshot: RankSnapshot) -> ThreadStack:
    return next(stack for stack in snapshot.stacks if stack.is_main)


def place(snapshot: RankSnapshot) -> list[tuple[str, int]]:
    """Functions and lines of the main thread that are in the cell."""
    return [(frame.function, frame.line) for frame in main(snapshot).frames if frame.file == snapshot.file]


def are_at(*expected: tuple[str, int]) -> Callable[[dict[int, RankSnapshot]], bool]:
    """Whether all ranks say that their main threads are there in the cell."""
    return lambda reported: all(
        snapshot.source == "inside" and place(snapshot) == list(expected) for snapshot in reported.values()
    )


def say(reported: dict[int, RankSnapshot], *ranks: int) -> bool:
    """Whether these ranks have answered for themselves."""
    return all(reported[rank].source == "inside" for rank in ranks)


@pytest.mark.usefixtures("starts_processes")
def test_ranks_that_do_nothing_say_so(ranks: HostDriver) -> None:
    ranks.run("1 + 1")
    reported = ranks.take_snapshots_until(lambda reported: say(reported, 1))[1]
    assert (reported.source, reported.call, reported.cell, reported.last_status, reported.last_cell) == (
        "inside",
        None,
        None,
        "ok",
        "cell 1",
    )
    assert main(reported).frames == ()
    assert reported.problem is None


def test_busy_ranks_show_the_cell_outermost_and_what_the_system_says(ranks: HostDriver) -> None:
    call = ranks.start_cell_and_wait("import time\ndef f():\n    time.sleep(1000)\nf()", label="cell 7")
    there = are_at(("<module>", 5), ("f", 4))
    sleep = lambda reported: all(main(one).syscall == "clock_nanosleep" for one in reported.values())  # noqa: E731
    for reported in ranks.take_snapshots_until(lambda reported: there(reported) and sleep(reported)).values():
        assert (reported.call, reported.cell, reported.cell_line) == (call, "cell 7", 4)
        assert main(reported).frames[0].function == "<module>"
        assert reported.running_s is not None
        assert 0 < reported.running_s < 600
        assert reported.process is not None
        assert (reported.process.state, reported.process.syscall) == ("S", "clock_nanosleep")
        assert (main(reported).state, main(reported).syscall) == ("S", "clock_nanosleep")
        assert reported.process.rss_bytes > 1 << 20
    ranks.interrupt(call)
    reported = ranks.take_snapshots_until(lambda reported: say(reported, 0))[0]
    assert reported.last_status == "interrupted"


def test_a_rank_that_asks_for_input_says_so(ranks: HostDriver) -> None:
    call = ranks.start_cell("input('why? ') if rank == 1 else None", allow_input=True)
    ranks.wait_for(messages.InputRequest, call)
    reported = ranks.take_snapshots_until(lambda reported: say(reported, *ranks.ranks))
    assert [snapshot.awaiting_input for snapshot in reported.values()] == [False, True, False]
    ranks.send(messages.InputReply(target=call, rank=1, text="because"))  # type: ignore[arg-type]
    ranks.wait_for(messages.CallFinished, call)
    assert not ranks.take_snapshots()[1].awaiting_input


def test_a_loader_that_waits_for_a_stopped_worker_shows_the_worker(ranks: HostDriver) -> None:
    call = ranks.start_cell_and_wait(
        "import os, signal, time\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "for _ in torch.utils.data.DataLoader(Data(), num_workers=1): pass",
        ranks=(0,),
    )

    def is_stopped(reported: dict[int, RankSnapshot]) -> bool:
        process = reported[0].process
        return say(reported, 0) and process is not None and "T" in [state for _, state, _ in process.children]

    reported = ranks.take_snapshots_until(is_stopped)[0]
    assert reported.process is not None
    assert place(reported)[-1] == ("<module>", 6)
    assert main(reported).frames[-1].function != "<module>"  # the library's, below
    for pid, state, _ in reported.process.children:
        if state == "T":
            os.kill(pid, signal.SIGKILL)
    ranks.interrupt(call)


@pytest.mark.usefixtures("starts_processes")
def test_a_rank_that_keeps_the_gil_is_looked_at_from_outside(ranks: HostDriver) -> None:
    call = ranks.start_cell("import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).sleep(1000)")

    def is_kept(reported: dict[int, RankSnapshot]) -> bool:
        kept = reported[1].source == "outside" and place(reported[1]) == [("<module>", 3)]
        return kept and say(reported, 0) and (reported[1].beat_age_s or 0.0) > 2.5  # longer than a beat takes to come

    reported = ranks.take_snapshots_until(is_kept)[1]
    assert (main(reported).has_gil, reported.call, reported.cell_line) == (True, call, 3)
    assert reported.process is not None
    assert reported.process.syscall == "clock_nanosleep"
    ranks.interrupt(call)
    # The host repeats what it has of a rank with each beat of its own, so the next may not have the lag yet.
    ranks.wait_until(lambda: any(health.gil_lag_s > 1.0 for health in health_of(ranks, 1)))


def has_told_of_a_collective(ranks: HostDriver, rank: int) -> bool:
    """Whether a beat of a rank since the test began has told of one."""
    beats = [report for report in ranks.reports if isinstance(report, messages.HostHeartbeat)]
    return any(told.collectives for beat in beats for told in beat.metrics if told.rank == rank)


def health_of(ranks: HostDriver, rank: int) -> list[messages.Health]:
    """What a rank has measured, by the beats that have come since the test began."""
    beats = [report for report in ranks.reports if isinstance(report, messages.HostHeartbeat)]
    told = [measured.health for beat in beats for measured in beat.metrics if measured.rank == rank]
    return [health for health in told if health is not None]


@pytest.mark.usefixtures("starts_processes")
def test_a_rank_that_gets_no_processor_is_not_said_to_keep_the_gil(ranks: HostDriver) -> None:
    call = ranks.start_cell_and_wait("while True: pass", ranks=(1,))
    with starved(ranks.pid(1)):
        # It answers late if at all, is then looked at from outside, and has the GIL there, as it has most of the time.
        looks = [ranks.take_snapshots()[1] for _ in range(4)]
    ranks.interrupt(call)
    for look in looks:
        kinds = [one.kind for one in explain([look])]
        assert kinds == ["slow" if look.source == "inside" else "starved"], (look.starved_s, look.looked_s)


@pytest.mark.usefixtures("starts_processes")
def test_a_stopped_rank_is_looked_at_from_outside_at_once_with_what_its_beats_told(ranks: HostDriver) -> None:
    ranks.run("dist.all_reduce(torch.ones(2))")
    ranks.wait_until(lambda: has_told_of_a_collective(ranks, 2))
    call = ranks.start_cell_and_wait("import time\ntime.sleep(1000)")
    ranks.take_snapshots_until(are_at(("<module>", 3)))
    os.kill(ranks.pid(2), signal.SIGSTOP)
    try:
        ranks.wait_until(lambda: procfs.process_state(ranks.pid(2)) == "T")
        reported = ranks.take_snapshots_until(lambda reported: say(reported, 0, 1) and reported[2].source == "outside")
    finally:
        os.kill(ranks.pid(2), signal.SIGCONT)
    assert reported[2].process is not None
    assert reported[2].process.state == "T"
    assert (reported[2].call, place(reported[2])) == (call, [("<module>", 3)])
    assert reported[2].collectives[-1].op == "all_reduce"
    assert reported[2].health is not None
    assert reported[2].health.num_collectives > 0
    ranks.interrupt(call)


def test_without_py_spy_the_rest_is_told_and_what_is_missing(
    ranks: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "find_py_spy", lambda: None)
    os.kill(ranks.pid(1), signal.SIGSTOP)
    try:
        ranks.wait_until(lambda: procfs.process_state(ranks.pid(1)) == "T")
        reported = ranks.take_snapshots_until(lambda reported: reported[1].process is not None)[1]
    finally:
        os.kill(ranks.pid(1), signal.SIGCONT)
    assert (reported.source, reported.stacks) == ("none", ())
    assert "pip install py-spy" in (reported.problem or "")
    assert reported.process is not None
    assert reported.process.state == "T"


def test_a_process_whose_files_cannot_be_read_in_time_does_not_hold_up_the_look(
    ranks: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process in an uninterruptible wait: every read in /proc waits with it."""
    go_on = threading.Event()
    read: list[bool] = []
    monkeypatch.setattr(procfs, "read_process", lambda pid: read.append(go_on.wait(WAIT_S)))
    reported = ranks.take_snapshots_until(lambda reported: say(reported, *ranks.ranks))
    assert not read
    go_on.set()
    assert all(snapshot.process is None for snapshot in reported.values())


@pytest.mark.usefixtures("starts_processes")
def test_hundreds_of_looks_at_once_are_all_answered(ranks: HostDriver) -> None:
    call = ranks.start_cell_and_wait("while True: pass")
    calls = [ranks.new_call_id() for _ in range(100)]
    for one in calls:
        ranks.send(messages.TakeSnapshots(call=one, ranks=ranks.ranks))  # type: ignore[arg-type]
    for one in calls:
        assert len(ranks.wait_for(messages.SnapshotReply, one).snapshots) == 3
    ranks.interrupt(call)


@pytest.mark.usefixtures("starts_processes")
def test_how_ranks_ended_is_told_also_when_they_die_while_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [3]
    monkeypatch.setattr(procfs, "num_oom_kills", lambda: kills[0])
    with running_host(4) as own:
        call = own.start_cell_and_wait("import time\ntime.sleep(1000)")
        for rank in (1, 2):
            os.kill(own.pid(rank), signal.SIGSTOP)
        own.wait_until(lambda: all(procfs.process_state(own.pid(rank)) == "T" for rank in (1, 2)))
        asked = own.new_call_id()
        own.send(messages.TakeSnapshots(call=asked, ranks=own.ranks))  # type: ignore[arg-type]
        for rank in (1, 2):
            os.kill(own.pid(rank), signal.SIGKILL)
        taken = own.wait_for(messages.SnapshotReply, asked).snapshots
        assert "none" not in (taken[0].source, taken[3].source)
        for reported in taken[1:3]:  # as it was, or as it ended: whichever was seen first
            assert reported.source == "outside" or reported.exited is not None or "ended" in (reported.problem or "")
        own.wait_until(lambda: own.agent.ledger.ranks[1].exit_reason and own.agent.ledger.ranks[2].exit_reason)
        reported = own.take_snapshots()[2]
        assert reported.exited is not None
        assert (reported.exited.signal, reported.exited.oom_killed, reported.source) == (signal.SIGKILL, False, "none")
        assert reported.problem == "its process is gone"

        kills[0] = 4  # as the kernel counts when it is out of memory
        os.kill(own.pid(3), signal.SIGKILL)
        own.wait_until(lambda: own.agent.ledger.ranks[3].exit_reason)
        reported = own.take_snapshots()[3]
        assert reported.exited is not None
        assert reported.process is not None
        assert (reported.exited.oom_killed, reported.process.oom_killed) == (True, True)
        lost = own.agent.ledger.ranks[3].exit_reason
        assert lost == "was killed by SIGKILL because the host ran out of memory"

        own.send(messages.KillRanks(call=own.new_call_id(), ranks=(0,), signal=9))  # type: ignore[arg-type]
        own.wait_for(messages.CallFinished, call)
        reported = own.take_snapshots()[0]
        assert reported.exited is not None
        assert not reported.exited.oom_killed  # that one was asked for
