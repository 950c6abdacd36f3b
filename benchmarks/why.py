"""Every hang of the zoo, on three ranks each: seconds to an answer that was asked for, and to one that comes unasked.

Asked: `mesh.why()`, once it names the guilty ranks, their line and the kind. Unasked: from sending the cell until what
was found stands under it. Three meshes are at it at once, as many ranks as a small notebook has, on one machine.

    python -m benchmarks.why [--quick]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.controller.subscription import MeshSubscription
from meshbook.wire.messages import FoldedItem, Notice, RankDisplay
from tests.zoo.hangs import HANGS, Hang

RANKS = 3
ASKED_LIMIT_S, UNASKED_LIMIT_S = 3.0, 15.0

_MESHES = 3
_QUICK = 3
# Seconds until it is taken for granted that nothing will be said any more.
_PATIENCE_S = 25.0


@dataclass(frozen=True)
class Answers:
    """What was said of one hang. Seconds; None: nothing, or not what is so."""

    hang: Hang
    asked: float | None
    named_after: float | None  # since the cell was sent: from then on a question was answered rightly
    unasked: float | None
    said: str


def measure(quick: bool, folder: Path) -> Report:
    report = Report("why", f"why does it hang? {RANKS} ranks")
    hangs = HANGS[:: max(1, len(HANGS) // _QUICK)][:_QUICK] if quick else HANGS
    with ThreadPoolExecutor(_MESHES) as pool:
        parts = [hangs[first::_MESHES] for first in range(_MESHES)]
        found = [answers for part in pool.map(all_of, parts) for answers in part]
    report.add("asked: mesh.why()", [one.asked for one in found if one.asked is not None], "s")
    report.add("asked: named from then on", [one.named_after for one in found if one.named_after is not None], "s")
    silent = [one for one in found if stands_still(one.hang)]
    report.add("unasked: it stands under the cell", [one.unasked for one in silent if one.unasked is not None], "s")
    worst_asked = max(one.asked if one.asked is not None else float("inf") for one in found)
    worst_unasked = max(one.unasked if one.unasked is not None else float("inf") for one in silent)
    report.promise(f"the slowest answer to a question, of {len(found)} hangs", worst_asked, ASKED_LIMIT_S, "s")
    report.promise(f"the slowest answer unasked, of {len(silent)} hangs", worst_unasked, UNASKED_LIMIT_S, "s")
    slowest = max(silent, key=lambda one: one.unasked or 0.0)
    stood = f", in a cell that had come to it after {slowest.named_after:.1f} s" if slowest.named_after else ""
    report.note(f"slowest unasked: {slowest.hang.name}, {slowest.unasked or 0.0:.1f} s{stood}")
    for one in found:
        if one.asked is None:
            report.note(f"asked, it was not told who is to blame: {one.hang.name}")
        if not stands_still(one.hang):
            report.note(f"no answer unasked, as it should be: {one.hang.name}")
        elif one.unasked is None:
            report.note(f"unasked, nothing was said: {one.hang.name}")
        elif one.hang.kind not in one.said and one.said:
            report.note(f"unasked, {one.said} was said instead of {one.hang.kind}: {one.hang.name}")
    return report


def stands_still(hang: Hang) -> bool:
    """Whether something is to be said unasked: not while input() asks, for its question stands under the cell, and not
    while a straggler's collectives go on one after the other."""
    return not hang.asks and hang.kind != "straggler"


def all_of(hangs: Sequence[Hang]) -> list[Answers]:
    """One mesh's share."""
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        return [answers_to(mesh, hang) for hang in hangs]


def answers_to(mesh: Mesh, hang: Hang) -> Answers:
    """Let it hang, ask, and wait until it is told unasked."""
    told = threading.Event()
    told_at: list[float] = []

    def hear(items: tuple[FoldedItem, ...]) -> None:
        if any(isinstance(item, RankDisplay) and isinstance(item.item, Notice) for item in items) and not told_at:
            told_at.append(time.monotonic())
            told.set()

    with MeshSubscription(mesh.session, max_updates_per_s=2.0) as onlooker:
        options: dict[str, Any] = {"on_input": lambda _: None} if hang.asks else {}
        command = mesh.session.cell_command(hang.source, mesh.ranks, allow_input=hang.asks, label="the cell")
        began = time.monotonic()
        future = mesh.session.request(command, on_output=hear, **options)
        try:
            asked, named_after = ask(mesh, hang, began)
            if stands_still(hang):
                told.wait(max(0.1, began + _PATIENCE_S - time.monotonic()))
            kinds = [finding.kind for finding in onlooker.snapshot.findings]
        finally:
            mesh.session.interrupt(mesh.ranks, target=command.call)
            future.result(_PATIENCE_S)
    return Answers(hang, asked, named_after, told_at[0] - began if told_at else None, ", ".join(kinds))


def ask(mesh: Mesh, hang: Hang, began: float) -> tuple[float | None, float | None]:
    """Ask until the answer is right; how long that answer took, and when since the beginning it came."""
    while time.monotonic() < began + _PATIENCE_S:
        why = mesh.why()
        first = why.findings[0]
        if (first.kind, first.ranks, first.line) == (hang.kind, hang.ranks, hang.line):
            return why.seconds, time.monotonic() - began
        time.sleep(0.2)
    return None, None


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
