"""Where the user's part of a stack begins, and what py-spy says, without processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import meshbook
from meshbook.host import stacks
from meshbook.wire.messages import Frame, ThreadStack

OWN = str(Path(meshbook.__file__).resolve().parent)
CELL = "<ipython-input-3-abc>"


def stack(*frames: tuple[str, str], main: bool = True, num_cut: int = 0, cut_at: int = 0) -> ThreadStack:
    reported = tuple(Frame(file, line, function) for line, (file, function) in enumerate(frames, 1))
    return ThreadStack("MainThread", reported, is_main=main, num_truncated=num_cut, truncated_at=cut_at)


PLUMBING = (("<frozen runpy>", "_run"), (f"{OWN}/rank/main.py", "run_rank"), (f"{OWN}/rank/cells/shell.py", "run"))


def functions(reported: ThreadStack) -> list[str]:
    return [frame.function for frame in reported.frames]


def test_the_cells_frame_is_outermost() -> None:
    whole = stack(*PLUMBING, ("/x/IPython/core/magic.py", "time"), (CELL, "<module>"), ("/lib/torch/a.py", "b"))
    assert functions(stacks.trim_to_user_frames(whole, CELL)) == ["<module>", "b"]


def test_without_a_cell_it_begins_below_meshbooks_own() -> None:
    whole = stack(
        *PLUMBING, ("/home/me/train.py", "step"), (f"{OWN}/rank/process_groups/watched_group.py", "collective")
    )
    assert functions(stacks.trim_to_user_frames(whole, None)) == ["step", "collective"]
    assert functions(stacks.trim_to_user_frames(whole, "another file")) == ["step", "collective"]


def test_the_event_loop_of_an_awaiting_cell_is_plumbing_and_one_of_the_users_is_not() -> None:
    whole = stack(*PLUMBING, (asyncio.base_events.__file__, "run_forever"), (CELL, "<module>"))
    assert functions(stacks.trim_to_user_frames(whole, None)) == ["<module>"]
    own_loop = stack(*PLUMBING, (CELL, "<module>"), (asyncio.base_events.__file__, "run_forever"))
    assert functions(stacks.trim_to_user_frames(own_loop, None)) == ["<module>", "run_forever"]


def test_other_threads_are_left_as_they_are() -> None:
    whole = stack(*PLUMBING, ("/home/me/train.py", "load"), main=False)
    assert stacks.trim_to_user_frames(whole, None) == whole


def test_the_gap_of_a_deep_stack_stays_where_it_is() -> None:
    whole = stack(*PLUMBING, (CELL, "fall"), (CELL, "fall"), num_cut=900, cut_at=4)
    reported = stacks.trim_to_user_frames(whole, CELL)
    assert (functions(reported), reported.num_truncated, reported.truncated_at) == (["fall", "fall"], 900, 1)


def spied(frames: int = 1, **thread: object) -> bytes:
    innermost_first = [
        {"name": f"Model.f{number}", "filename": "/m.py", "line": number} for number in reversed(range(frames))
    ]
    reported = {"pid": 7, "os_thread_id": 7, "thread_name": "MainThread", "active": True, "owns_gil": True}
    return json.dumps([{**reported, "frames": innermost_first, **thread}]).encode()


def test_py_spys_stacks_are_turned_round_and_named_as_ranks_name_them() -> None:
    (reported,) = stacks.parse_py_spy(spied(3))
    assert functions(reported) == ["f0", "f1", "f2"]
    assert (reported.is_main, reported.has_gil, reported.is_active, reported.native_id) == (True, True, True, 7)


def test_py_spys_main_thread_comes_first_and_meshbooks_own_are_left_out() -> None:
    threads = [
        *json.loads(spied(os_thread_id=8, thread_name="loader")),
        *json.loads(spied(os_thread_id=9, thread_name="meshbook-service")),
        *json.loads(spied()),
    ]
    assert [reported.name for reported in stacks.parse_py_spy(json.dumps(threads).encode())] == ["MainThread", "loader"]


def test_a_deep_stack_of_py_spys_is_cut_in_the_middle() -> None:
    (reported,) = stacks.parse_py_spy(spied(1000))
    assert (len(reported.frames), reported.num_truncated, reported.truncated_at) == (200, 800, 100)
    assert (reported.frames[0].function, reported.frames[-1].function) == ("f0", "f999")


@pytest.mark.parametrize("output", [b"", b"{}x", b"3", b'[{"frames": 3}]', b'[{"frames": [{}]}]', b"\xff"])
def test_what_is_no_stack_is_a_value_error(output: bytes) -> None:
    with pytest.raises(ValueError, match="py-spy's output cannot be read"):
        stacks.parse_py_spy(output)
