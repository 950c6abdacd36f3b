"""Has ranks say what they hold, and compare what differs; `differences` decides."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from meshbook.controller.console import Console
from meshbook.controller.differences import (
    Differences,
    equal_along,
    find_differences,
    first_difference,
    plan_comparisons,
    with_numbers,
)
from meshbook.controller.running import require_living
from meshbook.controller.session import Session
from meshbook.errors import UsageError
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages
from meshbook.wire.messages import StateDescription, TensorDifference

T = TypeVar("T")

_KEY = "differences.equal_at"  # in the session's extras: by path, the collective at which all replicas were equal


def same(session: Session, axes: MeshAxes, names: Sequence[str], *, over: str | None) -> Differences:
    """Compare what must be equal; see `Mesh.same`."""
    _check_names(names, 'mesh.same("model")')
    groups = None if over is None else axes.groups(over)
    ranks = require_living(session, axes.ranks, None)
    replies = _describe(session, ranks, names)
    equal_at: dict[str, str] = session.extras.setdefault(_KEY, {})
    found = find_differences(names, replies, over=groups, equal_at=equal_at)
    notes = list(found.notes)
    lost = tuple(sorted(set(axes.ranks) - set(ranks)))
    if lost:
        notes.append(f"{name_ranks(lost).capitalize()} {'is' if len(lost) == 1 else 'are'} gone, and not compared.")
    elif found.differences:
        found = _count(session, found, replies)
    if found.differences and over is None:
        axis = equal_along(names, replies, {name: axes.groups(name) for name in axes.names})
        if axis:
            notes.append(_note_of_axis(axis, " ".join(names)))
    differing = {one.path for one in found.differences}
    for reply in replies.values():
        for entries in reply.entries.values():
            equal_at.update({entry.path: reply.last_collective for entry in entries if entry.path not in differing})
    return replace(found, notes=tuple(notes))


def same_forward(session: Session, axes: MeshAxes, forward: str, *, over: str | None) -> Differences:
    """Run a forward on all ranks, and return where they begin to differ; see `Mesh.same`."""
    try:
        ast.parse(forward, mode="eval")
    except SyntaxError as error:
        raise UsageError(f'{forward!r:.60} is no expression ({error.msg}); write it like: "model(x)"') from None
    groups = None if over is None else axes.groups(over)
    ranks = require_living(session, axes.ranks, None)
    label = f"compare {forward:.40}"
    command = messages.DescribeState(session.connection.next_call_id(), ranks, (), label, forward)
    replies = _run(session, command, StateDescription)
    found = first_difference(forward, replies, over=groups)
    if found.differences and over is None:
        axis = equal_along([forward], replies, {name: axes.groups(name) for name in axes.names})
        notes = (_note_of_axis(axis, f'--forward "{forward}"'),) if axis else ()
        found = replace(found, notes=(*found.notes, *notes))
    planned = plan_comparisons(found, replies)
    if not planned:
        return found
    compare = messages.CompareTensors(session.connection.next_call_id(), ranks, planned, label, forward)
    return with_numbers(found, _run(session, compare, tuple[TensorDifference, ...]))


def diff(session: Session, axes: MeshAxes, first: int, second: int, names: Sequence[str]) -> Differences:
    """Compare two ranks; see `Mesh.diff`."""
    _check_names(names, 'mesh.diff(2, 6, "model")')
    chosen = axes.check_ranks((first, second))
    if first == second:
        raise UsageError(f"rank {first} twice; name two ranks of {format_ranks(axes.ranks)}")
    ranks = require_living(session, axes.ranks, tuple(sorted(chosen)))
    replies = _describe(session, ranks, names)
    found = find_differences(names, replies, ignore_placements=True)
    if found.differences and not session.lost:
        found = _count(session, found, replies)
    return found


def _note_of_axis(axis: str, what: str) -> str:
    return (
        f"All is equal along {axis}: if other ranks hold other parts, as in hand-written tensor parallelism, compare "
        f"along it alone: %mesh same {what} --over {axis}"
    )


def _check_names(names: Sequence[object], example: str) -> None:
    if not names:
        raise UsageError(f"which names? Write it like: {example}")
    for name in names:
        if not isinstance(name, str) or not all(part for part in name.split(".")):
            raise UsageError(
                f"{name!r:.60} is not a name on the ranks, nor a path from one; write it like: {example}, or "
                f'"model.layers.3"'
            )


def _describe(session: Session, ranks: Ranks, names: Sequence[str]) -> dict[int, StateDescription]:
    names = tuple(dict.fromkeys(names))
    command = messages.DescribeState(session.connection.next_call_id(), ranks, names, f"compare {', '.join(names)}")
    return _run(session, command, StateDescription)


def _count(session: Session, found: Differences, replies: dict[int, StateDescription]) -> Differences:
    """Have the ranks compare the tensors that differ."""
    planned = plan_comparisons(found, replies)
    if not planned:
        return found
    ranks = tuple(sorted({rank for one in planned for rank in (one.source, *one.targets)}))
    command = messages.CompareTensors(session.connection.next_call_id(), ranks, planned)
    return with_numbers(found, _run(session, command, tuple[TensorDifference, ...]))


def _run(session: Session, command: messages.DescribeState | messages.CompareTensors, kind: type[T]) -> dict[int, T]:
    """Run a command; return the ranks' replies. Raises what failed there."""
    finished = session.foreground.run(command, on_output=Console(command.ranks, echo=True))
    session.raise_for_status(finished, command.ranks, label=command.label)
    return {rank: msgspec.convert(part.outcome.reply, kind) for part in finished.outcomes for rank in part.ranks}
