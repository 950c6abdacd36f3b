"""When work that was enqueued on a CUDA stream is finished, also while a graph is captured."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from meshbook.rank.process_groups.device_queries import DeviceQueries
from meshbook.rank.process_groups.ring import Collective, CollectiveRing

_prepared_rings: weakref.WeakSet[CollectiveRing] = weakref.WeakSet()

# The streams of torch by what identifies them: to make the object of the current one takes microseconds.
_streams: dict[tuple[int, int, int], Any] = {}

# cudaStreamCaptureModeRelaxed: this thread's calls do not invalidate the graph that another thread captures.
_RELAXED = 2


class SlotEvent:
    """The event of one slot of the ring, which the collectives that come to have the slot record one after the other.

    So a loop of any length makes as many events as the ring has slots, and destroys none: both may wait for the device.
    """

    __slots__ = ("event", "seq")

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.seq = 0

    def is_complete(self, seq: int) -> bool:
        """Whether collective `seq` is over: its event was reached, or belongs to a later one by now. Any thread."""
        return self.seq != seq or self.event.query()


def finish_on_stream(ring: CollectiveRing, record: Collective) -> None:
    """Mark the collective as finished once the device has completed all work now on the current stream."""
    seq = record.seq
    if torch.cuda.is_current_stream_capturing():
        ring.finish(record)  # a graph under capture runs nothing, and its events cannot be queried
        return
    slot = ring.slot_events.get(seq % ring.size)
    if slot is None:
        slot = ring.slot_events[seq % ring.size] = SlotEvent()
    if seq < slot.seq:
        ring.finish(record)  # it was waited for so late that the ring has forgotten it
        return
    slot.seq = seq  # first: a reader of the earlier collective must not ask for the end of this one
    slot.event.record(_current_stream())
    ring.set_completion_check(record, functools.partial(slot.is_complete, seq), on_device=True)


def _current_stream() -> Any:
    """Return `torch.cuda.current_stream()`."""
    identity = torch._C._cuda_getCurrentStream(torch.cuda.current_device())  # as that function finds it
    stream = _streams.get(identity)
    if stream is None:
        stream = _streams[identity] = torch.cuda.current_stream()
    return stream


def prepare_queries(ring: CollectiveRing) -> None:
    """Have the ring query this thread's device without freezing its readers, and not while a graph is captured."""
    if ring not in _prepared_rings:
        _prepared_rings.add(ring)
        count_captures(ring)
        ring.run_device_queries = _make_queries(torch.cuda.current_device()).run


def _make_queries(device: int) -> DeviceQueries:
    """Return the thread that queries this device."""
    probe: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    probe.record()
    driver = _load_driver()

    def prepare() -> None:
        torch.cuda.set_device(device)  # else the driver would create a context on the first GPU
        if driver is not None:
            driver.exchange_capture_mode(ctypes.byref(ctypes.c_int(_RELAXED)))

    def wait_for_driver() -> None:
        if driver is not None:
            driver.query_event(probe.cuda_event)  # ctypes releases the GIL; the answer does not matter

    return DeviceQueries(prepare, wait_for_driver)


class _Driver:
    """The two functions of the driver's library that torch has no Python for, or only with the GIL."""

    def __init__(self, library: Any, prefix: str) -> None:
        self.query_event: Callable[[int], int] = getattr(library, f"{prefix}EventQuery")
        self.query_event.argtypes = [ctypes.c_void_p]
        self.exchange_capture_mode: Callable[[Any], int] = getattr(library, f"{prefix}ThreadExchangeStreamCaptureMode")


def _load_driver() -> _Driver | None:
    """Return the functions of the driver; None if it has none, so that queries are only run on their own thread."""
    name, prefix = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
    with contextlib.suppress(OSError, AttributeError):
        return _Driver(ctypes.CDLL(name), prefix)
    return None


def count_captures(ring: CollectiveRing, graph_class: Any = None) -> None:
    """Have `ring.num_captures` count the CUDA graph captures in progress, from now on.

    Args:
        graph_class: the class whose `capture_begin` and `capture_end` are wrapped; None for torch's.
    """
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
