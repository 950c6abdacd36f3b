"""Each animal of the zoo is let loose on three ranks, explained, and caught again.

A hang stands when `mesh.why()` says twice in a row who is to blame; what is asserted is that it says so of the right
rank, line and kind, within twice the three seconds that it may take. Then Stop ends the cell, and the next one works.

A mesh ends by itself what some ranks have left and others wait in; here that is switched off, but for the last test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshbook.controller.console import Console
from meshbook.controller.mesh import Mesh
from meshbook.controller.reports import Why
from meshbook.controller.running import submit_command
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, RankLost
from tests.budget import WAIT_S, when
from tests.standstill import stopped
from tests.zoo.hangs import HANGS, Hang

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Seconds in which a hang must be standing and explained; a crowded machine needs a few.
STANDS_WITHIN_S = WAIT_S
# ... and in which `mesh.why()` must answer: four times the promise.
ANSWERS_WITHIN_S = 12.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(3, end_on_error=False) as mesh:
        yield mesh


def let_loose(mesh: Mesh, source: str, *, asks: bool = False) -> Any:
    """The future of a cell."""
    command = mesh._session.cell_command(source, mesh.ranks, allow_input=asks, label="the cell")
    console = Console(mesh.ranks, echo=False)
    if not asks:
        return submit_command(mesh._session, command, console)
    session = mesh._session
    source = session.request(command, on_output=console, on_input=lambda *_: None)  # somebody who never answers
    return session.future(source, command, lambda finished: finished)


def is_told(why: Why, hang: Hang) -> bool:
    """Whether the first finding says all that must be said."""
    finding = why.findings[0]
    reported = finding.kind, finding.ranks, finding.line, finding.others
    return reported == (hang.kind, hang.ranks, hang.line, hang.waiting)


def explained(mesh: Mesh, hang: Hang) -> Why:
    """What is said of a hang once it stands."""
    deadline = time.monotonic() + STANDS_WITHIN_S
    in_a_row = 0
    while time.monotonic() < deadline:
        why = mesh.why()
        in_a_row = in_a_row + 1 if is_told(why, hang) else 0
        if in_a_row == (1 if hang.steps else 2):
            return why
    finding = why.findings[0]
    wanted = f"{hang.kind}, ranks {hang.ranks}, line {hang.line}, because of it {hang.waiting}"
    got = f"{finding.kind}, ranks {finding.ranks}, line {finding.line}, because of it {finding.others}"
    pytest.fail(f"wanted {wanted}; got {got}:\n{why.text}\n\n{mesh.stacks(threads=True)}", pytrace=False)


@contextmanager
def loose(mesh: Mesh, hang: Hang) -> Iterator[None]:
    """A hang runs, and is stopped at the end; afterwards the mesh works as if nothing had been."""
    future = let_loose(mesh, hang.source, asks=hang.asks)
    try:
        yield
    finally:
        mesh.interrupt()
        future.exception(WAIT_S)
    works = mesh.run("t = torch.ones(1); dist.all_reduce(t); int(t.item())", timeout=WAIT_S, echo=False)
    assert set(works.values.values()) == {len(mesh.ranks)}


# The first of each kind, which the gate has too.
FIRST_OF_KIND = {hang.kind: hang for hang in reversed(HANGS)}.values()


@pytest.mark.parametrize(
    "hang",
    [pytest.param(hang, marks=() if hang in FIRST_OF_KIND else pytest.mark.thorough) for hang in HANGS],
    ids=lambda hang: hang.name,
)
def test_why_names_the_rank_the_line_and_the_kind_and_the_next_cell_works(mesh: Mesh, hang: Hang) -> None:
    with loose(mesh, hang):
        why = explained(mesh, hang)
        finding = why.findings[0]
        assert len(why.findings) == 1, why.text
        assert finding.cell == "the cell"
        assert why.seconds <= ANSWERS_WITHIN_S
        if not hang.steps:
            assert finding.sure or "Perhaps" in why.text
        print(f"\n{hang.name}, in {why.seconds:.2f} s:\n{why.text}")


def test_a_stopped_rank_is_named_with_the_command_that_lets_it_go_on(mesh: Mesh) -> None:
    source = "import time\nif rank == 1:\n    while True: time.sleep(0.01)  # guilty\ndist.barrier()"
    hang = Hang("stopped", "stopped", (1,), source)
    pid = next(rank.pid for rank in mesh.status().ranks if rank.rank == 1)
    assert pid is not None
    with loose(mesh, hang):
        explained(mesh, Hang("runs", "missing-from-collective", (1,), source))
        with stopped(pid):
            why = explained(mesh, hang)
            assert f"kill -CONT {pid}" in why.text


def test_ranks_that_only_compute_are_not_accused(mesh: Mesh) -> None:
    source = "x = torch.ones(64, 64)\nfor step in range(10**9):\n    x = x @ x\n    dist.all_reduce(x)"
    with loose(mesh, Hang("slow", "slow", (0, 1, 2), source)):
        when(lambda: all(rank.call is not None for rank in mesh.why().snapshots))
        accusations = [""]
        for _ in range(5):
            why = mesh.why()
            finding = why.findings[0]
            # On a crowded machine one may be late, or stand still in one look; a hang is what is told twice in a row.
            is_accused = finding.sure and finding.kind not in ("slow", "straggler")
            accusations.append(why.text if is_accused else "")
            assert not all(accusations[-2:]), "\n".join(accusations)


def test_an_idle_mesh_says_so(mesh: Mesh) -> None:
    assert mesh.why().findings[0].kind == "idle"
    assert mesh.why().text.startswith("Nothing runs: ranks 0-2 wait for a cell.")


def test_sizes_for_which_gloo_ends_a_process_are_told_as_a_mismatch() -> None:
    with create_mesh(3) as mesh:
        source = "x = torch.ones(4 if rank == 2 else 4_000_000)\ndist.all_reduce(x)"
        assert isinstance(let_loose(mesh, source).exception(WAIT_S), RankLost)
        finding = mesh.why().findings[0]
        assert (finding.kind, finding.ranks, finding.line) == ("shape-mismatch", (2,), 2), mesh.why().text


# Hangs in which a rank has left the cell, and nothing else of it will come to the collective.
LEFT = {"raised-before-collective", "left-early", "send-without-receive", "alone-in-collective"}


def test_where_a_rank_has_left_the_cell_the_others_are_released_and_nobody_need_ask() -> None:
    hangs = [hang for hang in HANGS if hang.kind in LEFT]
    assert {hang.kind for hang in hangs} == LEFT
    with create_mesh(3) as mesh:
        for hang in hangs:
            error = let_loose(mesh, hang.source).exception(WAIT_S)
            assert isinstance(error, CellError), (hang.name, error)
            waiting = {rank for one in error.released for rank in one.ranks}
            assert waiting == set(hang.waiting or hang.ranks), (hang.name, str(error))
            works = mesh.run("t = torch.ones(1); dist.all_reduce(t); int(t.item())", timeout=WAIT_S, echo=False)
            assert set(works.values.values()) == {3}
