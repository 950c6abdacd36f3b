"""Every hang of the zoo, on three ranks each: seconds to an answer that was asked for, and to one that comes unasked.

Asked: `mesh.why()`, once it names the guilty ranks, their line and the kind. Unasked: from sending the cell until the
finding stands under it, or the cell has ended with it as its error. Three meshes hang at once.

    python -m benchmarks.why [--quick]
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.wire.messages import FoldedItem, Notice, RankDisplay
from tests.zoo.hangs import HANGS, Hang

RANKS = 3
ASKED_LIMIT_S, UNASKED_LIMIT_S = 3.0, 15.0

_MESHES = _QUICK = 3
# Seconds after which no answer is expected any more.
_PATIENCE_S = 25.0


def measure(quick: bool, folder: Path) -> Report:
    report = Report("why", f"why does it hang? {RANKS} ranks")
    hangs = HANGS[:: max(1, len(HANGS) // _QUICK)][:_QUICK] if quick else HANGS
    with ThreadPoolExecutor(_MESHES) as pool:
        parts = [hangs[first::_MESHES] for first in range(_MESHES)]
        found = {hang.name: seconds for part in pool.map(all_of, parts) for hang, seconds in part}
    asked = {name: asked for name, (asked, _) in found.items()}
    # Nothing is to be said while input() asks, nor while a straggler's collectives go on one after the other.
    silent = [hang.name for hang in hangs if not hang.asks and hang.kind != "straggler"]
    unasked = {name: found[name][1] for name in silent}
    for how, seconds, limit in (("asked", asked, ASKED_LIMIT_S), ("unasked", unasked, UNASKED_LIMIT_S)):
        report.add(f"{how}: seconds to the answer", [taken for taken in seconds.values() if taken < math.inf], "s")
        slowest = max(seconds, key=lambda name: seconds[name])
        report.promise(f"the slowest answer {how}, of {len(seconds)} hangs", seconds[slowest], limit, "s")
        report.note(f"slowest {how}: {slowest}; without an answer: {[n for n in seconds if seconds[n] == math.inf]}")
    return report


def all_of(hangs: Sequence[Hang]) -> list[tuple[Hang, tuple[float, float]]]:
    """One mesh's share: of each hang, seconds to the answer that was asked for and to the one unasked; inf: none."""
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        return [(hang, answer_seconds(mesh, hang)) for hang in hangs]


def answer_seconds(mesh: Mesh, hang: Hang) -> tuple[float, float]:
    """Let it hang, ask, and wait until a notice comes unasked."""
    noticed = threading.Event()
    noticed_at = math.inf

    def answered(_: object) -> None:
        nonlocal noticed_at
        noticed_at = min(noticed_at, time.monotonic())
        noticed.set()

    def on_output(items: tuple[FoldedItem, ...]) -> None:
        if any(isinstance(item, RankDisplay) and isinstance(item.item, Notice) for item in items):
            answered(items)

    options: dict[str, Any] = {"on_input": lambda _: None} if hang.asks else {}
    command = mesh.session.cell_command(hang.source, mesh.ranks, allow_input=hang.asks, label="the cell")
    began = time.monotonic()
    future = mesh.session.request(command, on_output=on_output, **options)
    future.add_done_callback(answered)  # with an error that says what the ranks had waited for
    try:
        asked = ask(mesh, hang, began)
        if not hang.asks and hang.kind != "straggler":
            noticed.wait(max(0.1, began + _PATIENCE_S - time.monotonic()))
    finally:
        mesh.session.interrupt(mesh.ranks, target=command.call)
        future.result(_PATIENCE_S)
    return asked, noticed_at - began


def ask(mesh: Mesh, hang: Hang, began: float) -> float:
    """Ask until the answer is right; how long that answer took."""
    while time.monotonic() < began + _PATIENCE_S:
        why = mesh.why()
        first = why.findings[0]
        if (first.kind, first.ranks, first.line) == (hang.kind, hang.ranks, hang.line):
            return why.seconds
        time.sleep(0.2)
    return math.inf


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
