"""From which rank a new rank takes a name: rules as tables."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from meshbook.rank.healing.choice import NO_MEMBER, Choice, Held, Rules, choose_sources

AXES = {"dp": 2, "tp": 2}  # ranks 0 1 / 2 3
ALIKE = "alike on ranks 0,2-3"


def model(digest: str | None = "a", buffers: str = "b", attributes: str | None = None, **said: object) -> Held:
    rest = {"buffers": buffers, "gradients": "g"}
    return Held("state", "Net", digest, rest, attributes, is_telling=True, **said)  # type: ignore[arg-type]


def choice(held: dict[int, Held], own: Held | None = None, lost: int = 1, **rules: object) -> Choice | None:
    """Return what rank 1 takes for `x` where the others hold these."""
    others = {rank: {"x": one} for rank, one in held.items()}
    return choose_sources(others, {"x": own} if own else {}, lost, Rules(AXES, **rules)).get("x")  # type: ignore[arg-type]


def of_all(one: Held) -> dict[int, Held]:
    return dict.fromkeys((0, 2, 3), one)


def source(held: dict[int, Held], own: Held | None = None, **rules: object) -> int | None:
    found = choice(held, own, **rules)
    assert found is not None
    return found.source


# ---- proof


@pytest.mark.parametrize(
    ("digests", "lost", "source", "why"),
    [
        ({0: "a", 2: "a", 3: "a"}, 1, 0, "equal on all others"),
        ({0: "a", 2: "a", 3: "b"}, 1, 3, "replica on dp"),  # columns 0-2 and 1-3
        ({0: "a", 2: "b", 3: "b"}, 1, 0, "replica on tp"),  # rows 0-1 and 2-3
        ({0: "a", 2: "b", 3: "c"}, 1, None, "it differs between the other ranks"),
        ({0: "a", 2: None, 3: "a"}, 1, None, "whether it is equal on the others is not known (Net)"),
        ({0: "a", 3: "a"}, 1, 0, "equal on all others"),
        # ranks 1 and 3 are lost: along dp nobody has what they had, and 0 and 2 differ along tp from nobody known
        ({0: "a", 2: "b"}, 1, None, "it differs between the other ranks"),
    ],
)
def test_a_value_comes_from_a_rank_that_shows_that_it_held_the_same(
    digests: dict[int, str | None], lost: int, source: int | None, why: str
) -> None:
    assert choice({rank: model(digest) for rank, digest in digests.items()}, lost=lost) == Choice(source, why)


def test_a_replica_needs_no_second_one_and_may_be_the_only_other_rank() -> None:
    assert choice({3: model(replicas=(1, 3))}) == Choice(3, "a replica")
    # both ranks of a diagonal are lost: 0 holds what 2 held, 3 what 1 held, and the two are different
    assert choice({0: model("a", replicas=(0, 2)), 3: model("b", replicas=(1, 3))}) == Choice(3, "a replica")


def test_replicas_that_have_come_to_differ_are_no_source() -> None:
    differing = {0: model("a", replicas=(0, 1, 2)), 2: model("b", replicas=(0, 1, 2))}
    assert choice(differing) == Choice(None, "its replicas on ranks 0,2 differ")
    assert choice(differing, copy=("x",)) == Choice(None, "its replicas on ranks 0,2 differ")


def test_what_is_alike_on_the_others_is_no_proof_if_it_may_be_so_by_chance() -> None:
    found = choice(of_all(Held("value", "list", "a")))
    assert found == Choice(None, ALIKE, is_offered=True)
    along = {0: Held("plain", "int", "a"), 2: Held("plain", "int", "a"), 3: Held("plain", "int", "b")}
    assert choice(along) == Choice(None, "alike on ranks 0,2-3 along dp", is_offered=True)
    assert choice({2: model()}) == Choice(None, "rank 2 is the only other: nothing to compare with", is_offered=True)


def test_a_generators_state_is_not_taken_from_a_rank_that_can_be_compared_with_none() -> None:
    assert source({0: Held("random", "Tensor", "a", is_telling=True)}) is None
    state = Held("random", "Tensor", "a", is_telling=True)
    assert source(of_all(state), Held("random", "Tensor", "b")) == 0
    found = choice({0: state, 2: state, 3: Held("random", "Tensor", "c")}, Held("random", "Tensor", "b"), lost=2)
    assert found is not None
    assert not found.is_dropped


def test_a_sharded_value_is_not_taken_from_the_only_other_rank() -> None:
    why = "it is sharded, and rank 0, the only other, holds another part"
    assert choice({0: model(is_sharded=True)}, copy=("x",)) == Choice(None, why)


def test_what_only_some_of_the_others_have_is_not_copied_unless_it_is_named() -> None:
    held = {0: {"x": model()}, 2: {}, 3: {"x": model()}}
    for copy, source in (((), None), (None, None), (("x",), 0)):
        found = choose_sources(held, {}, 1, Rules(AXES, copy=copy))["x"]
        assert (found.source, found.why) == (source, "only ranks 0,3 have it")


# ---- what the user says


@pytest.mark.parametrize("copy", [("x",), None], ids=["named", "all that is alike"])
def test_what_is_alike_is_copied_if_the_user_says_so(copy: Collection[str] | None) -> None:
    for own in (None, Held("value", "list", "b")):
        assert choice(of_all(Held("value", "list", "a")), own, built=("x",), copy=copy) == Choice(0, ALIKE)


def test_a_name_that_nobody_has_is_said() -> None:
    assert choose_sources({0: {}}, {}, 1, Rules(AXES, copy=("y",))) == {"y": Choice(None, "no other rank has it")}


def test_what_cannot_be_compared_is_copied_if_it_is_named_alone() -> None:
    opaque = of_all(Held("value", "Socket"))
    assert (source(opaque), source(opaque, copy=None), source(opaque, copy=("x",))) == (None, None, 0)


# ---- what the new rank has made


def test_what_a_setup_cell_has_made_stays_and_is_named_where_the_others_hold_something_else() -> None:
    flags = of_all(Held("plain", "bool", "a"))
    assert choice(flags, Held("plain", "bool", "a"), built=("x",)) is None
    assert choice(flags, Held("plain", "bool", "b"), built=("x",)) == Choice(None, ALIKE, is_kept=True, is_offered=True)
    found = choice({0: model("a"), 2: model("b"), 3: model("c")}, model("d"), built=("x",))
    assert found == Choice(None, "it differs between the other ranks", is_kept=True)
    assert source(of_all(model("a")), model("d"), built=("x",)) == 0  # the model that it has made is trained
    assert choice(of_all(model("a")), model("a"), built=("x",)) is None
    other = Held("state", "Net static_graph=True", "a", is_telling=True)  # of equal parameters, and made otherwise
    assert source(of_all(model("a")), other, built=("x",)) == 0


def test_what_cannot_be_compared_stays_as_setup_cells_made_it_and_is_named() -> None:
    found = choice(of_all(Held("value", "Socket")), Held("value", "Socket"), built=("x",))
    assert found == Choice(None, "whether it is equal on the others is not known (Socket)", is_kept=True, is_fine=True)


def test_a_constant_that_later_cells_have_changed_does_not_stay() -> None:
    found = choice(of_all(Held("plain", "int", "a")), Held("plain", "int", "b"))
    assert found == Choice(
        None, f"cells have changed it since it was defined; {ALIKE}", is_dropped=True, is_offered=True
    )


def test_a_plain_value_that_cells_compute_from_the_rank_is_taken_from_others_if_it_is_named_alone() -> None:
    flags = of_all(Held("plain", "bool", "a"))
    assert choice(flags, rank_dependent=("x",)) == Choice(None, "cells compute it from the rank")
    assert choice(flags, rank_dependent=("x",), copy=None) == Choice(None, "cells compute it from the rank")
    assert choice(flags, rank_dependent=("x",), copy=("x",)) == Choice(0, ALIKE)
    own = Held("plain", "bool", "b")
    kept = Choice(None, "cells compute it from the rank", is_kept=True, is_fine=True)
    assert choice(flags, own, rank_dependent=("x",)) == kept
    roles = {rank: Held("plain", "str", f"{rank}") for rank in (0, 2, 3)}
    assert choice(roles, own, rank_dependent=("x",)) is None  # each has its own
    assert source(of_all(model()), rank_dependent=("x",)) == 0
    assert choice({0: Held("value", "Tensor", "a")}, rank_dependent=("x",)) == Choice(
        None, "cells compute it from the rank"
    )


@pytest.mark.parametrize("kind", ["definition", "opaque"])
def test_definitions_and_what_cannot_be_copied_are_kept_where_cells_made_them(kind: str) -> None:
    held = of_all(Held(kind, "file"))
    assert choice(held, Held(kind, "file")) is None
    assert source(held) is None


def test_what_is_equal_comes_along_where_an_object_that_it_may_refer_to_is_replaced() -> None:
    others = {rank: {"net": model(), "opt": model("o"), "step": Held("plain", "int", "s")} for rank in (0, 2, 3)}
    own = {"net": Held("state", "DDP static_graph=True", "a"), "opt": model("o"), "step": Held("plain", "int", "s")}
    found = choose_sources(others, own, 1, Rules(AXES, built=own))
    assert {name: one.source for name, one in found.items()} == {"net": 0, "opt": 0}
    assert choose_sources(others, own | {"net": model()}, 1, Rules(AXES, built=own)) == {}


# ---- modules


def test_a_module_whose_buffers_alone_differ_comes_with_those_of_the_source_and_says_so() -> None:
    found = choice({rank: model("a", f"buffers {rank}") for rank in (0, 2, 3)})
    assert found == Choice(0, "equal on all others; buffers of rank 0: they differ there")


def test_attributes_stay_as_a_setup_cell_made_them_and_are_named_where_they_are_alike_on_the_others() -> None:
    alike, own = of_all(model("a", attributes="tau=0.5")), model("b", attributes="tau=1.0")
    assert choice(alike, own, built=("x",)) == Choice(0, "equal on all others", names_attributes=True)
    for copy in (("x",), None):  # named, and all that is alike
        named = choice(alike, own, built=("x",), copy=copy)
        assert named == Choice(0, "equal on all others", with_attributes=True)


@pytest.mark.parametrize(("own", "are"), [(None, "those of rank 0"), (model("b"), "as they were made here")])
def test_attributes_that_differ_on_the_others_are_said_to_be_whose_they_are(own: Held | None, are: str) -> None:
    found = choice({rank: model("a", attributes=f"rank={rank}") for rank in (0, 2, 3)}, own, built=("x",), copy=None)
    assert found == Choice(0, f"equal on all others; its attributes differ on the others, and are {are}")


# ---- groups


def groups(**members: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, ranks) for name, ranks in members.items())


def group(**members: tuple[int, ...]) -> Held:
    return Held("group", "process group", groups=groups(**members))


def test_a_process_group_is_the_one_that_the_new_rank_is_a_member_of() -> None:
    found = choice({0: group(a=(0, 1)), 2: group(b=(2, 3)), 3: group(b=(2, 3))})
    assert found is not None
    assert found.groups == ("a",)


def test_a_group_that_the_new_rank_is_no_member_of_is_no_group_there() -> None:
    found = choice({0: group(a=(0, 2)), 2: group(a=(0, 2)), 3: Held("non-member", "int")})
    assert found is not None
    assert found.groups == (NO_MEMBER,)


def test_where_all_others_are_no_members_of_a_group_it_is_named_and_not_guessed() -> None:
    held = of_all(Held("non-member", "int"))
    found = choice(held)
    assert found is not None
    assert (found.source, found.groups) == (None, ())
    assert "whether this rank was one is not known" in found.why
    assert choice(held, group(a=(1,))) is None


def test_what_a_rank_has_in_the_place_of_a_group_of_others_is_not_guessed() -> None:
    found = choice({0: group(a=(0,)), 2: Held("plain", "NoneType", "none"), 3: Held("plain", "NoneType", "none")})
    assert found is not None
    assert (found.source, found.groups) == (None, ())


def test_a_mesh_of_devices_is_made_of_the_new_ranks_groups() -> None:
    held = {
        0: Held("mesh", "DeviceMesh", groups=groups(a=(0, 2), r=(0, 1))),
        2: Held("mesh", "DeviceMesh", groups=groups(a=(0, 2), s=(2, 3))),
        3: Held("mesh", "DeviceMesh", groups=groups(b=(1, 3), s=(2, 3))),
    }
    found = choice(held)
    assert found is not None
    assert found.groups == ("b", "r")
