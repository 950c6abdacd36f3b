"""What a rank measures of itself for each beat: CPU, the wait for the interpreter, GPU memory, collectives, scalars.

Everything here runs on the service thread once per second, reads what others keep anyway, and asks no driver that may
wait: a rank whose GPU hangs must go on beating.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from meshbook.clock import monotonic, process_time
from meshbook.rank.ring import Collective, Ring
from meshbook.rank.scalars import ScalarLog
from meshbook.wire.messages import CollectiveSeen, Frame, Gpu, Health, Measured

# Collectives that one beat tells of beside the open ones, the newest. Describing one takes about 10 us, so that this
# many cost less than a thousandth of the second.
_TOLD_COLLECTIVES = 64

# ... and of the open ones. More of them are only ever many sends or receives that wait for one peer.
_TOLD_OPEN = 128

# "0": a rank measures nothing and its ring keeps no lines and shapes. For benchmarks/probes.py, which tells the cost.
SWITCH = "MESHBOOK_PROBES"


def switched_on() -> bool:
    return os.environ.get(SWITCH) != "0"


class Probes:
    """What one rank measures. Every method is the service thread's.

    Attributes:
        health: what was measured last; None before the first beat.
    """

    def __init__(
        self,
        rank: int,
        ring: Ring,
        scalars: ScalarLog,
        *,
        clock: Callable[[], float] = monotonic,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self._rank, self._ring, self._scalars = rank, ring, scalars
        self._clock, self._cpu_clock = clock, cpu_clock
        self._at, self._cpu_s = clock(), cpu_clock()
        self._lag_s = 0.0
        self._told_seq = 0
        self._open: list[Collective] = []  # told before they had ended
        self._gpu = GpuProbe()
        self.health: Health | None = None

    def woke(self, late_s: float) -> None:
        """The service thread wanted to run this long before it did: whoever had the GIL did not let go of it."""
        if late_s > self._lag_s:
            self._lag_s = late_s

    def measure(self, device: str, moves: Callable[[], bool] = lambda: True) -> Measured:
        """All that there is to tell since the last time.

        Args:
            device: the rank's, "cpu" or "cuda:1".
            moves: whether the main thread is on its way, and so not stuck in the allocator (`GpuProbe`).
        """
        now, cpu_s = self._clock(), self._cpu_clock()
        passed = max(1e-9, now - self._at)
        last = self._ring.last
        self.health = Health(
            cpu_percent=round(100.0 * (cpu_s - self._cpu_s) / passed, 1),
            gil_lag_s=round(self._lag_s, 4),
            num_collectives=0 if last is None else last.seq,
            steps=self._scalars.num_steps,
            steps_per_s=self._scalars.steps_per_s(),
            gpu=self._gpu.measure(device, moves),
        )
        self._at, self._cpu_s, self._lag_s = now, cpu_s, 0.0
        scalars, num_dropped = self._scalars.drain()
        return Measured(
            rank=self._rank,
            health=self.health,
            scalars=scalars,
            num_dropped=num_dropped,
            collectives=self._news(now),
        )

    def _news(self, now: float) -> tuple[CollectiveSeen, ...]:
        """Collectives begun since the last time, and those that were open then."""
        fresh = self._ring.since(self._told_seq)
        if fresh:
            self._told_seq = fresh[-1].seq
        told = [*self._open, *fresh[-_TOLD_COLLECTIVES:]]
        self._open = [*self._open, *fresh]
        self._ring.settle(self._open)
        self._open = [collective for collective in self._open if collective.t_end is None][-_TOLD_OPEN:]
        early = [collective for collective in self._open if collective not in told]  # open, and not of the newest
        return tuple(seen(collective, now) for collective in [*early, *told])


class GpuProbe:
    """What torch's allocator in this process says of the rank's GPU; nothing while CUDA is not in use.

    The allocator answers under its lock, and keeps that while it waits for the driver: behind a collective that hangs,
    cudaMalloc may wait for ever. Whoever asked then would wait with it, and keep the interpreter from everybody. So it
    is asked only while the main thread is seen to move; of one that stands still, the last answer still holds.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, int]] = {}  # by device: its name, UUID and size
        self._last: Gpu | None = None

    def measure(self, device: str, moves: Callable[[], bool]) -> Gpu | None:
        torch: Any = sys.modules.get("torch")
        if torch is None or not device.startswith("cuda:"):
            return None
        try:
            if not torch.cuda.is_initialized():  # asking anything else would initialise it, on this thread
                return None
            if not moves():
                return self._last
            index = int(device.partition(":")[2])  # this thread's current device is always 0
            name, uuid, total = self._described(torch, index, device)
            stats = torch.cuda.memory_stats(index)
            self._last = Gpu(
                name=name,
                uuid=uuid,
                total_bytes=total,
                allocated_bytes=stats.get("allocated_bytes.all.current", 0),
                reserved_bytes=stats.get("reserved_bytes.all.current", 0),
                peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            )
        except Exception:  # a CUDA context that an error of the user's has broken answers nothing any more
            self._last = None
        return self._last

    def _described(self, torch: Any, index: int, device: str) -> tuple[str, str, int]:
        known = self._known.get(device)
        if known is None:
            properties = torch.cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)
            known = (str(properties.name), "" if uuid is None else str(uuid), int(properties.total_memory))
            self._known[device] = known
        return known


def seen(collective: Collective, now: float) -> CollectiveSeen:
    """A collective as it is told, at monotonic time `now`."""
    line, end = collective.line, collective.t_end
    dtypes = collective.dtypes
    return CollectiveSeen(
        op=collective.op,
        group=collective.group,
        group_ranks=collective.group_ranks,
        seq=collective.group_seq,
        shapes=collective.shapes,
        dtype=dtypes[0] if dtypes else "",
        line=None if line is None else Frame(file=plain(line.file), line=line.line, function=plain(line.function)),
        peer=collective.peer,
        began_s=max(0.0, now - collective.t_start),
        ended_s=None if end is None else max(0.0, now - end),
        failed=None if collective.error is None else plain(collective.error),
        epoch=collective.epoch,
    )


def plain(text: str, limit: int = 500) -> str:
    """Text of the user's as it can travel: without lone surrogates, and not endless."""
    if type(text) is str and len(text) <= limit and text.isascii():
        return text
    cut = text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return str(cut).encode("utf-8", "replace").decode()
