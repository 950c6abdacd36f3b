"""What a rank remembers of its elastic loops: the latest run of each key, with its snapshots.

A run is what one cell does under a key: its loop, or its loops one after the other. It stays open until the cell has
ended well; until then the same loops, called again, go on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshbook.errors import UsageError
from meshbook.ids import Ranks
from meshbook.rank.elastic import transfer
from meshbook.rank.elastic.agreement import (
    GoBack,
    HeldSnapshot,
    Manifest,
    Record,
    SnapshotPlan,
    explain_loss,
    explain_uneven_steps,
    find_sources,
    units_to_share,
)
from meshbook.rank.elastic.contents import Part
from meshbook.rank.elastic.snapshots import Snapshot
from meshbook.rank.elastic.versions import Versions
from meshbook.rank.preemption import PreemptionPoint
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.process_groups.memory_transfer import receive_memory, send_memory

_packer = msgspec.msgpack.Encoder()
_manifests = msgspec.msgpack.Decoder(tuple[HeldSnapshot, Manifest])
_contents = msgspec.msgpack.Decoder(list[bytes])
_plans = msgspec.msgpack.Decoder(list[SnapshotPlan | None])


@dataclass
class Run:
    """The latest run of a key on this rank.

    Attributes:
        number: equal on all ranks.
        call: the cell that it runs in, or ran in last.
        source: a digest of that cell's source.
        last_call: the cell in which it was asked for last.
        loop: which loop of the cell began last, counted from 0.
        reached: how many steps of it are done.
        current: the object of that loop.
        one_pass: the iterator that it takes its batches from, if it is one.
        complete: snapshots that every rank has completed; one, or two while it is not known whether all know.
        spare: one whose memory can be used again.
        function: what the user has called, for errors.
        moved: names whose tensors were cut anew for other ranks when they were as in the last snapshot, and their
            versions since then.
    """

    number: int
    call: str
    source: str
    last_call: str
    loop: int = 0
    reached: int = 0
    is_open: bool = True
    current: object = None
    one_pass: object = None
    complete: list[Snapshot] = field(default_factory=list)
    spare: Snapshot | None = None
    function: str = "mesh.elastic"
    moved: dict[str, Versions] = field(default_factory=dict)

    def describe(self) -> Record:
        held = [snapshot.held for snapshot in self.complete if snapshot.held is not None]
        return Record(self.number, self.call, self.source, self.is_open, self.loop, self.reached, held)

    def has_any(self, names: Collection[str]) -> bool:
        """Whether one of these names is in the state of the last snapshot."""
        manifests = self.complete[-1].manifests if self.complete else []
        return any(name in manifest.parts for manifest in manifests for name in names)

    def replicas(self, rank: int) -> dict[str, Ranks]:
        """Return by name of the state the ranks that held the same as this one when the last snapshot was taken."""
        manifests = self.complete[-1].manifests if self.complete else []
        by_rank = [_units_by_name(manifest) for manifest in manifests]
        return {
            name: tuple(other for other, of_other in enumerate(by_rank) if of_other.get(name) == units)
            for name, units in (by_rank[rank] if rank < len(by_rank) else {}).items()
        }

    def say_that_it_is_dropped(self) -> None:
        if self.is_open and self.reached:
            print(f"elastic: begins anew; the run that was interrupted at step {self.reached} is dropped")

    @property
    def next_number(self) -> int:
        return 1 + max((held.number for held in self.describe().snapshots), default=-1)

    # ---- snapshots, which all ranks take together

    def take(self, rank: int, at: HeldSnapshot, parts: Mapping[str, Part]) -> None:
        """Take a snapshot on all ranks. Blocks until all have it; if that fails, those before it are as they were.

        Args:
            at: equal on all ranks.

        Raises:
            UsageError: it is not: the ranks did unequal numbers of steps.
        """
        snapshot, self.spare = self.spare or Snapshot(rank), None
        own = snapshot.fill(parts)
        found = [_manifests.decode(text) for text in transfer.gather(_packer.encode((at, own)))]
        if problem := explain_uneven_steps([other for other, _ in found]):
            raise UsageError(problem)
        snapshot.manifests = _share_small_units(rank, snapshot, [manifest for _, manifest in found])
        incoming = snapshot.to_receive()
        transfer.pass_on(snapshot.to_send(), snapshot.keeper, incoming, snapshot.kept)
        snapshot.held = at
        self.complete.append(snapshot)
        transfer.wait_for_all()  # then every rank has completed it, and none will need the one before
        old = self.complete[:-1]
        self.complete = [snapshot]
        self.spare = old[-1] if old else None

    def collect(self, rank: int, options: Sequence[GoBack]) -> tuple[GoBack, Snapshot]:
        """Return the snapshot that all ranks go back to, with this rank's part: others send it what it lacks. Blocks.

        Args:
            options: equal on all ranks; the first that can be put together is taken.

        Raises:
            UsageError: none can be put together.
        """
        chosen, plan = options[0], None
        if chosen.lacking:
            chosen, plan = self._choose(rank, options)
        have = self.find(chosen.snapshot.number)
        if plan is not None:
            received = self._exchange_parts(rank, chosen, plan, have)
            have = have or received
        assert have is not None  # held before, or received now
        self.complete = [have]
        return chosen, have

    def find(self, number: int) -> Snapshot | None:
        return next((one for one in self.complete if one.held is not None and one.held.number == number), None)

    def _choose(self, rank: int, options: Sequence[GoBack]) -> tuple[GoBack, SnapshotPlan]:
        own: list[SnapshotPlan | None] = []
        for option in options:
            have = self.find(option.snapshot.number)
            lowest = next(at for at, held in enumerate(option.held) if held is not None)
            if rank == lowest:
                assert have is not None  # as this rank has said
                sources = [find_sources(lost, have.manifests, option.held) for lost in option.lacking]
                own.append(SnapshotPlan(have.manifests, sources))
            else:
                own.append(None)
        plans = [_plans.decode(text) for text in transfer.gather(_packer.encode(own))]
        found = [next(of_rank[at] for of_rank in plans if of_rank[at] is not None) for at in range(len(options))]
        for option, plan in zip(options, found, strict=True):
            assert plan is not None  # one rank has made it
            if not plan.why_not:
                return option, plan
        assert found[0] is not None
        raise UsageError(explain_loss(options[0].snapshot, found[0].why_not, self.function))

    def _exchange_parts(self, rank: int, chosen: GoBack, plan: SnapshotPlan, have: Snapshot | None) -> Snapshot | None:
        """Send and receive parts of ranks that lack theirs. Return this rank's, if it is one of them. Blocks."""
        received = None
        held = {} if have is None else have.memory_of_units()
        for lost, source in zip(chosen.lacking, plan.sources, strict=True):
            memory = None
            if rank == lost:
                received = Snapshot(rank)
                memory = received.allocate(plan.manifests)
            for at, (sender, unit) in enumerate(zip(source.ranks, source.manifest.units, strict=True)):
                if memory is not None and sender >= 0:
                    receive_memory(memory[at], sender)
                elif rank == sender:
                    send_memory(held[unit.digest], lost)
        if received is not None:
            received.held = msgspec.structs.replace(chosen.snapshot, has_copies=False)
        return received

    def complete_copies(self, rank: int, snapshot: Snapshot, decision: GoBack) -> None:
        """Give ranks that replace others the copies that those held. Blocks. All ranks have their own parts."""
        keeper, kept = snapshot.keeper, snapshot.kept
        for at, held in enumerate(decision.held):
            if held is None or not held.has_copies:
                if at == keeper:
                    for memory in snapshot.to_send():
                        send_memory(memory, at)
                if at == rank:
                    for memory in snapshot.to_receive():
                        receive_memory(memory, kept)
                    assert snapshot.held is not None  # a complete one
                    snapshot.held = msgspec.structs.replace(snapshot.held, has_copies=True)


