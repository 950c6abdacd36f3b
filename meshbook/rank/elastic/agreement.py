"""Which snapshot all ranks go back to, and from where a rank that lacks its part of it takes that. Pure.

Every rank says what it holds; every rank then decides the same. A snapshot has one part for each rank. A part is a
list of units (the bytes of a tensor, or of a pickle), each known by a digest of its content. Another rank, its keeper,
has copies of those units that its own part lacks, and every rank has the small ones that are not equal everywhere, such
as the states of random generators. The keeper is on another machine if there are several. So any loss can be made good
in which no rank is lost together with its keeper; if what is large is replicated, any loss that leaves one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from meshbook.errors import UsageError
from meshbook.ids import name_ranks


class Unit(Struct, frozen=True, array_like=True, gc=False):
    """Attributes:
    digest: equal for equal bytes.
    data: the bytes, if every rank has been given them.
    """

    digest: bytes
    size: int
    data: bytes | None = None


class Manifest(Struct, frozen=True, array_like=True):
    """One rank's part of a snapshot.

    Attributes:
        parts: by the name of the state, how many of the units are its own: its pickle first, then its tensors.
    machine: on which it was taken.
    """

    parts: dict[str, int]
    units: list[Unit]
    machine: str = ""


class HeldSnapshot(Struct, frozen=True, array_like=True, order=True):
    """A complete snapshot that a rank holds. Later ones compare greater.

    Attributes:
        number: counted through the run.
        loop: which loop of the cell, counted from 0.
        step: how many steps of that loop are done.
        is_end: taken when the loop had ended.
        has_copies: the rank holds copies of the units of the rank whose keeper it is, too.
        world_size: how many ranks took it; 0: as many as there are.
    """

    number: int
    loop: int
    step: int
    is_end: bool
    has_copies: bool
    world_size: int = 0


class Record(Struct, frozen=True, array_like=True):
    """What a rank remembers of the latest run.

    Attributes:
        run: its number; equal on all ranks, greater than those before.
        call: the cell that it runs in, or ran in last.
        source: a digest of that cell's source; "" if it has none.
        is_open: the cell has not ended well on this rank.
        loop: the loop of that cell that began last.
        reached: how many steps of it were done.
        snapshots: complete ones.
    """

    run: int
    call: str
    source: str
    is_open: bool
    loop: int
    reached: int
    snapshots: list[HeldSnapshot]


class Request(Struct, frozen=True, array_like=True):
    """What a rank says when `mesh.elastic` is called there.

    Attributes:
        loop: how many loops with this key began in this cell before.
        problem: why a new run cannot begin there; "" if it can.
        ended: keys of other runs, whose cells have ended well there.
    """

    key: str
    every: int
    restart: bool
    call: str
    source: str
    loop: int
    problem: str
    record: Record | None
    ended: tuple[str, ...] = ()


class Begin(Struct, frozen=True):
    """A loop begins at its first step, in this run."""

    run: int


class GoBack(Struct, frozen=True):
    """All ranks go back to a snapshot.

    Attributes:
        is_over: there is nothing left of this loop: it had ended, and perhaps later ones of the cell had begun.
        is_own_loop: the snapshot is of this loop.
        reached: how many steps were done before the fault.
        held: what each rank holds of it, by rank; None: nothing.
    """

    run: int
    snapshot: HeldSnapshot
    is_over: bool
    is_own_loop: bool
    reached: int
    held: tuple[HeldSnapshot | None, ...]

    @property
    def is_resized(self) -> bool:
        """Whether another number of ranks took the snapshot."""
        return self.snapshot.world_size not in (0, len(self.held))

    @property
    def source(self) -> int:
        """The lowest rank that holds it."""
        return next(rank for rank, held in enumerate(self.held) if held is not None)

    @property
    def lacking(self) -> tuple[int, ...]:
        return tuple(rank for rank, held in enumerate(self.held) if held is None)


def decide(requests: Sequence[Request]) -> Begin | list[GoBack]:
    """Return what all ranks do now, from what each says, by rank: begin, or go back to the first snapshot that can be
    put together, the newest being first.

    Raises:
        UsageError: the ranks ask for different things, or a new run cannot begin.
    """
    _check_alike(requests)
    first = requests[0]
    records = [request.record for request in requests]
    run = max((record.run for record in records if record is not None), default=0)
    latest = [record if record is not None and record.run == run else None for record in records]
    known = [record for record in latest if record is not None]
    if known and not first.restart and known[0].call == first.call:
        _check_possible(requests)
        return Begin(run)
    # without a snapshot the run had not come to its first step
    has_snapshots = any(record.snapshots for record in known)
    if first.restart or not has_snapshots or not _goes_on(latest, first):
        _check_possible(requests)
        return Begin(run + 1)
    return options_to_go_back(run, latest, first.loop)


def options_to_go_back(run: int, records: Sequence[Record | None], loop: int) -> list[GoBack]:
    """Return the snapshots of a run that some rank has, the newest first.

    Args:
        records: of this run, by rank.
        loop: which loop of its cell asks.
    """
    known = [record for record in records if record is not None]
    counted = {held.number: held for record in known for held in record.snapshots}
    found = []
    for number in sorted(counted, reverse=True):
        snapshot = counted[number]
        reached = max((record.reached for record in known if record.loop == snapshot.loop), default=snapshot.step)
        option = GoBack(
            run,
            snapshot,
            is_over=loop < snapshot.loop or snapshot.is_end,
            is_own_loop=loop >= snapshot.loop,
            reached=max(reached, snapshot.step),
            held=tuple(_find(record, number) for record in records),
        )
        found.append(option)
    newest = found[0].snapshot
    return [option for option in found if option.snapshot.world_size == newest.world_size]


def ended_everywhere(requests: Sequence[Request]) -> set[str]:
    """Return the keys of runs that no rank will go on with: their cells have ended well on all ranks."""
    return set(requests[0].ended).intersection(*(request.ended for request in requests))


def _goes_on(latest: Sequence[Record | None], request: Request) -> bool:
    """Whether this call goes on with an earlier run, rather than begin one."""
    known = [record for record in latest if record is not None]
    if any(record.is_open for record in known):
        return True
    if any(held.world_size not in (0, len(latest)) for record in known for held in record.snapshots):
        return False  # ranks that have no record have joined since
    # The cell has ended well on all ranks that are left. One has been replaced since: whether it had ended well there
    # is not known, so if the same cell is run again, it is not trained twice without a word.
    return len(known) < len(latest) and any(record.source and record.source == request.source for record in known)


def _find(record: Record | None, number: int) -> HeldSnapshot | None:
    return None if record is None else next((held for held in record.snapshots if held.number == number), None)


def _check_alike(requests: Sequence[Request]) -> None:
    for field in ("key", "every", "restart", "loop"):
        ranks_of: dict[object, list[int]] = {}
        for rank, request in enumerate(requests):
            ranks_of.setdefault(getattr(request, field), []).append(rank)
        if len(ranks_of) > 1:
            what = {"key": "state or name", "loop": "number of loops before this one"}.get(field, field)
            found = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
            raise UsageError(f"all ranks must call mesh.elastic alike, and {what} differs: {found}")


def _check_possible(requests: Sequence[Request]) -> None:
    if problems := fold_problems([request.problem for request in requests]):
        raise UsageError(problems)


def fold_problems(problems: Sequence[str]) -> str:
    """Return what ranks say is wrong, by rank in, as one text; "" if nothing is."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            ranks_of.setdefault(problem, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in ranks_of.items())


