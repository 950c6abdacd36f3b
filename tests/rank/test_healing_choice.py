"""From which rank a new rank takes a name: rules as tables."""

from __future__ import annotations

import pytest

from meshbook.rank.healing.choice import NO_MEMBER, Choice, Held, choose_sources

AXES = {"dp": 2, "tp": 2}  # ranks 0 1 / 2 3


def choice(
    digests: dict[int, str | None], lost: int, axes: dict[str, int] = AXES, own: Held | None = None, **options: object
) -> Choice | None:
    held = {rank: {"x": Held("value", "Thing", digest)} for rank, digest in digests.items()}
    return choose_sources(held, {"x": own} if own else {}, lost, axes, **options).get("x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("digests", "lost", "source", "why"),
    [
        ({0: "a", 2: "a", 3: "a"}, 1, 0, "equal on all others"),
        ({0: "a", 2: "a", 3: "b"}, 1, 3, "replica on dp"),  # columns 0-2 and 1-3
        ({0: "a", 2: "b", 3: "b"}, 1, 0, "replica on tp"),  # rows 0-1 and 2-3
        ({0: "a", 2: "b", 3: "c"}, 1, None, "it differs between the other ranks"),
        ({0: "a", 2: None, 3: "a"}, 1, None, "whether it is equal on the others is not known (Thing)"),
        ({0: "a", 3: "a"}, 1, 0, "equal on all others"),
        ({2: "a"}, 1, 2, "rank 2 is the only other: nothing to compare with"),
    ],
)
def test_a_value_comes_from_a_rank_that_shows_that_it_held_the_same(
    digests: dict[int, str | None], lost: int, source: int | None, why: str
) -> None:
    assert choice(digests, lost) == Choice(source, why)


def test_a_generators_state_is_not_taken_from_a_rank_that_can_be_compared_with_none() -> None:
    alone = {0: {"x": Held("random", "Tensor", "a")}}
    assert choose_sources(alone, {}, 1, {"rank": 2})["x"].source is None
    equal = {rank: {"x": Held("random", "Tensor", "a")} for rank in (0, 2, 3)}
    assert choose_sources(equal, {}, 1, AXES)["x"].source == 0


def test_a_sharded_value_is_not_taken_from_the_only_other_rank() -> None:
    alone = {0: {"x": Held("state", "FSDPLinear", "a", is_sharded=True)}}
    why = "it is sharded, and rank 0, the only other, holds another part"
    assert choose_sources(alone, {}, 1, {"rank": 2})["x"] == Choice(None, why)


def test_a_line_whose_others_are_all_lost_has_no_source() -> None:
    # ranks 1 and 3 are lost: along dp nobody has what they had, and 0 and 2 differ along tp from nobody known
    assert choice({0: "a", 2: "b"}, 1) == Choice(None, "it differs between the other ranks")


def test_what_only_some_of_the_others_have_is_not_copied() -> None:
    held = {0: {"x": Held("value", "int", "a")}, 2: {}, 3: {"x": Held("value", "int", "a")}}
    assert choose_sources(held, {}, 1, AXES)["x"] == Choice(None, "only ranks 0,3 have it")


def test_a_plain_value_that_cells_compute_from_the_rank_is_not_taken_from_ranks_that_agree() -> None:
    held = {rank: {"x": Held("plain", "bool", "a")} for rank in (0, 2, 3)}
    assert choose_sources(held, {}, 1, AXES, ("x",))["x"] == Choice(None, "cells compute it from the rank")
    assert choose_sources(held, {"x": Held("plain", "bool", "b")}, 1, AXES, ("x",)) == {}
    model = {rank: {"x": Held("state", "DDP", "a")} for rank in (0, 2, 3)}
    assert choose_sources(model, {}, 1, AXES, ("x",))["x"].source == 0


