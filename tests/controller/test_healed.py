"""What a heal says of the names that new ranks have, lack, and could have."""

from __future__ import annotations

from typing import Any

from meshbook.controller.healed import Healed
from meshbook.wire.messages import MeshHealed, MeshInfo

INFO = MeshInfo("m", None, (), 1, 0.0, 1, "ready", (), ())


def lines(**found: Any) -> list[str]:
    healed = MeshHealed(**{"call": "c", "info": INFO, "ranks": (1,), "seconds": 0.5, **found})  # type: ignore[arg-type]
    return str(Healed.of(healed)).splitlines()[1:]


def test_what_the_others_hold_alike_is_named_with_the_line_that_copies_it() -> None:
    missing = {1: {"step": "alike on ranks 0,2", "loss": "it differs between the other ranks"}}
    assert lines(missing=missing, alike=("step",)) == [
        "not on rank 1: step (alike on ranks 0,2)",
        "not on rank 1: loss (it differs between the other ranks)",
        "flags and counters may differ by rank; if these do not: %mesh heal --copy step",
    ]


def test_many_names_are_counted_and_not_listed() -> None:
    names = tuple(f"name{number}" for number in range(20))
    *_, last = lines(missing={1: dict.fromkeys(names, "alike on ranks 0,2")}, alike=names)
    assert last.endswith("if these do not: %mesh heal --copy, which copies these 20, or some by name")


def test_what_setup_cells_have_made_is_said_once_and_lacks_nothing_where_nothing_is_known_to_be_wrong() -> None:
    kept = {1: {"cfg": "alike on ranks 0,2", "loader": "whether it is equal on the others is not known (DataLoader)"}}
    assert lines(kept=kept, missing={1: {"cfg": "alike on ranks 0,2"}}) == [
        "as setup cells made it on rank 1: cfg (alike on ranks 0,2)",
        "as setup cells made it on rank 1: loader (whether it is equal on the others is not known (DataLoader))",
    ]
    assert Healed.of(MeshHealed("c", INFO, (1,), 0.5, kept=kept, missing={1: {}})).complete  # type: ignore[arg-type]


def test_names_that_are_copied_later_are_said_without_a_new_process() -> None:
    healed = MeshHealed("c", INFO, (), 0.1, restored={1: {"step": (0, "alike on ranks 0,2")}}, copied_to=(1,))  # type: ignore[arg-type]
    assert str(Healed.of(healed)) == "step from rank 0 (alike on ranks 0,2), copied to rank 1"
    healed = MeshHealed("c", INFO, (), 0.1, missing={1: {"stpe": "no other rank has it"}}, copied_to=(1,))  # type: ignore[arg-type]
    assert str(Healed.of(healed)).splitlines() == [
        "nothing was copied to rank 1",
        "not on rank 1: stpe (no other rank has it)",
    ]
