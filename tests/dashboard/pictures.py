"""Pictures of meshes that are not there: as large as wanted, changing as in a training run. No processes, no clocks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from meshbook.controller.subscription import MeshSnapshot
from meshbook.diagnose.findings import Finding
from meshbook.supervisor.series import Curves, Series
from meshbook.wire.messages import CollectiveStatus, RankStatus

GIB = 1 << 30


class Training:
    """A mesh that trains: lines move, memory breathes, a collective every half second; rank `stuck` stops after a
    while, and all others wait for it."""

    def __init__(
        self, axes: dict[str, int], *, stuck: int | None = None, stuck_after: int = 20, gpus: bool = True
    ) -> None:
        self.size = math.prod(axes.values())
        self.stuck, self.stuck_after, self.gpus = stuck, stuck_after, gpus
        self.random = random.Random(7)
        self.tick = 0
        self.at = 1_800_000_000.0
        self._line = [12] * self.size
        self._memory = [int((38 + 6 * self.random.random()) * GIB) for _ in range(self.size)]
        self.picture = MeshSnapshot(
            at=self.at,
            name="train-7b",
            axes=axes,
            backend="nccl" if gpus else "gloo",
            cells_run=7,
            series=Series(),
            scalars=Curves(),
            calls=("c-7",),
        )
        for _ in range(60):
            self.step(0.5)

    def step(self, seconds: float = 0.5) -> MeshSnapshot:
        """The next picture."""
        self.tick += 1
        self.at += seconds
        hang = self.stuck is not None and self.tick > 60 + self.stuck_after
        ranks = tuple(self._rank(rank, hang) for rank in range(self.size))
        old = self.picture
        old.series.sample(self.at, ranks)
        if not hang:
            for rank in ranks:
                loss = 3 * math.exp(-self.tick / 60) + 1.2 + 0.05 * self.random.random()
                old.scalars.put("loss", rank.rank, self.tick, loss, self.at)
                old.scalars.put("grad_norm", rank.rank, self.tick, 1 + 0.4 * self.random.random(), self.at)
        self.picture = replace(
            old, at=self.at, ranks=ranks, collectives=self._collectives(hang), findings=self._findings(hang)
        )
        return self.picture

    def _rank(self, rank: int, hang: bool) -> RankStatus:
        if not hang and self.random.random() < 0.35:
            self._line[rank] = self.random.choice((12, 13, 14, 17))
        if self.random.random() < 0.1:
            self._memory[rank] += int((self.random.random() - 0.5) * GIB)
        waits = hang and rank != self.stuck
        gpu: dict[str, Any] = {}
        if self.gpus:
            gpu = {
                "gpu_name": "NVIDIA H100",
                "gpu_allocated_bytes": self._memory[rank],
                "gpu_total_bytes": 80 * GIB,
                "gpu_reserved_bytes": self._memory[rank] + 2 * GIB,
                "gpu_utilisation": 0 if hang else 96,
            }
        return RankStatus(
            rank=rank,
            state="busy",
            host=f"node{rank // 8}",
            pid=4000 + rank,
            device=f"cuda:{rank % 8}" if self.gpus else "cpu",
            call="c-7",
            cell="cell 7",
            line=9 if hang and not waits else 14 if waits else self._line[rank],
            rss_bytes=self._memory[rank] // 12,
            peak_rss_bytes=4 * GIB,
            cpu_percent=100,
            collectives_per_s=0 if hang else 12,
            steps_per_s=0 if hang else 2.0,
            waits_in=f"all_reduce #{self.stuck_after + 60}" if waits else None,
            waits_since=self.at if waits else None,
            **gpu,
        )

    def _collectives(self, hang: bool) -> dict[int, tuple[CollectiveStatus, ...]]:
        known: dict[int, tuple[CollectiveStatus, ...]] = {}
        last = min(self.tick, 60 + self.stuck_after) if self.stuck is not None else self.tick
        everyone = tuple(range(self.size))
        for rank in range(min(self.size, 64)):
            some = []
            for seq in range(last - 14, last + 1):
                began = self.at - (self.tick - seq) * 0.5 - 0.35 + 0.02 * (rank % 5)
                is_open = hang and seq == last
                if is_open and rank == self.stuck:
                    continue
                some.append(
                    CollectiveStatus(
                        rank=rank,
                        group="default",
                        seq=seq,
                        op="all_reduce",
                        began_at=began,
                        line=14,
                        ended_at=None if is_open else began + 0.3 - 0.02 * (rank % 5),
                        group_ranks=everyone,
                    )
                )
            known[rank] = tuple(some)
        return known

    def _findings(self, hang: bool) -> tuple[Finding, ...]:
        if not hang or self.stuck is None:
            return ()
        others = tuple(rank for rank in range(self.size) if rank != self.stuck)
        return (
            Finding(
                kind="straggler",
                ranks=(self.stuck,),
                others=others,
                cell="cell 7",
                line=9,
                title=f"Rank {self.stuck} sleeps at cell 7, line 9 (time.sleep), and all others wait for it in "
                f"all_reduce #{self.stuck_after + 60}",
                evidence=(
                    f"ranks {others[0]}-{others[-1]}: all_reduce #{self.stuck_after + 60} at cell 7, line 14, for 12 s",
                    f"rank {self.stuck}: has begun {self.stuck_after + 59} collectives of this group; its main thread "
                    "is in time.sleep",
                ),
                next_step=f"Look at cell 7, line 9 on rank {self.stuck}; %mesh interrupt ends the cell and keeps "
                "what the ranks hold.",
            ),
        )
