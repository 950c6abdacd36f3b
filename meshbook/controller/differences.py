"""What ranks hold differently that should be equal, from what they say of their state. Pure.

Ranks that must hold the same part of a tensor are its *replicas*: those that the placements of a DTensor or a DDP
model's process group say, else all that have the name. The digest that most replicas have is taken for right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshbook.controller.tables import TextReport, format_some
from meshbook.errors import MeshNameError
from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import Comparison, StateDescription, StateEntry, TensorDifference

# Tensors whose values are compared for one report; of more it is only known that they differ.
MAX_COMPARED = 64
_MAX_LINES = 24
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Difference:
    """One tensor or value that ranks hold differently.

    Attributes:
        name, path: what was asked for, and what differs: "model", "model.layers.3.mlp.bias".
        ranks: that differ from the others.
        others: the ranks that they were compared with.
        reason: in which way, if not in the elements of equal tensors: "shape (4,) instead of (8,)".
        dtype, num_elements: of one rank's part; "" and 0 for a value.
        num_differing, max_difference: elements that differ, at most on any of the ranks, and by how much; None: they
            were not compared.
        since: the last collective before the comparison; what differs does so since it, or before.
        before: the one at which `same` last found it equal; empty: never.
    """

    name: str
    path: str
    ranks: Ranks
    others: Ranks
    reason: str = ""
    dtype: str = ""
    num_elements: int = 0
    num_differing: int | None = None
    max_difference: float | None = None
    since: str = ""
    before: str = ""

    @property
    def amount(self) -> str:
        """What is known of it, in words."""
        if self.reason:
            return self.reason
        if self.num_differing is None or self.max_difference is None:
            return "differs"
        if not self.num_differing:
            return "differs only in the signs of zeros, or in the bits of NaNs"
        largest = "NaN on one side" if self.max_difference != self.max_difference else f"max {self.max_difference:.2g}"
        return f"{self.num_differing:,} of {self.num_elements:,} differ, {largest}"

    @property
    def text(self) -> str:
        when = f", since {self.since} or before" if self.since else ""
        if self.before and self.since:
            when = f", since {self.since} or before; equal at {self.before}"
        return f"{self.path} on {name_ranks(self.ranks)}: {self.amount}{when}"


@dataclass(frozen=True, repr=False)
class Differences(TextReport):
    """What ranks hold differently behind names. Displays itself; true if nothing differs.

    Attributes:
        names, ranks: what was compared, and where.
        differences: by path; empty: what must be equal is.
        num_compared: tensors and values that several ranks hold, and that were compared.
        notes: what was left out of the comparison, and why.
        is_forward: what was compared is what modules take and give; of what differs there is the first alone.
    """

    names: tuple[str, ...]
    ranks: Ranks
    differences: tuple[Difference, ...] = ()
    num_compared: int = 0
    notes: tuple[str, ...] = ()
    is_forward: bool = False

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def text(self) -> str:
        """The output of `%mesh same` and `%mesh diff`."""
        what, where = ", ".join(self.names), name_ranks(self.ranks)
        count = f"{self.num_compared:,} tensor{'' if self.num_compared == 1 else 's'} and values"
        if not self.differences:
            heading = f"{what}: equal on {where} ({count} compared)."
            if not self.num_compared:
                heading = f"{what}: nothing on {where} is to be equal."
        elif self.is_forward:
            heading = f"{what}: the first difference between {where}, of {count} in the order of the forward:"
        else:
            paths = len({one.path for one in self.differences})
            heading = f"{what}: {paths:,} of {count} differ between {where}."
        lines = fold_differences(self.differences)
        more = len(lines) - _MAX_LINES
        shown = lines[:_MAX_LINES] + ([f"and {more:,} more lines; `.differences` has all"] if more > 0 else [])
        return "\n".join([heading, *(f"  {line}" for line in shown), *self.notes])


def fold_differences(differences: Sequence[Difference]) -> list[str]:
    """Return a line for each difference; those of a repeated layer's parts, from three on, are one line."""
    groups: dict[tuple[str, Ranks, str], list[Difference]] = {}
    for one in differences:
        groups.setdefault((_NUMBER.sub("*", one.path), one.ranks, one.reason), []).append(one)
    lines = []
    for (pattern, ranks, reason), members in groups.items():
        if len(members) < 3:
            lines += [one.text for one in members]
            continue
        counts = [one.num_differing for one in members if one.num_differing is not None]
        largest = max((one.max_difference or 0.0 for one in members), default=0.0)
        amount = reason or (f"{sum(counts):,} elements differ, max {largest:.2g}" if counts else "differ")
        lines.append(f"{pattern} ({len(members)} names) on {name_ranks(ranks)}: {amount}")
    return lines