# ---- copies of units

# Bytes of a unit that every rank is given, and of all such units of one rank. A generator's state has up to 5 KiB.
_MAX_SHARED_BYTES = 8 << 10
_MAX_ALL_SHARED_BYTES = 256 << 10


def units_to_share(manifests: Sequence[Manifest]) -> list[list[int]]:
    """Return by rank which units of its part every rank is given: small ones that not every rank has itself."""
    # Once for all ranks: for each, it would be the largest part of a snapshot of many ranks.
    everywhere = set.intersection(*({unit.digest for unit in manifest.units} for manifest in manifests))
    return [_small_units_beyond(everywhere, manifest.units) for manifest in manifests]


def _small_units_beyond(everywhere: set[bytes], units: Sequence[Unit]) -> list[int]:
    found, total = [], 0
    for at, unit in enumerate(units):
        if unit.size <= _MAX_SHARED_BYTES and unit.digest not in everywhere:
            total += unit.size
            if total > _MAX_ALL_SHARED_BYTES:
                break
            found.append(at)
    return found


def keepers(parts: Sequence[Manifest]) -> list[int]:
    """Return by rank which rank keeps copies of its part.

    Each keeps those of one other. On one machine it is the next rank; on several the next one on another machine, as
    far as no machine has more than half of the ranks.
    """
    size, num_on = len(parts), Counter(part.machine for part in parts)
    first_on: dict[str, int] = {}
    for rank, part in enumerate(parts):
        first_on.setdefault(part.machine, rank)
    ring = sorted(range(size), key=lambda rank: (first_on[parts[rank].machine], rank))
    distance = max(num_on.values()) if len(num_on) > 1 else 1
    found = [0] * size
    for at, rank in enumerate(ring):
        found[rank] = ring[(at + distance) % size]
    return found


def units_to_copy(part: Manifest, keepers_part: Manifest) -> list[int]:
    """Return which units of a rank's part its keeper must be sent: those that it does not have itself."""
    had = {unit.digest for unit in keepers_part.units}
    return [at for at, unit in enumerate(part.units) if unit.size and unit.data is None and unit.digest not in had]


# Bytes between the beginnings of units in memory are a multiple of this, so that any dtype can be read in place.
ALIGNMENT = 64


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return where units of these sizes begin, one after the other, and at last where they end. In bytes."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return found