@pytest.mark.parametrize("kind", ["definition", "opaque"])
def test_definitions_and_what_cannot_be_copied_are_kept_where_cells_made_them(kind: str) -> None:
    held = {rank: {"x": Held(kind, "file")} for rank in (0, 2, 3)}
    assert choose_sources(held, {"x": Held(kind, "file")}, 1, AXES) == {}
    assert choose_sources(held, {}, 1, AXES)["x"].source is None


def test_what_cannot_be_compared_is_left_as_replayed_cells_made_it() -> None:
    held = {rank: {"x": Held("value", "Socket")} for rank in (0, 2, 3)}
    assert choose_sources(held, {"x": Held("value", "Socket")}, 1, AXES) == {}
    assert choose_sources(held, {}, 1, AXES)["x"].source is None


def test_a_module_whose_buffers_alone_differ_comes_with_those_of_the_source_and_says_so() -> None:
    held = {rank: {"x": Held("state", "DDP", "a", f"buffers {rank}")} for rank in (0, 2, 3)}
    found = choose_sources(held, {}, 1, AXES)["x"]
    assert found == Choice(
        0, "equal on all others; its buffers and extra state may differ there, and are those of rank 0"
    )


@pytest.mark.parametrize("attributes", [("p=0.1",) * 3, ("rank=0", "rank=2", "rank=3")])
def test_the_attributes_of_a_module_come_with_it_where_they_are_equal(attributes: tuple[str, ...]) -> None:
    held = {
        rank: {"x": Held("state", "Net", "a", "buffers", found)}
        for rank, found in zip((0, 2, 3), attributes, strict=True)
    }
    found = choose_sources(held, {}, 1, AXES)["x"]
    assert found.with_attributes == (len(set(attributes)) == 1)
    assert ("its attributes differ" in found.why) != found.with_attributes


def groups(**members: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, ranks) for name, ranks in members.items())


def test_a_process_group_is_the_one_that_the_new_rank_is_a_member_of() -> None:
    rows = {
        0: {"x": Held("group", "process group", groups=groups(a=(0, 1)))},
        2: {"x": Held("group", "process group", groups=groups(b=(2, 3)))},
        3: {"x": Held("group", "process group", groups=groups(b=(2, 3)))},
    }
    assert choose_sources(rows, {}, 1, AXES)["x"].groups == ("a",)


def test_a_group_that_the_new_rank_is_no_member_of_is_no_group_there() -> None:
    held = {
        0: {"x": Held("group", "process group", groups=groups(a=(0, 2)))},
        2: {"x": Held("group", "process group", groups=groups(a=(0, 2)))},
        3: {"x": Held("non-member", "int")},
    }
    assert choose_sources(held, {}, 1, AXES)["x"].groups == (NO_MEMBER,)


def test_where_all_others_are_no_members_of_a_group_it_is_named_and_not_guessed() -> None:
    held = {rank: {"x": Held("non-member", "int")} for rank in (0, 2, 3)}
    found = choose_sources(held, {}, 1, AXES)["x"]
    assert (found.source, found.groups) == (None, ())
    assert "whether this rank was one is not known" in found.why
    assert choose_sources(held, {"x": Held("group", "process group", groups=groups(a=(1,)))}, 1, AXES) == {}


def test_what_a_rank_has_in_the_place_of_a_group_of_others_is_not_guessed() -> None:
    held = {0: {"x": Held("group", "process group", groups=groups(a=(0,)))}}
    held |= {rank: {"x": Held("plain", "NoneType", "none")} for rank in (2, 3)}
    found = choose_sources(held, {}, 1, AXES)["x"]
    assert (found.source, found.groups) == (None, ())


def test_a_mesh_of_devices_is_made_of_the_new_ranks_groups() -> None:
    held = {
        0: {"x": Held("mesh", "DeviceMesh", groups=groups(a=(0, 2), r=(0, 1)))},
        2: {"x": Held("mesh", "DeviceMesh", groups=groups(a=(0, 2), s=(2, 3)))},
        3: {"x": Held("mesh", "DeviceMesh", groups=groups(b=(1, 3), s=(2, 3)))},
    }
    assert choose_sources(held, {}, 1, AXES)["x"].groups == ("b", "r")