def find_differences(
    names: Sequence[str],
    replies: Mapping[int, StateDescription],
    *,
    over: Sequence[Ranks] | None = None,
    ignore_placements: bool = False,
    equal_at: Mapping[str, str] | None = None,
) -> Differences:
    """Return what differs, without the numbers that only the tensors themselves tell.

    Args:
        replies: by rank.
        over: only ranks within one of these groups are compared with each other; None: all.
        ignore_placements: compare whatever has the same path.
        equal_at: by path, the collective at which it was equal.

    Raises:
        MeshNameError: no rank has a name.
    """
    ranks = tuple(sorted(replies))
    differences: list[Difference] = []
    left_out: dict[str, set[str]] = {}
    num_compared = 0
    groups = [tuple(sorted(set(group) & set(ranks))) for group in over] if over is not None else [ranks]
    last = _last_collective(replies)
    for name in names:
        _check_bound(name, replies)
        types = {rank: reply.types.get(name, "") for rank, reply in replies.items()}
        for group in groups:
            if odd := _odd_types(name, types, group):
                differences.append(odd)
                continue
            by_path: dict[str, dict[int, StateEntry]] = {}
            for rank in group:
                for entry in replies[rank].entries.get(name, ()):
                    by_path.setdefault(entry.path, {})[rank] = entry
            for path, held in by_path.items():
                entry = next(iter(held.values()))
                if entry.own and not ignore_placements:
                    left_out.setdefault(entry.own, set()).add(path)
                    continue
                for replicas in _replicas(group, held, ignore_placements=ignore_placements):
                    num_compared += 1
                    differences += _compare(name, path, replicas, held)
    before = equal_at or {}
    return Differences(
        tuple(names),
        ranks,
        tuple(replace(one, since=last, before=before.get(one.path, "")) for one in differences),
        num_compared,
        tuple(f"Not compared: {format_some(sorted(paths), 3)} ({why})." for why, paths in left_out.items()),
    )


def first_difference(
    forward: str, replies: Mapping[int, StateDescription], *, over: Sequence[Ranks] | None = None
) -> Differences:
    """Return the first difference in a forward, without its numbers, and up to where all is equal.

    Args:
        replies: by rank: what modules take and give, in their order.
        over: see `find_differences`.
    """
    found = replace(find_differences([forward], replies, over=over), is_forward=True)
    if not found.differences:
        return found
    paths = [entry.path for entry in replies[found.ranks[0]].entries.get(forward, ())]
    order = {path: at for at, path in enumerate(paths)}
    first = min(found.differences, key=lambda one: order.get(one.path, len(paths))).path
    at = order.get(first, len(paths))
    note = f"Equal up to {paths[at - 1]}." if at else "Nothing is before it."
    if first.startswith("input") and not any(" of " in path for path in paths[:at]):
        note = "It is what the forward is given: give all ranks the same, or compare along an axis alone: --over AXIS"
    differences = tuple(one for one in found.differences if one.path == first)
    return replace(found, differences=differences, notes=(note, *found.notes))


def plan_comparisons(found: Differences, replies: Mapping[int, StateDescription]) -> tuple[Comparison, ...]:
    """Return which tensors are to be compared element by element: one rank of each kind with one of the right ones."""
    planned = []
    for one in found.differences[:MAX_COMPARED]:
        if one.reason or not one.dtype:
            continue
        targets, seen = [], set()
        for rank in one.ranks:
            digest = next((entry.digest for entry in replies[rank].entries[one.name] if entry.path == one.path), None)
            if digest not in seen:
                seen.add(digest)
                targets.append(rank)
        planned.append(Comparison(one.name, one.path, one.others[0], tuple(targets)))
    return tuple(planned)


