"""Stacks of all ranks as one tree."""

from __future__ import annotations

import msgspec

from meshbook.diagnose.source_files import cell_label, is_user_file, short_path
from meshbook.diagnose.stack_tree import StackTree, as_text, merge, moved_by_rank
from meshbook.wire.messages import Frame, RankSnapshot
from tests.diagnose.factories import (
    CELL,
    IN_COLLECTIVE,
    STDLIB,
    TORCH,
    computing,
    dead,
    frames_at,
    main_thread,
    running_rank,
    thread,
    waiting,
)

SOURCE = {3: "    dist.all_reduce(x)", 9: "lock.acquire()", 12: "step()"}


def source_of(file, line):
    return SOURCE.get(line) if file == CELL else None


def four():
    step = Frame(CELL, 12, "<module>")
    waiters = [running_rank(rank, step, *frames_at(3, *IN_COLLECTIVE, function="step")) for rank in (0, 1, 3)]
    return [*waiters, running_rank(2, step, *frames_at(9, function="load"))]


def test_shared_frames_are_told_once_and_branches_name_their_ranks():
    assert as_text(merge(four()), source_of=source_of).splitlines() == [
        "[0-3] > cell 7, line 12: step()",
        "      ├─ [0-1,3] > cell 7, line 3 in step: dist.all_reduce(x)",
        "      │            … 3 frames of torch, meshbook: all_reduce",
        "      └─ [2] > cell 7, line 9 in load: lock.acquire()",
    ]


def test_library_frames_can_be_told_one_by_one():
    lines = as_text(merge(four()), fold_library=False).splitlines()
    assert "      │            torch/distributed/distributed_c10d.py, line 2900 in all_reduce" in lines


def test_who_moves_is_told_at_the_end_of_its_branch():
    before, after = (
        [computing(0), computing(1), running_rank(2)],
        [computing(0, line=10), computing(1), running_rank(2)],
    )
    moves = moved_by_rank(before, after)
    assert moves == {0: True, 1: False}
    lines = as_text(merge(after), moved=moves).splitlines()
    assert lines[:2] == ["[0] > cell 7, line 10  (moves)", "[1] > cell 7, line 9  (stands still)"]


def test_a_rank_that_stands_where_others_go_on_has_a_branch_too():
    lines = as_text(
        merge([running_rank(0, *frames_at(12)), running_rank(1, *frames_at(12), *frames_at(9, function="f"))])
    ).splitlines()
    assert lines[1:] == [
        "      ├─ [1] > cell 7, line 9 in f",
        "      └─ [0]   is at this line",
    ]


def test_user_code_called_back_from_a_library_is_shown():
    hook = [Frame(f"{TORCH}/nn/modules/module.py", 1, "_call_impl"), Frame(CELL, 40, "forward")]
    text = as_text(merge([running_rank(0, *frames_at(12, *hook))]))
    assert text.splitlines() == [
        "[0] > cell 7, line 12",
        "      … 1 frame of torch: _call_impl",
        "    > cell 7, line 40 in forward",
    ]


def test_why_there_is_no_stack_is_told_for_all_ranks_at_once():
    silent = [running_rank(rank, source="none", problem="py-spy may not read it") for rank in (1, 2)]
    text = as_text(merge([running_rank(0, *frames_at(3)), *silent, dead(3)]))
    assert "[1-2] no stack: py-spy may not read it" in text
    assert "[3] was killed by SIGKILL" in text
    assert as_text(merge([])) == "no stacks"


def test_other_threads_are_there_when_asked_for():
    stacks = (main_thread(*frames_at(3)), thread("loader", *frames_at(50, function="run")))
    snapshots = [running_rank(rank, stacks=stacks) for rank in (0, 1)]
    assert [each.name for each in merge(snapshots).threads] == [""]
    tree = merge(snapshots, main_only=False)
    assert [each.name for each in tree.threads] == ["", "loader"]
    assert "thread loader of ranks 0-1\n[0-1] > cell 7, line 50 in run" in as_text(tree)


def test_it_travels():
    tree = merge(four())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=StackTree) == tree


def test_a_very_deep_stack_is_drawn():
    frames = tuple(Frame(CELL, line, "f") for line in range(5000))
    assert len(as_text(merge([running_rank(0, *frames)])).splitlines()) == 5000


def test_text_of_others_is_text():
    evil = Frame("/home/\x1b[2J/x.py", 3, "f\n\u202e")
    text = as_text(merge([RankSnapshot(0, stacks=(main_thread(evil),))]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text.splitlines()) == 1


def test_many_different_places_are_counted_after_some():
    text = as_text(merge([running_rank(rank, *frames_at(rank)) for rank in range(1024)]))
    assert text.splitlines()[-1] == "[16-1023] at 1008 more places"


def test_a_rank_waiting_shows_in_color():
    assert "\x1b[36m[0]\x1b[0m" in as_text(merge([waiting(0)]), color=True)


def test_whose_code_a_file_is():
    users = [CELL, "<ipython-input-7-ab12>", "/home/me/train.py", "/work/project/lib/model.py", "/tmp/marimo_9/x.py"]
    assert all(map(is_user_file, users))
    others = [
        f"{TORCH}/nn/x.py",
        f"{STDLIB}/queue.py",
        "<frozen importlib._bootstrap>",
        merge.__code__.co_filename,
        "/usr/lib/python3/dist-packages/x.py",
    ]
    assert not any(map(is_user_file, others))
    assert cell_label("<ipython-input-7-ab12>") == "cell 7"
    assert short_path(f"{TORCH}/nn/x.py") == "torch/nn/x.py"
