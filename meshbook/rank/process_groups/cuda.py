"""When work that was enqueued on a CUDA stream is finished, also while a graph is captured."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from meshbook.rank.process_groups.ring import Collective, CollectiveRing

_rings_counting_captures: weakref.WeakSet[CollectiveRing] = weakref.WeakSet()


def finish_on_stream(ring: CollectiveRing, record: Collective) -> None:
    """Mark the collective as finished once the device has completed all work now on the current stream."""
    if torch.cuda.is_current_stream_capturing():
        ring.finish(record)  # a graph under capture runs nothing, and its events cannot be queried
    else:
        count_captures(ring)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        ring.set_completion_check(record, event.query, on_device=True)


def count_captures(ring: CollectiveRing, graph_class: Any = None) -> None:
    """Have `ring.num_captures` count the CUDA graph captures in progress, from now on.

    Args:
        graph_class: the class whose `capture_begin` and `capture_end` are wrapped; None for torch's.
    """
    if ring in _rings_counting_captures:
        return
    _rings_counting_captures.add(ring)
    graph_class = torch.cuda.CUDAGraph if graph_class is None else graph_class
    begin, end = graph_class.capture_begin, graph_class.capture_end

    @functools.wraps(begin)
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        ring.num_captures += 1
        try:
            return begin(*args, **kwargs)
        except BaseException:
            ring.num_captures -= 1
            raise

    @functools.wraps(end)
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return end(*args, **kwargs)
        finally:
            ring.num_captures = max(0, ring.num_captures - 1)

    graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end
