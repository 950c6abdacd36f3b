"""Each kind of finding, from hand-made snapshots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from meshbook.diagnose.findings import as_text, explain
from meshbook.diagnose.kinds import KINDS
from meshbook.diagnose.snapshot_reader import has_moved
from meshbook.diagnose.source_files import sanitize_line
from meshbook.diagnose.stack_tree import as_text as stacks_as_text
from meshbook.diagnose.stack_tree import merge, moved_by_rank
from meshbook.wire.messages import Frame, Health, ProcessStatus
from tests.diagnose.factories import (
    CELL,
    IN_COLLECTIVE,
    STDLIB,
    TORCH,
    computing,
    dead,
    ended,
    frames_at,
    main_thread,
    op,
    running_rank,
    thread,
    waiting,
)

THREE_WAIT = (waiting(0), waiting(1), waiting(2))
LOCKED = ProcessStatus(state="S", syscall="futex")


def why(*snapshots, **more):
    return explain(snapshots, **more)


def only(*snapshots, **more):
    """The one finding that there is."""
    found = explain(snapshots, **more)
    assert len(found) == 1, as_text(found)
    assert found[0].kind in KINDS
    assert found[0].next_step
    assert "{" not in found[0].next_step, found[0].next_step
    return found[0]


def reported(finding):
    return finding.kind, finding.ranks, finding.others, finding.line


# ---- a rank that does not come


@pytest.mark.parametrize(
    ("below", "kind", "words"),
    [
        (Frame(f"{STDLIB}/threading.py", 320, "wait"), "waits-for-event", "an event"),
        (Frame(f"{STDLIB}/threading.py", 1119, "join"), "waits-for-thread", "a thread"),
        (Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "result"), "waits-for-thread", "a future"),
        (Frame(f"{STDLIB}/queue.py", 171, "get"), "waits-for-queue", "a queue"),
        (Frame(f"{STDLIB}/subprocess.py", 550, "run"), "waits-for-subprocess", "a subprocess"),
        (Frame(f"{STDLIB}/multiprocessing/connection.py", 216, "recv_bytes"), "waits-for-pipe", "a pipe"),
        (Frame(f"{STDLIB}/urllib/request.py", 216, "urlopen"), "waits-for-socket", "the network"),
        (Frame(f"{TORCH}/utils/data/dataloader.py", 1410, "_get_data"), "waits-for-worker", "a DataLoader worker"),
        (Frame(f"{TORCH}/cuda/__init__.py", 1080, "synchronize"), "waits-for-gpu", "the GPU"),
        (Frame(f"{STDLIB}/pdb.py", 400, "interaction"), "waits-for-input", "the debugger"),
    ],
)
def test_a_rank_that_waits_elsewhere_is_blamed_with_its_line_and_who_waits_for_it(below, kind, words):
    finding = only(*THREE_WAIT, running_rank(3, *frames_at(9, below, function="load")))
    assert reported(finding) == (kind, (3,), (0, 1, 2), 9)
    assert words in finding.title
    assert "at cell 7, line 9 in load" in finding.title
    assert "has not come to all_reduce #1, where ranks 0-2 wait (cell 7, line 3)" in finding.title
    assert finding.waits == (((0, 1, 2), (3,), "all_reduce #1"),)
    assert finding.sure


@pytest.mark.parametrize(
    ("syscall", "target", "kind"),
    [
        ("futex", None, "waits-for-lock"),
        ("flock", "/tmp/x.lock", "waits-for-file"),
        ("openat", "/tmp/fifo", "waits-for-file"),
        ("read", "pipe", "waits-for-pipe"),
        ("read", "socket 127.0.0.1:80", "waits-for-socket"),
        ("recvfrom", "socket 127.0.0.1:80", "waits-for-socket"),
        ("wait4", "process 12", "waits-for-subprocess"),
        ("clock_nanosleep", None, "missing-from-collective"),
    ],
)
def test_what_leaves_no_frame_is_known_by_its_system_call(syscall, target, kind):
    process = ProcessStatus(state="S", syscall=syscall, syscall_target=target)
    finding = only(*THREE_WAIT, running_rank(3, *frames_at(9), process=process))
    assert reported(finding) == (kind, (3,), (0, 1, 2), 9)
    assert (target or "") in finding.title


def test_a_rank_that_compiles_computes_at_the_line_of_the_user():
    generated = "/tmp/torchinductor_me/cd/ccdhkc3lkfu4vtvhteqmfdxbwj54upttc6vijxk4z6yrvvnuebxm.py"
    waits = (
        Frame(generated, 507, "<module>"),
        Frame(f"{TORCH}/_inductor/async_compile.py", 800, "wait"),
        Frame(f"{STDLIB}/concurrent/futures/_base.py", 451, "result"),
    )
    compiling = running_rank(3, *frames_at(9, *waits), process=LOCKED)
    finding = only(*THREE_WAIT, compiling)
    assert reported(finding) == ("missing-from-collective", (3,), (0, 1, 2), 9)
    assert "Rank 3 compiles for torch.compile at cell 7, line 9" in finding.title


def test_torch_waiting_for_threads_of_its_own_is_no_lock_of_the_users():
    backward = Frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward")
    busy = running_rank(3, *frames_at(9, backward), process=LOCKED)
    finding = only(*THREE_WAIT, busy)
    assert reported(finding) == ("missing-from-collective", (3,), (0, 1, 2), 9)
    assert "Rank 3 waits in torch at cell 7, line 9" in finding.title


def test_a_rank_that_computes_is_missing_and_one_look_is_not_sure_of_that():
    finding = only(*THREE_WAIT, computing(3))
    assert reported(finding) == ("missing-from-collective", (3,), (0, 1, 2), 9)
    assert not finding.sure
    asleep = running_rank(3, *frames_at(9), process=ProcessStatus(state="S", syscall="clock_nanosleep"))
    finding = only(*THREE_WAIT, asleep, earlier=[asleep])
    assert reported(finding) == ("missing-from-collective", (3,), (0, 1, 2), 9)
    assert finding.sure


def test_a_loop_that_two_looks_find_in_the_same_function_is_one():
    before = [*THREE_WAIT, computing(3, line=9)]
    finding = only(*THREE_WAIT, computing(3, line=10), earlier=before)
    assert reported(finding) == ("python-loop", (3,), (0, 1, 2), 10)


def test_a_rank_whose_collectives_advance_is_a_straggler():
    behind = computing(3, collectives=(op(4, ended_s_ago=1.0),), num_collectives=4)
    before = [computing(3, collectives=(op(3, ended_s_ago=1.0),), num_collectives=3)]
    finding = only(waiting(0, op(9)), waiting(1, op(9)), waiting(2, op(9)), behind, earlier=before)
    assert reported(finding) == ("straggler", (3,), (0, 1, 2), 9)


def test_asking_for_input_is_seen_without_any_stack():
    finding = only(*THREE_WAIT, running_rank(3, awaiting_input=True, cell_line=4))
    assert reported(finding) == ("waits-for-input", (3,), (0, 1, 2), 4)


def test_a_line_outside_the_cell_is_named_by_its_file():
    stack = frames_at(5, Frame("/home/me/project/data/load.py", 88, "fetch"))
    finding = only(*THREE_WAIT, running_rank(3, *stack, process=LOCKED))
    assert (finding.file, finding.line) == ("/home/me/project/data/load.py", 88)
    assert "at data/load.py, line 88 in fetch" in finding.title


def test_ranks_that_stand_at_one_line_are_one_finding_and_named_by_their_axis():
    stuck = [running_rank(rank, *frames_at(9), process=LOCKED) for rank in (1, 3)]
    finding = only(waiting(0), waiting(2), *stuck, axes={"dp": 2, "tp": 2})
    assert reported(finding) == ("waits-for-lock", (1, 3), (0, 2), 9)
    assert finding.title.startswith("Ranks 1,3 wait for a lock at cell 7, line 9 and have not come to all_reduce")
    assert "ranks 1,3: all with tp=1" in finding.evidence


def test_who_waits_for_a_waiting_rank_is_not_told_apart():
    pair = op(1, group="pair", ranks=(0, 1), line=5)
    finding = only(
        waiting(0, pair),
        running_rank(1, *frames_at(9), process=LOCKED),
        waiting(2),
        waiting(3),
    )
    assert reported(finding) == ("waits-for-lock", (1,), (0, 2, 3), 9)
    assert set(finding.waits) == {((0,), (1,), "all_reduce #1 of ranks 0-1"), ((2, 3), (0, 1), "all_reduce #1")}


# ---- a rank that has ended


def test_a_rank_that_raised_is_blamed_with_its_error_and_line():
    finding = only(*THREE_WAIT, ended(3, "error", last_error="KeyError: 'x'", file=CELL, cell_line=6))
    assert reported(finding) == ("raised-before-collective", (3,), (0, 1, 2), 6)
    assert "ended cell 7 with KeyError: 'x' at cell 7, line 6 before coming to all_reduce #1" in finding.title


def test_a_rank_that_left_early_is_blamed_with_the_line_that_it_missed():
    made = ended(3, collectives=(op(1, ended_s_ago=13.0),))
    finding = only(*(waiting(rank, op(2)) for rank in range(3)), made)
    assert reported(finding) == ("left-early", (3,), (0, 1, 2), 3)
    assert "rank 3 made 1 collective of the group" in finding.evidence
    assert "ranks 0-2 made 2 collectives of the group" in finding.evidence


def test_one_rank_ahead_of_all_others_is_the_one_to_name():
    finding = only(waiting(0, op(ranks=range(512))), *(ended(rank) for rank in range(1, 512)))
    assert reported(finding) == ("alone-in-collective", (0,), (), 3)
    assert "the other 511 ranks do not come" in finding.title


def test_a_call_on_a_slice_of_the_mesh_that_uses_the_world_is_alone():
    idle = [running_rank(rank, call=None, cell=None, file=None) for rank in (1, 2, 3)]
    assert reported(only(waiting(0), *idle)) == ("alone-in-collective", (0,), (), 3)


# ---- members that disagree


def test_different_collectives_name_the_minority():
    finding = only(waiting(0), waiting(1), waiting(2, op(name="broadcast", line=5)))
    assert reported(finding) == ("different-collectives", (2,), (0, 1), 5)
    assert "Rank 2 called broadcast at cell 7, line 5 as number 1, where ranks 0-1 called all_reduce" in finding.title


def test_a_different_collective_in_a_group_of_some_ranks_names_the_group():
    one, other = (op(1, name, group="tp", ranks=(0, 1)) for name in ("all_reduce", "barrier"))
    finding = only(waiting(0, one), waiting(1, other), computing(2), computing(3))
    assert finding.kind == "different-collectives"
    assert "as number 1 of ranks 0-1" in finding.title


def test_shapes_that_differ():
    finding = only(waiting(0), waiting(1), waiting(2, op(shapes=((5, 2),))))
    assert reported(finding) == ("shape-mismatch", (2,), (0, 1), 3)
    assert "Rank 2 brought 5x2 to all_reduce #1 at cell 7, line 3, where ranks 0-1 brought 4" in finding.title


def test_dtypes_that_differ():
    assert reported(only(waiting(0), waiting(1), waiting(2, op(dtype="float64")))) == (
        "dtype-mismatch",
        (2,),
        (0, 1),
        3,
    )


def test_uneven_gathers_and_barriers_are_no_mismatch():
    for name in ("all_gather", "all_to_all_single"):
        assert only(*(waiting(rank, op(name=name, shapes=((rank,),))) for rank in range(4))).kind == "slow"
    assert only(*(waiting(rank, op(name="barrier", dtype=str(rank))) for rank in range(4))).kind == "slow"


def test_a_mismatch_explains_those_who_wait_for_its_members():
    pair = [waiting(0, op(group="pair", ranks=(0, 1))), waiting(1, op(1, "barrier", group="pair", ranks=(0, 1)))]
    finding = only(*pair, waiting(2), waiting(3))
    assert finding.kind == "different-collectives"
    assert set(finding.ranks) | set(finding.others) == {0, 1, 2, 3}


def test_counts_of_former_connections_are_not_compared():
    """After an interrupt one rank had made fewer calls; the groups were formed again, and all count from one."""
    old = [op(seq, ended_s_ago=60.0, began_s_ago=61.0) for seq in (1, 2, 3, 4, 5)]
    new = op(1, generation=2)
    looks = [
        running_rank(rank, *frames_at(3, *IN_COLLECTIVE), collectives=(*old[: 5 - rank], new)) for rank in range(3)
    ]
    stuck = running_rank(3, *frames_at(9), collectives=tuple(old), process=LOCKED)
    assert reported(only(*looks, stuck)) == ("waits-for-lock", (3,), (0, 1, 2), 9)


def test_groups_that_cross():
    pairs = [(0, (0, 1)), (1, (1, 2)), (2, (0, 2))]
    ops = {rank: op(1, group=str(ranks), ranks=ranks, line=3 + rank) for rank, ranks in pairs}
    finding = only(*(waiting(rank, ops[rank]) for rank, _ in pairs), waiting(3))
    assert reported(finding) == ("crossed-groups", (0, 1, 2), (3,), 3)


def test_two_groups_in_a_different_order_name_the_odd_one():
    first, second = op(1, group="a", ranks=(0, 1, 2)), op(1, group="b", ranks=(0, 1, 2), line=5)
    finding = only(waiting(0, first), waiting(1, first), waiting(2, second))
    assert reported(finding) == ("crossed-groups", (2,), (0, 1), 5)


def test_a_group_made_by_some():
    making = frames_at(6, Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "new_group"))
    finding = only(running_rank(0, *making), waiting(1), waiting(2))
    assert reported(finding) == ("group-made-by-some", (0,), (1, 2), 6)
    finding = only(running_rank(0, *making), ended(1), ended(2))
    assert reported(finding) == ("group-made-by-some", (0,), (), 6)
    assert "which takes all members, and ranks 1-2 have ended" in finding.title


def test_of_a_group_that_waits_for_its_members_to_connect_only_these_are_named():
    making = frames_at(6, Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "new_group"))
    finding = only(running_rank(0, *making, forming=(0, 1)), ended(1), ended(2), ended(3))
    assert finding.title.startswith("Rank 0 makes a process group of ranks 0-1")
    assert "and rank 1 has ended" in finding.title


def test_ranks_that_others_wait_for_while_they_connect_a_group_that_all_its_members_make():
    making = frames_at(6, Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "new_group"))
    pair = [running_rank(rank, *making, forming=(0, 1)) for rank in (0, 1)]
    finding = only(*pair, waiting(2), waiting(3))
    assert reported(finding) == ("missing-from-collective", (0, 1), (2, 3), 6)
    assert "Ranks 0-1" in finding.title


# ---- sends and receives


def send(to, line=3, **more):
    return op(1, "send", line, peer=to, **more)


def recv(source, line=4, **more):
    return op(1, "recv", line, peer=source, **more)


def test_two_that_both_send_first():
    finding = only(waiting(0, send(1)), waiting(1, send(0)), waiting(2))
    assert reported(finding) == ("send-deadlock", (0, 1), (2,), 3)
    assert only(waiting(0, recv(1)), waiting(1, recv(2)), waiting(2, recv(0))).kind == "receive-deadlock"


def test_a_send_whose_peer_has_ended_or_waits_in_a_collective():
    finding = only(waiting(0, send(1)), ended(1), ended(2))
    assert reported(finding) == ("send-without-receive", (0,), (), 3)
    assert "but rank 1 has ended cell 7 without a matching recv" in finding.title
    finding = only(waiting(0, recv(1)), waiting(1), waiting(2))
    assert reported(finding) == ("receive-without-send", (0,), (1, 2), 4)


def test_a_receive_from_the_wrong_rank():
    finding = only(waiting(0, send(1)), waiting(1, recv(2)), waiting(2))
    assert reported(finding) == ("wrong-peer", (1,), (0, 2), 4)
    finding = only(waiting(0, send(1)), ended(1), waiting(2, recv(0)))
    assert reported(finding) == ("wrong-peer", (0,), (2,), 3)


def test_a_pipeline_waits_for_its_slow_stage_and_not_for_a_wrong_one():
    finding = only(waiting(0, send(1)), waiting(1, recv(2)), computing(2))
    assert reported(finding) == ("missing-from-collective", (2,), (0, 1), 9)


def test_of_two_transfers_that_are_waited_for_together_the_one_without_a_partner_counts():
    both = running_rank(0, *frames_at(3, *IN_COLLECTIVE), collectives=(send(1), recv(2, line=3)))
    finding = only(both, waiting(1, recv(0)), ended(2))
    assert reported(finding) == ("receive-without-send", (0,), (), 3)
    posted = computing(2, collectives=(op(1, "send", 8, peer=0),))  # goes on by itself, whatever rank 2 does now
    assert only(both, waiting(1, recv(0)), posted).kind == "slow"


def test_a_transfer_under_way_is_nobodys_fault():
    assert only(waiting(0, send(1)), waiting(1, recv(0))).kind == "slow"
    assert only(waiting(0, send(1)), waiting(1, op(1, "recv", peer=None))).kind == "slow"


# ---- ranks that cannot run


def test_a_stopped_rank_is_blamed_with_its_pid():
    finding = only(*THREE_WAIT, running_rank(3, *frames_at(9), source="outside", process=ProcessStatus(state="T")))
    assert reported(finding) == ("stopped", (3,), (0, 1, 2), 9)
    assert "kill -CONT 1003" in finding.next_step


def test_a_rank_stopped_within_a_collective_is_not_missed_by_the_others_who_are_all_in_it():
    stopped = waiting(3, process=ProcessStatus(state="T"), source="outside")
    assert only(*THREE_WAIT, stopped).kind == "stopped"


def test_a_dead_rank():
    finding = only(ended(0, "lost"), ended(1, "lost"), dead(2))
    assert reported(finding) == ("killed", (2,), (), None)
    assert "Rank 2 was killed by SIGKILL" in finding.title
    assert "it said last: last words" in finding.evidence
    assert only(dead(2, process=ProcessStatus(oom_killed=True))).kind == "out-of-memory"


def test_a_rank_that_gloo_ended_for_sizes_that_differ():
    died = dead(2)
    died = structs.replace(
        died, exited=structs.replace(died.exited, last_lines=("[enforce] op.preamble.length <= op.nbytes",))
    )
    failed = [waiting(0, op(ended_s_ago=0.1)), waiting(1, op(ended_s_ago=0.1, dtype="float64"))]
    finding = only(*(structs.replace(each, call=None, last_status="lost") for each in failed), died)
    assert reported(finding) == ("shape-mismatch", (2,), (), 3)
    assert "rank 1 brought 4 float64 to all_reduce #1 at cell 7, line 3" in finding.evidence


def test_a_silent_rank_says_why_nothing_is_known():
    silent = running_rank(3, source="none", beat_age_s=40.0, problem="py-spy is not allowed to read process 1003")
    finding = only(*THREE_WAIT, silent)
    assert reported(finding) == ("rank-silent", (3,), (0, 1, 2), None)
    assert any("py-spy is not allowed" in line for line in finding.evidence)


def test_a_silent_host():
    away = [running_rank(rank, host="two", source="none", beat_age_s=40.0) for rank in (2, 3)]
    finding = only(waiting(0), waiting(1), *away, silent_hosts=("two",))
    assert reported(finding) == ("host-silent", (2, 3), (0, 1), None)
    assert explain((), silent_hosts=("two",))[0].title == "The host two does not answer"


def test_the_interpreter_lock_kept_by_the_main_thread_and_by_another():
    kept = running_rank(
        3, source="outside", stacks=(main_thread(*frames_at(9), has_gil=True),), process=ProcessStatus(state="R")
    )
    assert reported(only(*THREE_WAIT, kept)) == ("gil-kept", (3,), (0, 1, 2), 9)
    other = thread("Thread-1", *frames_at(12, function="work"), has_gil=True)
    kept = running_rank(
        3,
        source="outside",
        stacks=(main_thread(*frames_at(9)), other),
        process=LOCKED,
    )
    finding = only(*THREE_WAIT, kept)
    assert reported(finding) == ("gil-kept", (3,), (0, 1, 2), 12)
    assert "in its thread Thread-1" in finding.title


def test_a_rank_that_gets_no_processor_is_not_accused():
    late = {"source": "outside", "starved_s": 0.5, "looked_s": 0.6}
    holder = running_rank(3, stacks=(main_thread(*frames_at(9), has_gil=True, state="R"),), **late)
    finding = only(*THREE_WAIT, holder)
    assert reported(finding) == ("starved", (3,), (0, 1, 2), 9)
    assert any("waited for a processor for 0.5 s of the 0.6 s of a look" in line for line in finding.evidence)
    # ... nor where it waits for the interpreter lock of a thread that gets none, or where nothing of it can be read.
    waits_for_gil = main_thread(*frames_at(9), state="S", syscall="futex")
    assert only(waiting(0), running_rank(1, stacks=(waits_for_gil,), **late)).kind == "starved"
    assert only(waiting(0), running_rank(1, **{**late, "source": "none", "beat_age_s": 40.0})).kind == "starved"


def test_what_a_rank_certainly_waits_for_counts_whichever_thread_gets_no_processor():
    late = {"source": "outside", "starved_s": 0.5, "looked_s": 0.6}
    finding = only(waiting(0, **late), running_rank(1, *frames_at(9), process=ProcessStatus(state="R")))
    assert (finding.ranks, finding.others) == ((1,), (0,))
    shared = running_rank(1, stacks=(main_thread(*frames_at(9), has_gil=True),), **{**late, "starved_s": 0.3})
    assert only(waiting(0), shared).kind == "gil-kept"  # it only shares a processor


def test_disk_sleep():
    finding = only(
        waiting(0), running_rank(1, *frames_at(9), process=ProcessStatus(state="D", syscall_target="/nfs/data"))
    )
    assert reported(finding) == ("disk-sleep", (1,), (0,), 9)
    assert "/nfs/data" in finding.title


def test_two_threads_that_have_each_others_lock():
    other = thread("worker", *frames_at(20, function="second"), state="S", syscall="futex")
    stuck = running_rank(3, stacks=(main_thread(*frames_at(9), state="S", syscall="futex"), other))
    finding = only(*THREE_WAIT, stuck)
    assert reported(finding) == ("thread-deadlock", (3,), (0, 1, 2), 9)
    assert any("worker" in line and "line 20" in line for line in finding.evidence)


def test_a_thread_that_waits_in_c_for_no_lock_makes_no_deadlock_of_a_lock_that_is_named():
    feeder = thread("feeder", *frames_at(20, function="feed"), state="S", syscall="futex")
    stuck = structs.replace(main_thread(*frames_at(9), state="S", syscall="futex"), waits_on="lock `turn`")
    finding = only(*THREE_WAIT, running_rank(3, stacks=(stuck, feeder)))
    assert reported(finding) == ("waits-for-lock", (3,), (0, 1, 2), 9)
    assert "waits for lock `turn`" in finding.title
    (line,) = (line for line in finding.evidence if "feeder" in line)
    assert "for a lock" not in line


def test_a_dead_worker_is_told():
    below = Frame(f"{TORCH}/utils/data/dataloader.py", 1410, "_get_data")
    process = ProcessStatus(state="S", children=((55, "Z", "pt_data_worker"),))
    finding = only(waiting(0), running_rank(1, *frames_at(9, below), process=process))
    assert "waits for a DataLoader worker, which has died" in finding.title
    assert "child process 55 has died: pt_data_worker" in finding.evidence


# ---- nothing is wrong


def test_idle():
    assert reported(only(*(running_rank(rank, call=None, cell=None, file=None) for rank in range(4)))) == (
        "idle",
        (0, 1, 2, 3),
        (),
        None,
    )
    assert only(ended(0), ended(1)).evidence == ("ranks 0-1 have ended cell 7",)
    assert only().title == "No rank is known"


def test_just_slow():
    before = [computing(rank, num_collectives=5) for rank in range(4)]
    finding = only(*(computing(rank, num_collectives=7) for rank in range(4)), earlier=before)
    assert reported(finding) == ("slow", (0, 1, 2, 3), (), 9)
    assert "8 collectives were called between the two looks" in finding.evidence
    finding = only(*(waiting(rank) for rank in range(4)))
    assert finding.kind == "slow"
    assert "all members are in all_reduce #1 (4 float32), since 12 s" in finding.evidence


def test_a_mesh_that_runs_well_is_not_accused_of_what_one_look_at_it_seems_to_show():
    """Ranks are not looked at in the same moment: some are one collective ahead, some still leave the last one."""
    ahead = [waiting(rank, op(3, began_s_ago=0.01), num_collectives=3) for rank in (1, 2)]
    assert only(waiting(0, op(2, began_s_ago=0.02), num_collectives=2), *ahead).kind == "slow"
    looks = [waiting(0, op(9, began_s_ago=0.01), num_collectives=9), computing(1, num_collectives=8)]
    assert not only(*looks).sure
    before = [computing(0, num_collectives=5), waiting(1, op(5), num_collectives=5)]
    assert only(*looks, earlier=before).kind == "slow"
    crossing = [
        waiting(0, recv(1, began_s_ago=0.01), num_collectives=9),
        waiting(1, recv(0, began_s_ago=0.01), num_collectives=9),
    ]
    assert not only(*crossing).sure
    assert only(*crossing, earlier=[computing(rank, num_collectives=5) for rank in (0, 1)]).kind == "slow"
    short = running_rank(1, *frames_at(9), process=LOCKED, num_collectives=8)
    assert not only(waiting(0, op(9, began_s_ago=0.01), num_collectives=9), short).sure
    assert only(waiting(0, op(9, began_s_ago=0.01), num_collectives=9), short, earlier=before).kind == "slow"


def test_the_last_one_that_runs_is_named():
    finding = only(ended(0), ended(1), computing(2))
    assert reported(finding) == ("slow", (2,), (), 9)
    assert "which ranks 0-1 have ended" in finding.title


def test_all_in_one_loop():
    before = [computing(rank) for rank in range(4)]
    finding = only(*(computing(rank, line=10) for rank in range(4)), earlier=before)
    assert reported(finding) == ("python-loop", (0, 1, 2, 3), (), 10)
    assert not finding.sure
    # Long pure computations are as likely as a loop without end.
    assert "Ranks 0-3 compute in the same code" in finding.title
    assert "a rank that computes does not hang" in finding.next_step
    fresh = [computing(rank, collectives=(op(1, ended_s_ago=0.4),)) for rank in range(4)]
    assert only(*fresh, earlier=fresh).kind == "slow"
    in_torch = [running_rank(rank, *frames_at(9, Frame(f"{TORCH}/nn/functional.py", 9, "linear"))) for rank in range(4)]
    assert only(*in_torch, earlier=in_torch).kind == "slow"


def test_who_comes_last_to_nearly_every_collective():
    """Whoever comes last spends the least time in it: no clocks are compared."""

    def rings(short):
        return tuple(
            op(seq, began_s_ago=20.0 - seq, ended_s_ago=20.0 - seq - (0.01 if short else 0.8)) for seq in range(1, 9)
        )

    looks = [computing(rank, collectives=rings(rank == 2), num_collectives=8) for rank in range(4)]
    finding = only(*looks)
    assert reported(finding) == ("straggler", (2,), (0, 1, 3), 9)
    assert "comes last to nearly every all_reduce" in finding.title


# ---- whatever comes


def test_one_cause_first_then_the_others():
    stuck = running_rank(3, *frames_at(9), process=LOCKED)
    found = why(waiting(0), waiting(1), ended(2, "error", last_error="ValueError: no"), stuck)
    assert [finding.kind for finding in found] == ["raised-before-collective", "waits-for-lock"]
    text = as_text(found)
    assert text.startswith("1. Rank 2 ended cell 7 with ValueError: no")
    assert "\n2. Rank 3 waits for a lock" in text


def test_text_of_others_cannot_act_on_a_terminal():
    evil = "Error: \x1b[2J\u202e" + "x" * 5000
    text = as_text(why(waiting(0), ended(1, "error", last_error=evil, last_cell="\x1b]0;cell\x07")))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text) < 3000


def test_colours_are_only_there_when_asked_for():
    found = why(waiting(0), computing(1))
    assert "\x1b" not in as_text(found)
    assert "\x1b[1;31m" in as_text(found, color=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 1024])
def test_nothing_but_ranks_is_enough(num_ranks):
    from meshbook.wire.messages import RankSnapshot

    assert explain([RankSnapshot(rank) for rank in range(num_ranks)])[0].kind == "idle"
    running = [RankSnapshot(rank, call="c", cell="cell 1") for rank in range(num_ranks)]
    assert explain(running)[0].kind == "slow"
    torn = [waiting(rank, stacks=(), file=None) for rank in range(num_ranks)]
    assert explain(torn)


def test_what_a_thousand_ranks_wait_for():
    ranks = range(1024)
    everyone = [waiting(rank, op(41, ranks=ranks)) for rank in ranks if rank != 700]
    stuck = running_rank(700, *frames_at(9), collectives=(op(40, ended_s_ago=3.0),), process=LOCKED)
    finding = only(*everyone, stuck)
    assert reported(finding)[:2] == ("waits-for-lock", (700,))
    assert "where ranks 0-699,701-1023 wait" in finding.title
    assert len(as_text([finding])) < 1000


def test_moving_is_unknown_without_something_to_compare():
    assert has_moved(None, computing(0)) is None
    assert has_moved(running_rank(0), running_rank(0)) is None
    assert has_moved(computing(0), computing(0)) is False
    assert has_moved(computing(0), computing(0, health=Health(num_steps=4))) is True


# Anything that a rank may be found doing, whatever the others do.
ANY_OP = st.builds(
    op,
    st.integers(1, 3),
    st.sampled_from(["all_reduce", "broadcast", "barrier", "send", "recv"]),
    st.integers(1, 9),
    st.sampled_from(["0", "1"]),
    st.sampled_from([(0, 1, 2, 3), (0, 1), (1, 2, 3), ()]),
    peer=st.sampled_from([None, 0, 1, 2, 3, 99]),
    shapes=st.sampled_from([(), ((4,),), ((5,), ())]),
    began_s_ago=st.sampled_from([0.0, 0.1, 60.0]),
    ended_s_ago=st.sampled_from([None, None, 0.0]),
    generation=st.integers(0, 1),
)
ANY_STACK = st.sampled_from(
    [
        (),
        frames_at(3, *IN_COLLECTIVE),
        frames_at(9),
        IN_COLLECTIVE,
        frames_at(6, Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "new_group")),
        frames_at(9, Frame(f"{STDLIB}/queue.py", 171, "get")),
    ]
)


@st.composite
def any_look(draw, rank):
    process = ProcessStatus(
        draw(st.sampled_from(["", "R", "S", "D", "T", "Z"])), draw(st.sampled_from([None, "futex", "read", "poll"]))
    )
    more = {
        "collectives": tuple(draw(st.lists(ANY_OP, max_size=4))),
        "num_collectives": draw(st.integers(0, 3)),
        "process": draw(st.sampled_from([None, process])),
        "source": draw(st.sampled_from(["inside", "outside", "none"])),
        "beat_age_s": draw(st.sampled_from([None, 0.1, 60.0])),
    }
    match draw(st.integers(0, 3)):
        case 0:
            return ended(rank, draw(st.sampled_from(["ok", "error", "interrupted", "lost"])), **more)
        case 1:
            return dead(rank, collectives=more["collectives"])
        case _:
            return running_rank(rank, *draw(ANY_STACK), **more)


@st.composite
def any_mesh(draw):
    return [draw(any_look(rank)) for rank in range(draw(st.integers(1, 4)))]


@settings(max_examples=150)
@given(any_mesh(), st.one_of(st.just([]), any_mesh()))
def test_whatever_was_seen_is_explained(now, before):
    found = explain(now, earlier=before, axes={"dp": 2, "tp": 2}, silent_hosts=("one",) if len(before) == 1 else ())
    assert found
    for finding in found:
        assert finding.kind in KINDS
        assert list(finding.ranks) == sorted(set(finding.ranks))
        assert not set(finding.ranks) & set(finding.others)
        assert {*finding.ranks, *finding.others} <= {each.rank for each in now}
    told_of = [rank for finding in found for rank in finding.ranks]
    assert len(told_of) == len(set(told_of)), as_text(found)  # nobody is blamed for two things
    assert as_text(found)
    assert stacks_as_text(merge(now, main_only=False), moved=moved_by_rank(before, now))


def test_an_actor_that_is_in_an_endpoint_while_no_cell_runs_is_told_with_its_line():
    def idle(rank, *frames):
        actor = thread(
            "actor worker", Frame("/env/site-packages/meshbook/actors/runtime/cabin.py", 60, "_live"), *frames
        )
        return running_rank(rank, call=None, cell=None, running_s=None, stacks=(actor,))

    step, at_line = "/home/u/jobs/train.py", "jobs/train.py, line"
    waits = (Frame(step, 31, "work"), Frame(f"{STDLIB}/threading.py", 600, "wait"))
    finding = only(idle(0, *waits), idle(1, *waits), idle(2))
    assert finding.title == f"Ranks 0-1 wait for an event or condition at {at_line} 31 in work"
    assert "ranks 0-1: actor worker in its endpoint work" in finding.evidence
    assert finding.next_step.endswith("or interrupt(actors), interrupts the endpoint; the actor lives.")

    reduces = (Frame(step, 12, "reduce"), Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce"))
    waiting = [structs.replace(idle(rank, *reduces), collectives=(op(5, ranks=range(3)),)) for rank in (0, 2)]
    asleep = structs.replace(idle(1, Frame(step, 10, "reduce")), collectives=(op(4, ranks=range(3), ended_s_ago=12.0),))
    finding = only(waiting[0], asleep, waiting[1], earlier=[waiting[0], asleep, waiting[1]])
    assert (finding.kind, finding.ranks, finding.others) == ("missing-from-collective", (1,), (0, 2))
    assert f"at {at_line} 10 in reduce and has not come to all_reduce #5" in finding.title
    assert "Interrupt the cell" not in finding.next_step  # there is none
    assert f"[0,2] > {at_line} 12 in reduce" in stacks_as_text(merge([waiting[0], asleep, waiting[1]]))


def test_ranks_that_ended_something_else_are_not_said_to_have_ended_the_cell():
    others = structs.replace(ended(1), last_cell="tensor operations")
    assert "ended" not in only(computing(0), others).title


def test_operations_on_remote_tensors_wait_in_their_collective_and_not_for_a_lock():
    torchs = Frame(f"{TORCH}/distributed/tensor/_api.py", 600, "full_tensor")
    batch = running_rank(0, torchs, file=None, collectives=(op(1),), process=LOCKED)
    assert "lock" not in why(batch, running_rank(1, *frames_at(2)))[0].title


def test_untrusted_text_is_one_line_without_colours_and_control_characters() -> None:
    assert sanitize_line("\x1b[36mCell\x1b[39m In[4],\n line 1\x07") == "Cell In[4],  line 1\N{REPLACEMENT CHARACTER}"
