"""What is known of a mesh at one moment: each rank's activity, and the graph of which rank waits for which.

`Evidence` is built once from snapshots and does not change; the modules that derive findings only read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from meshbook.diagnose import rank_activity, snapshot_reader
from meshbook.diagnose.actor_waits import ActorWaitGraph
from meshbook.diagnose.collectives import RankWait, Rings, Straggler, find_stragglers, find_waits, group_key, name_op
from meshbook.diagnose.snapshot_reader import SourceLocation
from meshbook.diagnose.source_files import sanitize_line
from meshbook.ids import Ranks
from meshbook.wire.messages import CollectiveInfo, RankSnapshot

# Seconds that a rank must have run in a loop, or others have waited for it, before the finding counts as sure.
MIN_LOOP_S = 5.0
# Seconds that a state must have lasted to count as simultaneous on all ranks. Ranks are sampled within 0.1 to 0.2 s of
# each other, so a healthy mesh can look deadlocked in between.
STABLE_S = 1.0
# Activities that do not by themselves explain why others wait for the rank.
UNBLOCKED_KINDS = frozenset(("ended", "idle", "sleep", "compute", "forming"))  # a group that all its members make


class Evidence:
    """The snapshots of a mesh, and what follows from them without judging which rank is the cause.

    Attributes:
        snapshots: by rank, with an actor's thread in place of an idle main thread.
        earlier: snapshots taken before, by rank; empty if there are none.
        axes: the mesh's axes and their sizes, in order.
        silent_hosts: machines that do not respond.
        activities: what each rank does.
        rings: the collectives that ranks have begun.
        waits: the ranks that wait in an operation of a process group.
        actor_waits: which actor's endpoint waits for which.
    """

    def __init__(
        self,
        snapshots: Sequence[RankSnapshot],
        axes: Mapping[str, int] | None,
        silent_hosts: Sequence[str],
        earlier: Sequence[RankSnapshot],
    ) -> None:
        by_rank = {snapshot.rank: snapshot_reader.with_actor_thread_as_main(snapshot) for snapshot in snapshots}
        self.snapshots = {rank: by_rank[rank] for rank in sorted(by_rank)}
        self.earlier = {snapshot.rank: snapshot_reader.with_actor_thread_as_main(snapshot) for snapshot in earlier}
        self.world_ranks: Ranks = tuple(self.snapshots)
        self.axes = dict(axes or {})
        self.silent_hosts = tuple(silent_hosts)
        self.activities = {rank: rank_activity.activity_of(snapshot) for rank, snapshot in self.snapshots.items()}
        self.rings = Rings(self.snapshots.values())
        transfers = {rank: snapshot_reader.in_flight_transfers(snapshot) for rank, snapshot in self.snapshots.items()}
        forming = {rank: snapshot.forming for rank, snapshot in self.snapshots.items()}
        self.waits = find_waits(self.activities, self.rings, transfers, forming)
        self.actor_waits = ActorWaitGraph({snapshot.rank: snapshot for snapshot in snapshots})
        self._cell_labels = {
            look.file: sanitize_line(look.cell, 80) for look in self.snapshots.values() if look.file and look.cell
        }
        self._op_names: dict[object, str] = {}  # cache: building a name compares up to a thousand members
        self._reachable: dict[Ranks, frozenset[int]] = {}

    @cached_property
    def stragglers(self) -> list[Straggler]:
        return find_stragglers(self.rings)

    # ---- operations

    def op_name(self, op: CollectiveInfo) -> str:
        key = op.op, op.peer, op.seq, group_key(op)
        if key not in self._op_names:
            self._op_names[key] = name_op(op, self.world_ranks)
        return self._op_names[key]

    def op_location(self, rank: int, op: CollectiveInfo) -> SourceLocation | None:
        """Return the line at which a rank called an operation; its current location if that is unknown."""
        snapshot = self.snapshots.get(rank)
        if snapshot is None:
            return None
        at = snapshot_reader.op_location(op, snapshot) or (
            self.activities[rank].location if self.activities[rank].op is op else None
        )
        # A rank that has ended the cell does not report which it was.
        if at is not None and at.file in self._cell_labels:
            return replace(at, cell=self._cell_labels[at.file])
        return at

    # ---- wait graph

    def reachable_from(self, ranks: Ranks) -> frozenset[int]:
        """Return these ranks and all that they wait for, directly or through others."""
        if ranks not in self._reachable:
            reached, pending, followed = set(ranks), list(ranks), set[Ranks]()
            while pending:
                wait = self.waits.get(pending.pop())
                if wait is None or wait.for_ranks in followed:
                    continue
                followed.add(wait.for_ranks)
                new = set(wait.for_ranks) - reached
                reached |= new
                pending += new
            self._reachable[ranks] = frozenset(reached)
        return self._reachable[ranks]

    def waiters_of(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks that wait for one of these, directly or through others."""
        those = set(ranks)
        return {
            rank
            for rank, wait in self.waits.items()
            if rank not in those and self.reachable_from(wait.for_ranks) & those
        }

    def direct_waits(self, root: int) -> list[RankWait]:
        """Return the waits for a rank itself, those in collectives first, the longest first."""
        found = [wait for wait in self.waits.values() if root in wait.for_ranks]
        return sorted(found, key=lambda wait: (wait.op.seq == 0, -wait.op.began_s_ago))

    # ---- single ranks

    def is_unblocked(self, rank: int) -> bool:
        return rank not in self.waits and self.activities[rank].kind in UNBLOCKED_KINDS

    def has_moved(self, rank: int) -> bool:
        return snapshot_reader.has_moved(self.earlier.get(rank), self.snapshots[rank]) is True

    def has_failed(self, rank: int) -> bool:
        return self.snapshots[rank].call is None and self.snapshots[rank].last_status == "error"

    def is_looping(self, rank: int) -> bool:
        """Whether a rank is in the same functions as before, without a collective or a step in between."""
        return snapshot_reader.is_looping(self.earlier.get(rank), self.snapshots[rank])

    def is_busy(self, rank: int) -> bool:
        return snapshot_reader.is_busy(self.snapshots[rank], self.earlier.get(rank))