def byte_ranges(part: Manifest, units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the memory of these units, in few pieces."""
    starts = offsets([unit.size for unit in part.units])
    begin = end = None
    for at in units:
        if starts[at] != end:
            if begin is not None and end is not None:
                yield begin, end
            begin = starts[at]
        end = starts[at + 1]
    if begin is not None and end is not None:
        yield begin, end


class Source(Struct, frozen=True, array_like=True):
    """Where the units of a lost part are: by unit, the rank that sends it; -1: in the manifest itself.

    Attributes:
        why_not: why it cannot be put together; "" if it can.
    """

    manifest: Manifest
    ranks: list[int]
    why_not: str = ""


def find_sources(lost: int, manifests: Sequence[Manifest], held: Sequence[HeldSnapshot | None]) -> Source:
    """Return where the part of a rank that is lost can be had.

    Args:
        manifests: of all ranks.
        held: as `GoBack.held`.
    """
    part, size = manifests[lost], len(manifests)
    keeper = keepers(manifests)[lost]
    copies: set[bytes] = set()
    if (kept := held[keeper]) is not None and kept.has_copies:
        copies = {part.units[at].digest for at in units_to_copy(part, manifests[keeper])}
    owners: dict[bytes, int] = {}
    living = [rank for rank in ((lost + 1 + at) % size for at in range(size)) if held[rank] is not None]
    for rank in living:
        for unit in manifests[rank].units:
            owners.setdefault(unit.digest, rank)
    ranks = []
    for unit in part.units:
        if unit.data is not None or not unit.size:
            ranks.append(-1)
        elif unit.digest in copies:
            ranks.append(keeper)
        elif unit.digest in owners:
            ranks.append(owners[unit.digest])
        else:
            gone = sorted({lost, keeper})
            text = f"the state of rank {lost} was held by {name_ranks(gone)}, and what they held is lost"
            return Source(part, [], text)
    return Source(part, ranks)


class SnapshotPlan(Struct, frozen=True, array_like=True):
    """How a snapshot is put together: what all parts consist of, and by lacking rank where its part is."""

    manifests: list[Manifest]
    sources: list[Source]

    @property
    def why_not(self) -> str:
        """Why it cannot be put together; "" if it can."""
        return "; ".join(dict.fromkeys(source.why_not for source in self.sources if source.why_not))


def explain_loss(snapshot: HeldSnapshot, why: str, function: str) -> str:
    return (
        f"the snapshot of step {snapshot.step} cannot be put together: {why}. Load a checkpoint, and call "
        f"{function}(..., restart=True)"
    )


def explain_uneven_steps(snapshots: Sequence[HeldSnapshot]) -> str:
    """Return why ranks do not take the same snapshot, by rank in; "" if they do."""
    if all(one == snapshots[0] for one in snapshots):
        return ""
    texts = [f"the loop {'has ended' if one.is_end else 'goes on'} after step {one.step}" for one in snapshots]
    return (
        f"all ranks must do equally many steps in an elastic loop: {fold_problems(texts)}. Give each rank a loader of "
        "the same length"
    )


def replicated_names(manifests: Sequence[Manifest]) -> set[str]:
    """Return the names whose state was equal on all ranks that took a snapshot."""
    found = set(manifests[0].parts)
    contents = [_digests_by_name(manifest) for manifest in manifests]
    return {name for name in found if all(other.get(name) == contents[0][name] for other in contents)}


def _digests_by_name(manifest: Manifest) -> dict[str, list[bytes]]:
    found, at = {}, 0
    for name, count in manifest.parts.items():
        found[name] = [unit.digest for unit in manifest.units[at : at + count]]
        at += count
    return found


def describe_resized(decision: GoBack, own: Sequence[str]) -> str:
    """Return the line that is printed when a loop goes on on another number of ranks.

    Args:
        own: names that each rank has its own value of.
    """
    line = describe_going_back(msgspec.structs.replace(decision, held=(decision.snapshot,) * len(decision.held)))
    kept = f"; {', '.join(own)} {'are' if len(own) > 1 else 'is'} each rank's own" if own else ""
    return f"{line}; on {len(decision.held)} ranks, before on {decision.snapshot.world_size}{kept}"


def describe_going_back(decision: GoBack) -> str:
    """Return the line that is printed when a loop goes on."""
    snapshot = decision.snapshot
    of_lost = _describe_lost(decision.lacking)
    if decision.is_over and not decision.is_own_loop:
        return f"elastic: this loop had ended, and nothing of it is computed again{of_lost}"
    if decision.is_over:
        return (
            f"elastic: this loop had ended at step {snapshot.step}, and its end is restored{of_lost}; "
            "restart=True begins it anew"
        )
    return f"elastic: {describe_position(decision.reached, snapshot.step, decision.lacking)}"


def describe_position(reached: int, step: int, lacking: Sequence[int]) -> str:
    """Return where a loop goes on.

    Args:
        reached: how many steps were done before the fault.
        step: that of the snapshot.
        lacking: ranks whose parts of it came from others.
    """
    again = reached - step
    steps = "no step is" if not again else "1 step is" if again == 1 else f"{again} steps are"
    return f"goes on at step {reached} (snapshot of step {step}; {steps} computed again{_describe_lost(lacking)})"


def _describe_lost(ranks: Sequence[int]) -> str:
    return f"; what {name_ranks(ranks)} held came from the others" if ranks else ""
