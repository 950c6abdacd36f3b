"""Which errors end a process's use of its GPU, and what is said of its ranks."""

from __future__ import annotations

import pytest

from meshbook.errors import Failure
from meshbook.fold.device_errors import dead_context_note
from meshbook.fold.rendering import render_errors

ASSERT = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/...\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


def test_a_device_assert_is_told_with_the_ranks_and_the_way_out() -> None:
    note = dead_context_note((2,), ASSERT)
    assert note is not None
    assert note.startswith("rank 2's CUDA context is dead (device-side assert triggered): every further use of the GPU")
    assert "%mesh heal 2 puts a new process in its place" in note
    several = dead_context_note((0, 1, 3), "HIP error: an illegal memory access was encountered")
    assert several is not None
    assert several.startswith("ranks 0-1,3' HIP contexts are dead (an illegal memory access was encountered): ")
    assert "%mesh heal 0-1,3 puts new processes in their place" in several


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total capacity of 79.18 GiB",
        "CUDA error: invalid device ordinal",
        "index 9 is out of bounds for dimension 0 with size 4",
        "",
    ],
)
def test_errors_after_which_the_gpu_can_still_be_used_are_not_taken_for_one(message: str) -> None:
    assert dead_context_note((0,), message) is None


def test_the_sentence_is_under_the_traceback_of_those_ranks() -> None:
    failures = (
        Failure((1,), "AcceleratorError", ASSERT, ("Traceback of rank 1",)),
        Failure((0,), "KeyError", "'x'", ("Traceback of rank 0",)),
    )
    lines = render_errors(failures, colour=False)
    place = lines.index("Traceback of rank 1")
    assert lines[place + 1].startswith("rank 1's CUDA context is dead")
    assert not any("rank 0's" in line for line in lines)
