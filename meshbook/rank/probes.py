"""Measurements of a rank for each heartbeat: CPU, delay by the GIL, GPU memory, collectives, scalars.

Everything here runs on the service thread once per second, reads data that exists anyway, and calls no driver function
that may block: a rank whose GPU hangs must still send heartbeats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from meshbook.clock import monotonic, process_time
from meshbook.rank.process_groups.ring import Collective, CollectiveRing
from meshbook.rank.scalars import ScalarLog
from meshbook.rank.text import sanitize_text
from meshbook.wire.messages import CollectiveInfo, Frame, Gpu, Health, RankMetrics

# Limit of collectives per heartbeat beside the open ones; the newest are reported. Describing one takes about 10 us, so
# this many cost less than a thousandth of the second.
_MAX_REPORTED_COLLECTIVES = 64

# Limit of open collectives per heartbeat. More are open only when many sends or receives wait for one peer.
_MAX_REPORTED_OPEN = 128

# "0": a rank measures nothing and its ring stores no lines and shapes. For benchmarks/probes.py, which measures the
# cost.
PROBES_ENV_VAR = "MESHBOOK_PROBES"


def are_probes_enabled() -> bool:
    return os.environ.get(PROBES_ENV_VAR) != "0"


class Probes:
    """The measurements of one rank. Service thread only.

    Attributes:
        health: the last measurement; None before the first heartbeat.
    """

    def __init__(
        self,
        rank: int,
        ring: CollectiveRing,
        scalars: ScalarLog,
        *,
        clock: Callable[[], float] = monotonic,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self._rank, self._ring, self._scalars = rank, ring, scalars
        self._clock, self._cpu_clock = clock, cpu_clock
        self._measured_at, self._cpu_s = clock(), cpu_clock()
        self._gil_lag_s = 0.0
        self._reported_seq = 0
        self._open_collectives: list[Collective] = []  # reported before they had ended
        self._gpu = GpuProbe()
        self.health: Health | None = None

    def record_wakeup_delay(self, delay_s: float) -> None:
        """Record how much later than scheduled the service thread ran, because another thread held the GIL."""
        if delay_s > self._gil_lag_s:
            self._gil_lag_s = delay_s

    def measure(self, device: str, is_progressing: Callable[[], bool] = lambda: True) -> RankMetrics:
        """Return everything to report since the last measurement.

        Args:
            device: the rank's, "cpu" or "cuda:1".
            is_progressing: whether the main thread makes progress, and so is not stuck in the allocator (`GpuProbe`).
        """
        now, cpu_s = self._clock(), self._cpu_clock()
        elapsed_s = max(1e-9, now - self._measured_at)
        last = self._ring.last
        self.health = Health(
            cpu_percent=round(100.0 * (cpu_s - self._cpu_s) / elapsed_s, 1),
            gil_lag_s=round(self._gil_lag_s, 4),
            num_collectives=0 if last is None else last.seq,
            num_steps=self._scalars.num_steps,
            steps_per_s=self._scalars.steps_per_s(),
            gpu=self._gpu.measure(device, is_progressing),
        )
        self._measured_at, self._cpu_s, self._gil_lag_s = now, cpu_s, 0.0
        scalars, num_dropped = self._scalars.drain()
        return RankMetrics(
            rank=self._rank,
            health=self.health,
            scalars=scalars,
            num_dropped=num_dropped,
            collectives=self._new_collectives(now),
        )

    def _new_collectives(self, now: float) -> tuple[CollectiveInfo, ...]:
        """Return the collectives begun since the last report, and those that were open then."""
        new = self._ring.since(self._reported_seq)
        if new:
            self._reported_seq = new[-1].seq
        reported = [*self._open_collectives, *new[-_MAX_REPORTED_COLLECTIVES:]]
        self._open_collectives = [*self._open_collectives, *new]
        self._ring.poll_completion(self._open_collectives)
        self._open_collectives = [collective for collective in self._open_collectives if collective.t_end is None][
            -_MAX_REPORTED_OPEN:
        ]
        unreported_open = [
            collective for collective in self._open_collectives if collective not in reported
        ]  # open, and not among the newest
        return tuple(describe_collective(collective, now) for collective in [*unreported_open, *reported])


class GpuProbe:
    """Statistics of torch's allocator in this process for the rank's GPU; nothing while CUDA is not in use.

    The allocator replies under its lock, and holds that lock while it waits for the driver: behind a collective that
    hangs, cudaMalloc may wait forever. A caller would then wait with it, and hold the GIL. So it is called only while
    the main thread makes progress; while that thread stalls, the last reply remains valid.
    """

    def __init__(self) -> None:
        self._device_info: dict[str, tuple[str, str, int]] = {}  # by device: its name, UUID and size
        self._last: Gpu | None = None

    def measure(self, device: str, is_progressing: Callable[[], bool]) -> Gpu | None:
        torch: Any = sys.modules.get("torch")
        if torch is None or not device.startswith("cuda:"):
            return None
        try:
            if not torch.cuda.is_initialized():  # any other call would initialise it, on this thread
                return None
            if not is_progressing():
                return self._last
            index = int(device.partition(":")[2])  # this thread's current device is always 0
            name, uuid, total = self._describe_device(torch, index, device)
            stats = torch.cuda.memory_stats(index)
            self._last = Gpu(
                name=name,
                uuid=uuid,
                total_bytes=total,
                allocated_bytes=stats.get("allocated_bytes.all.current", 0),
                reserved_bytes=stats.get("reserved_bytes.all.current", 0),
                peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            )
        except Exception:  # a CUDA context broken by a user error returns no data any more
            self._last = None
        return self._last

    def _describe_device(self, torch: Any, index: int, device: str) -> tuple[str, str, int]:
        info = self._device_info.get(device)
        if info is None:
            properties = torch.cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)
            info = (str(properties.name), "" if uuid is None else str(uuid), int(properties.total_memory))
            self._device_info[device] = info
        return info


def describe_collective(collective: Collective, now: float) -> CollectiveInfo:
    """Return the report of a collective at monotonic time `now`."""
    line, end = collective.line, collective.t_end
    dtypes = collective.dtypes
    return CollectiveInfo(
        op=collective.op,
        group=collective.group,
        group_ranks=collective.group_ranks,
        seq=collective.group_seq,
        shapes=collective.shapes,
        dtype=dtypes[0] if dtypes else "",
        frame=None
        if line is None
        else Frame(file=sanitize_text(line.file), line=line.line, function=sanitize_text(line.function)),
        peer=collective.peer,
        began_s_ago=max(0.0, now - collective.t_start),
        ended_s_ago=None if end is None else max(0.0, now - end),
        failure=None if collective.error is None else sanitize_text(collective.error),
        generation=collective.generation,
    )