def _units_by_name(manifest: Manifest) -> dict[str, list[bytes]]:
    """Return the digests of what each name of the state consists of."""
    digests = iter([unit.digest for unit in manifest.units])
    return {name: list(itertools.islice(digests, num)) for name, num in manifest.parts.items()}


def _share_small_units(rank: int, snapshot: Snapshot, manifests: list[Manifest]) -> list[Manifest]:
    """Give all ranks the small units that not every rank has, and return the manifests with them. Blocks."""
    wanted = units_to_share(manifests)
    if not any(wanted):
        return manifests
    sent = transfer.gather(_packer.encode(snapshot.contents(manifests[rank].units, wanted[rank])))
    for manifest, numbers, text in zip(manifests, wanted, sent, strict=True):
        for at, data in zip(numbers, _contents.decode(text), strict=True):
            manifest.units[at] = msgspec.structs.replace(manifest.units[at], data=data)
    return manifests


class ElasticRuns:
    """The runs of this rank, by key. One per rank; on the main thread."""

    def __init__(self, namespace: MutableMapping[str, Any], groups: ProcessGroups, preemption: PreemptionPoint) -> None:
        self.namespace, self.groups, self.preemption = namespace, groups, preemption
        self.runs: dict[str, Run] = {}
        self.call = self.source = ""
        self._num_loops: dict[str, int] = {}  # by key, that have begun in this call

    def call_began(self, call: str, source: str) -> None:
        self.call, self.source = call, source
        self._num_loops = {}

    def call_ended(self, *, succeeded: bool) -> None:
        """Close the runs of a call that has ended well; their last snapshots stay until another loop has one."""
        for run in self.runs.values():
            if run.last_call == self.call and run.is_open:
                run.current = None
                if succeeded:
                    run.is_open, run.spare, run.one_pass = False, None, None

    def forget(self, keys: Iterable[str]) -> None:
        """Let go of runs that no rank will go on with, and of the memory of their snapshots."""
        for key in keys:
            self.runs.pop(key, None)

    def source_digest(self) -> str:
        if not self.source:
            return ""
        return hashlib.blake2b(self.source.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def replicas(self, rank: int) -> dict[str, Ranks]:
        """Return by name the ranks that held the same as this one, in the last snapshot of its loop."""
        return {name: ranks for run in self.runs.values() for name, ranks in run.replicas(rank).items()}

    def count_loop(self, key: str) -> int:
        """Return how many loops with this key have begun in this call before this one."""
        number = self._num_loops.get(key, 0)
        self._num_loops[key] = number + 1
        return number
