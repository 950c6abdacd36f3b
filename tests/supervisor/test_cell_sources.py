"""What is read from the sources of past cells."""

from __future__ import annotations

import pytest

from meshbook.supervisor.cell_sources import cells_to_replay, rank_dependent_names, size_dependent_names
from meshbook.wire.messages import HistoryEntry


def entry(source: str, *, setup: bool = False, status: str = "ok", ranks: tuple[int, ...] = (0, 1, 2)) -> HistoryEntry:
    return HistoryEntry(
        number=1, label="cell 1", source=source, ranks=ranks, started_at=0.0, seconds=1.0, status=status, setup=setup
    )


def replayed(*entries: HistoryEntry, new: tuple[int, ...] = (1,)) -> list[tuple[str, bool]]:
    return [(cell.source, cell.setup) for cell in cells_to_replay(entries, new)]


def test_setup_cells_are_replayed_and_of_others_those_that_define_something_in_their_order() -> None:
    cells = entry("import math"), entry("train()"), entry("build()", setup=True), entry("def f(): pass\nf()")
    assert replayed(*cells) == [("import math", False), ("build()", True), ("def f(): pass\nf()", False)]


def test_of_equal_cells_the_last_is_replayed() -> None:
    assert replayed(entry("x = 1"), entry("def f(): pass"), entry("x = 1")) == [
        ("def f(): pass", False),
        ("x = 1", False),
    ]


def test_a_cell_that_the_lost_rank_did_not_run_is_not_replayed() -> None:
    assert replayed(entry("import a", ranks=(0, 2)), entry("import b"), new=(0, 1)) == [("import b", False)]


@pytest.mark.parametrize("status", ["error", "interrupted", "lost"])
def test_a_setup_cell_that_did_not_end_well_gives_its_definitions_only(status: str) -> None:
    assert replayed(entry("import a\nbuild()", setup=True, status=status)) == [("import a\nbuild()", False)]


@pytest.mark.parametrize("status", ["ok", "error"])
def test_a_setup_cell_whose_text_is_run_again_without_setup_stays_a_setup_cell(status: str) -> None:
    again = entry("import a\nbuild()", status=status)
    assert replayed(entry("import a\nbuild()", setup=True), again) == [("import a\nbuild()", True)]
    assert replayed(again, entry("import a\nbuild()", setup=True), again) == [("import a\nbuild()", True)]


def test_a_setup_cell_that_fails_when_it_is_run_again_as_one_gives_its_definitions_only() -> None:
    cells = entry("import a\nbuild()", setup=True), entry("import a\nbuild()", setup=True, status="error")
    assert replayed(*cells) == [("import a\nbuild()", False)]


def test_a_cell_that_waits_until_the_mesh_is_healed_is_not_replayed_before() -> None:
    assert replayed(entry("x = 1", status="running")) == []


def test_a_cell_with_magics_may_define_something_too() -> None:
    assert replayed(entry("%matplotlib inline\nimport a"), entry("!ls")) == [("%matplotlib inline\nimport a", False)]


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["is_main = rank == 0"], ("is_main",)),
        (["a = 1\nb = a"], ()),
        (["if rank == 0:\n    level = 1\nelse:\n    level = 2"], ("level",)),
        (["me = dist.get_rank()", "mine = me * 2", "other = 3"], ("me", "mine")),
        (["seed = 100 + local_rank", "seed += 1"], ("seed",)),
        (["import os\nr = int(os.environ['RANK'])"], ("r",)),
        (["%time\nx, (y, z) = rank, (1, 2)"], ("x", "y", "z")),
        (["for i in range(rank):\n    total = i"], ("i", "total")),
        (["with open(f'{rank}.txt') as file:\n    text = file.read()"], ("file", "text")),
        (["def f():\n    return rank\nstep = 1"], ()),
        (["try:\n    x = rank\nexcept ValueError:\n    y = 1"], ("x",)),
        (["!ls rank"], ()),
        (["this is not python"], ()),
    ],
)
def test_names_that_are_computed_from_the_rank_are_found(sources: list[str], names: tuple[str, ...]) -> None:
    assert rank_dependent_names(sources) == names


def test_a_rank_that_the_mesh_did_not_have_runs_the_cells_of_the_whole_mesh() -> None:
    entries = [
        HistoryEntry(
            number=1,
            label=source,
            source=source,
            ranks=ranks,
            started_at=0.0,
            seconds=0.1,
            status="ok",
            whole_mesh=whole_mesh,
        )
        for source, ranks, whole_mesh in (("import a", (0, 1), True), ("import b", (0,), False))
    ]
    assert [cell.source for cell in cells_to_replay(entries, (2,))] == ["import a"]


def test_names_that_are_computed_from_the_number_of_ranks_are_found() -> None:
    sources = [
        "share = 64 // world_size\nlr = 0.1 * dist.get_world_size()",
        "half = share // 2\nmine = rank\nworld = int(os.environ['WORLD_SIZE'])",
    ]
    assert size_dependent_names(sources) == ("half", "lr", "share", "world")