def with_numbers(found: Differences, numbers: Mapping[int, Iterable[TensorDifference]]) -> Differences:
    """Return the report with how much differs, from what the compared ranks have counted."""
    by_path: dict[tuple[int, str], TensorDifference] = {
        (rank, one.path): one for rank, counted in numbers.items() for one in counted
    }
    completed = []
    for one in found.differences:
        counted = [by_path[rank, one.path] for rank in one.ranks if (rank, one.path) in by_path]
        if counted:
            nan = next((each.max_difference for each in counted if each.max_difference != each.max_difference), None)
            one = replace(
                one,
                num_differing=max(each.num_differing for each in counted),
                num_elements=counted[0].num_elements,
                max_difference=max(each.max_difference for each in counted) if nan is None else nan,
            )
        completed.append(one)
    return replace(found, differences=tuple(completed))


def equal_along(
    names: Sequence[str], replies: Mapping[int, StateDescription], axes: Mapping[str, Sequence[Ranks]]
) -> str:
    """Return the axis along which all is equal where ranks at other places of it differ; empty: none, or several."""
    found = [axis for axis, groups in axes.items() if not find_differences(names, replies, over=groups).differences]
    return found[0] if len(found) == 1 and len(axes) > 1 else ""


# ---------------------------------------------------------------------------------------------------------------------


def _check_bound(name: str, replies: Mapping[int, StateDescription]) -> None:
    if any(name in reply.types for reply in replies.values()):
        return
    known = sorted({each for reply in replies.values() for each in reply.known})
    have = f"they have {', '.join(known)}" if known else "no cell has bound a name there"
    raise MeshNameError(f"`{name}` is not on {name_ranks(replies)}; {have}")


def _odd_types(name: str, types: Mapping[int, str], group: Ranks) -> Difference | None:
    """Return the difference that a name is bound to another kind of object on some ranks, or to none."""
    counts = Counter(types[rank] for rank in group)
    if len(counts) < 2:
        return None
    usual = counts.most_common(1)[0][0]
    odd = tuple(rank for rank in group if types[rank] != usual)
    others = tuple(rank for rank in group if types[rank] == usual)
    kinds = " and ".join(sorted({types[rank] or "nothing" for rank in odd}))
    return Difference(name, name, odd, others, f"{kinds}, and {usual or 'nothing'} on {name_ranks(others)}")


def _replicas(group: Ranks, held: Mapping[int, StateEntry], *, ignore_placements: bool) -> list[Ranks]:
    """Return the sets of ranks that must hold the same; a rank without the path is in those of the others."""
    sets: dict[Ranks, None] = {}
    for entry in held.values():
        equal_on = group if entry.equal_on is None or ignore_placements else entry.equal_on
        sets[tuple(rank for rank in equal_on if rank in group)] = None
    return [ranks for ranks in sets if len(ranks) > 1]


def _compare(name: str, path: str, replicas: Ranks, held: Mapping[int, StateEntry]) -> list[Difference]:
    missing = tuple(rank for rank in replicas if rank not in held)
    present = tuple(rank for rank in replicas if rank in held)
    found = []
    if missing and present:
        found.append(Difference(name, path, missing, present, f"not there, but on {name_ranks(present)}"))
    comparable = [rank for rank in present if held[rank].digest is not None]
    counts = Counter((held[rank].type, held[rank].shape, held[rank].digest) for rank in comparable)
    if len(counts) < 2:
        return found
    most = max(counts.values())
    usual = next(key for rank in comparable if counts[key := _key(held[rank])] == most)
    others = tuple(rank for rank in comparable if _key(held[rank]) == usual)
    by_reason: dict[str, list[int]] = {}
    for rank in comparable:
        if _key(held[rank]) != usual:
            by_reason.setdefault(_reason(held[rank], held[others[0]]), []).append(rank)
    for reason, ranks in by_reason.items():
        entry = held[ranks[0]]
        dtype = entry.type if entry.shape is not None else ""
        found.append(Difference(name, path, tuple(ranks), others, reason, dtype))
    return found


def _key(entry: StateEntry) -> tuple[str, tuple[int, ...] | None, str | None]:
    return entry.type, entry.shape, entry.digest


def _reason(entry: StateEntry, usual: StateEntry) -> str:
    if entry.type != usual.type:
        return f"{entry.type} instead of {usual.type}"
    if entry.shape != usual.shape:
        return f"shape {entry.shape} instead of {usual.shape}"
    return f"{entry.text} instead of {usual.text}" if entry.shape is None else ""


def _last_collective(replies: Mapping[int, StateDescription]) -> str:
    """Return the last collective that all ranks have begun, where they agree."""
    last = {reply.last_collective for reply in replies.values()}
    return last.pop() if len(last) == 1 else ""
