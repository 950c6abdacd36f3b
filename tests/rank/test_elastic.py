"""The parts of `mesh.elastic` that need no mesh: what ranks agree on, digests, and states in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from meshbook.errors import UsageError
from meshbook.rank.elastic import contents
from meshbook.rank.elastic.agreement import (
    Begin,
    GoBack,
    HeldSnapshot,
    Manifest,
    Record,
    Request,
    Unit,
    byte_ranges,
    decide,
    describe_going_back,
    describe_resized,
    ended_everywhere,
    find_sources,
    keepers,
    replicated_names,
    units_to_copy,
    units_to_share,
)
from meshbook.rank.elastic.snapshots import Snapshot
from meshbook.rank.state.memory_digests import digest


def held(number: int, step: int = 0, *, loop: int = 0, is_end: bool = False, copies: bool = True) -> HeldSnapshot:
    return HeldSnapshot(number, loop, step, is_end, copies)


def record(*snapshots: HeldSnapshot, run: int = 1, is_open: bool = True, reached: int = 0, loop: int = 0) -> Record:
    return Record(run, "cell 1", "source", is_open, loop, reached, list(snapshots))


def request(known: Record | None, **changed: Any) -> Request:
    fields = {"key": "model", "every": 10, "restart": False, "call": "cell 2", "source": "source", "loop": 0}
    return Request(**{**fields, "problem": "", "record": known, **changed})


# ---- what ranks agree on


OVER = record(held(5, 50, is_end=True), is_open=False)
NEXT_LOOP = request(record(held(5, 50, is_end=True)), call="cell 1", loop=1)
OVER_ON_TWO = record(HeldSnapshot(5, 0, 50, True, True, 2), is_open=False)


BEGINNINGS = {
    "first": ([request(None), request(None)], 1),
    "ended well everywhere": ([request(OVER), request(OVER)], 2),
    "restart": ([request(record(held(1, 10)), restart=True)], 2),
    "no complete snapshot": ([request(record(run=4)), request(record(held(9, 90), run=3, is_open=False))], 5),
    "next loop of a cell": ([NEXT_LOOP, NEXT_LOOP], 1),
    "ranks have joined": ([request(OVER_ON_TWO), request(OVER_ON_TWO), request(None)], 2),
}


@pytest.mark.parametrize(("requests", "number"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_loop_begins_where_there_is_nothing_to_go_back_to(requests: list[Request], number: int) -> None:
    assert decide(requests) == Begin(number)


def test_runs_are_let_go_of_whose_cells_have_ended_well_on_all_ranks() -> None:
    requests = [request(None, ended=("a", "b")), request(None, ended=("b", "c"))]
    assert ended_everywhere(requests) == {"b"}
    assert ended_everywhere([*requests, request(None)]) == set()  # a new rank, which does not know


def test_all_ranks_go_back_to_the_newest_snapshot_and_a_new_rank_lacks_it() -> None:
    options = decide([request(record(held(3, 30), reached=37)), request(None)])
    assert isinstance(options, list)
    assert [(one.snapshot.step, one.lacking, one.reached, one.is_over) for one in options] == [(30, (1,), 37, False)]


def test_an_older_snapshot_is_the_second_choice_where_only_some_ranks_have_completed_the_newer() -> None:
    options = decide([request(record(held(2, 20), held(3, 30))), request(record(held(2, 20))), request(None)])
    assert isinstance(options, list)
    assert [(one.snapshot.step, one.lacking) for one in options] == [(30, (1, 2)), (20, (2,))]


def test_a_run_that_did_not_end_well_on_one_rank_goes_on() -> None:
    options = decide([request(record(held(1, 10), is_open=False)), request(record(held(1, 10)))])
    assert isinstance(options, list)


@pytest.mark.parametrize(("source", "goes_on"), [("source", True), ("another", False)])
def test_a_rank_lost_after_the_end_is_made_good_if_the_same_cell_is_run(source: str, goes_on: bool) -> None:
    over = record(held(5, 50, is_end=True), is_open=False)
    decision = decide([request(over, source=source), request(None, source=source)])
    assert isinstance(decision, list) is goes_on


def test_a_loop_before_the_interrupted_one_is_over() -> None:
    known = record(held(9, 10, loop=2), loop=2, reached=13)
    options = decide([request(known), request(known)])
    assert isinstance(options, list)
    assert (options[0].is_over, options[0].is_own_loop) == (True, False)
    options = decide([request(known, loop=2), request(known, loop=2)])
    assert isinstance(options, list)
    assert (options[0].is_over, options[0].is_own_loop, options[0].reached) == (False, True, 13)


def taken_by(world_size: int, number: int, step: int) -> HeldSnapshot:
    return HeldSnapshot(number, 0, step, False, True, world_size)


def test_a_loop_that_was_interrupted_on_another_number_of_ranks_goes_on_from_any_rank_that_holds_the_newest() -> None:
    on_two = [request(record(taken_by(2, 3, 30))), request(record(taken_by(2, 3, 30), taken_by(2, 4, 40), reached=41))]
    options = decide([*on_two, request(None)])
    assert isinstance(options, list)
    newest = options[0]
    assert (newest.is_resized, newest.snapshot.step, newest.source, newest.lacking) == (True, 40, 1, (0, 2))
    line = "elastic: goes on at step 41 (snapshot of step 40; 1 step is computed again); on 3 ranks, before on 2"
    assert describe_resized(newest, ["losses"]) == f"{line}; losses is each rank's own"


def test_snapshots_of_the_number_of_ranks_before_are_no_choice_once_there_is_one_of_the_present() -> None:
    held_both = record(taken_by(2, 3, 30), taken_by(3, 4, 30))
    options = decide([request(held_both), request(held_both), request(record())])
    assert isinstance(options, list)
    assert [(one.snapshot.number, one.is_resized) for one in options] == [(4, False)]


def test_what_is_equal_on_all_ranks_of_a_snapshot_is_found_by_name() -> None:
    manifests = [
        Manifest({"model": 2, "losses": 1}, [Unit(b"a", 1), Unit(b"b", 1), Unit(own, 1)]) for own in (b"x", b"y")
    ]
    assert replicated_names(manifests) == {"model"}


@pytest.mark.parametrize("field", ["key", "every", "restart", "loop"])
def test_ranks_that_call_it_differently_are_told_how(field: str) -> None:
    other = {"key": "other", "every": 11, "restart": True, "loop": 1}[field]
    with pytest.raises(UsageError, match=f"differs: .* on rank 0; {other} on ranks 1-2"):
        decide([request(None), request(None, **{field: other}), request(None, **{field: other})])


def test_what_is_wrong_is_said_once_for_ranks_that_say_the_same() -> None:
    with pytest.raises(UsageError, match=r"^ranks 0,2: no `x`$"):
        decide([request(None, problem="no `x`"), request(None), request(None, problem="no `x`")])


def test_the_line_that_is_printed() -> None:
    def line(step: int, reached: int, *ranks: HeldSnapshot | None) -> str:
        return describe_going_back(GoBack(1, held(1, step), False, True, reached, ranks))

    assert line(800, 812, held(1)) == "elastic: goes on at step 812 (snapshot of step 800; 12 steps are computed again)"
    assert "1 step is computed again; what ranks 1-2 held came from the others" in line(8, 9, held(1), None, None)
    assert "no step is computed again" in line(8, 8, held(1))


# ---- where units are


def manifest(*digests: str, size: int = 10_000) -> Manifest:
    return Manifest({"x": len(digests)}, [Unit(one.encode(), size) for one in digests])


def test_the_next_rank_is_sent_what_it_does_not_have() -> None:
    assert units_to_copy(manifest("same", "a", "b"), manifest("same", "c", "b")) == [1]


def test_small_units_that_are_not_everywhere_go_to_every_rank() -> None:
    parts = [manifest("same", "a", size=100), manifest("same", "b", size=100)]
    assert units_to_share(parts) == [[1], [1]]
    assert units_to_share([manifest("same", "a"), manifest("same", "b")]) == [[], []]


def test_what_every_rank_is_given_is_found_in_two_passes_over_each_part_however_many_ranks_there_are() -> None:
    num_passes = 0

    class CountedUnits(list[Unit]):
        def __iter__(self) -> Iterator[Unit]:
            nonlocal num_passes
            num_passes += 1
            return super().__iter__()

    parts = [manifest("same", str(rank), size=100) for rank in range(64)]
    counted = [Manifest(part.parts, CountedUnits(part.units)) for part in parts]
    assert units_to_share(counted) == [[1]] * 64
    assert num_passes <= 2 * 64


def test_units_side_by_side_are_one_piece_of_memory() -> None:
    part = manifest("a", "b", "c", "d", size=100)  # 128 bytes each, with what aligns the next
    assert list(byte_ranges(part, [0, 1, 3])) == [(0, 256), (384, 512)]
    assert list(byte_ranges(part, [])) == []


def test_a_lost_part_comes_from_replicas_and_from_the_next_rank() -> None:
    parts = [manifest("same", "a"), manifest("same", "b"), manifest("same", "c")]
    source = find_sources(1, parts, [held(1), None, held(1)])
    assert (source.ranks, source.why_not) == ([2, 2], "")
    source = find_sources(2, parts, [held(1), held(1), None])
    assert source.ranks == [0, 0]


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("", []),
        ("a", [0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaabbcc", [3, 4, 5, 6, 0, 1, 2]),
        ("aaaabbbb", [4, 5, 6, 7, 0, 1, 2, 3]),
        ("aaab", [3, 0, 1, 2]),  # three cannot all have theirs on the other machine
    ],
)
def test_another_machine_keeps_the_copies_of_a_rank_if_there_is_one(machines: str, expected: list[int]) -> None:
    found = keepers([Manifest({}, [], machine) for machine in machines])
    assert found == expected
    assert sorted(found) == list(range(len(machines)))  # each keeps those of one


@pytest.mark.parametrize("seed", range(50))
def test_no_machine_keeps_its_own_copies_unless_it_has_more_than_half_of_the_ranks(seed: int) -> None:
    draw = random.Random(seed)
    machines = [draw.choice("abcd") for _ in range(draw.randint(2, 24))]
    found = keepers([Manifest({}, [], machine) for machine in machines])
    assert sorted(found) == list(range(len(machines)))
    if 2 * max(map(machines.count, machines)) <= len(machines):
        assert all(machines[rank] != machines[keeper] for rank, keeper in enumerate(found))


def test_a_part_of_a_machine_that_is_lost_comes_from_the_other_one() -> None:
    parts = [
        Manifest({"x": 1}, [Unit(name.encode(), 10_000)], machine) for name, machine in zip("abcd", "mmnn", strict=True)
    ]
    sources = [find_sources(rank, parts, [held(1), held(1), None, None]) for rank in (2, 3)]
    assert [(source.ranks, source.why_not) for source in sources] == [([0], ""), ([1], "")]


@pytest.mark.parametrize("next_one", [None, held(1, copies=False)])
def test_a_part_whose_copies_are_lost_too_cannot_be_had(next_one: HeldSnapshot | None) -> None:
    parts = [manifest("a"), manifest("b"), manifest("c")]
    source = find_sources(1, parts, [held(1), None, next_one])
    assert "the state of rank 1 was held by ranks 1-2" in source.why_not


# ---- digests


@pytest.mark.parametrize("size", [0, 7, 16_384, 16_384 * 33 + 5])
def test_equal_bytes_have_equal_digests_and_any_changed_bit_another(size: int) -> None:
    memory = numpy.random.default_rng(0).integers(0, 256, size + 8, dtype=numpy.uint8)[:size]
    before = digest(memory)
    assert digest(memory.copy()) == before
    for at in numpy.linspace(0, size - 1, 5).astype(int) if size else ():
        for bit in (1, 128):
            memory[at] ^= bit
            assert digest(memory) != before
            memory[at] ^= bit


def test_two_signs_that_change_in_one_row_change_the_digest() -> None:
    numbers = numpy.ones(4096, dtype=numpy.float64)
    before = digest(numbers.view(numpy.uint8))
    numbers[[3, 700]] *= -1  # the differences are 2**63 twice, which a sum modulo 2**64 would lose
    assert digest(numbers.view(numpy.uint8)) != before
    swapped = numpy.arange(4096, dtype=numpy.float32)
    before = digest(swapped.view(numpy.uint8))
    swapped[[5, 6]] = swapped[[6, 5]]
    assert digest(swapped.view(numpy.uint8)) != before


# ---- states in memory


def round_trip(value: Any, into: dict[str, Any]) -> None:
    """Take the value into the memory of a snapshot, and load it under the name `x`."""
    snapshot = Snapshot(0)
    snapshot.manifests = [snapshot.fill({"x": contents.capture(value, "x", {})})]
    contents.restore("x", snapshot.parts(["x"])["x"], into, {})


def test_values_with_tensors_and_generators_come_back_equal_and_share_no_memory() -> None:
    shared = torch.arange(6.0).reshape(2, 3).t()
    value = {"a": [shared, shared], "g": torch.Generator().manual_seed(3), "n": numpy.arange(3), "e": torch.empty(0, 4)}
    into: dict[str, Any] = {}
    round_trip(value, into)
    found = into["x"]
    assert torch.equal(found["a"][0], shared)
    assert found["a"][0] is found["a"][1]
    assert found["a"][0].stride() == shared.stride()
    assert torch.equal(torch.rand(2, generator=found["g"]), torch.rand(2, generator=value["g"]))
    assert found["e"].shape == (0, 4)
    found["a"][0].zero_()
    assert shared.sum() == 15


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64])
def test_tensors_of_every_dtype_are_loaded_in_place(dtype: torch.dtype) -> None:
    original = torch.tensor([0, 1, 1]).to(dtype)
    own = torch.zeros(3).to(dtype)
    into = {"x": own}
    round_trip(original, into)
    assert into["x"] is own
    assert torch.equal(own, original)


def test_a_module_is_loaded_in_place_with_buffers_modes_and_gradients() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    trained, other = build(), build()
    trained(torch.randn(4, 2)).sum().backward()
    trained[1].eval()  # type: ignore[index]
    weight = other[0].weight  # type: ignore[index]
    round_trip(trained, {"x": other})
    assert other[0].weight is weight  # type: ignore[index]
    assert not other[1].training  # type: ignore[index]
    for (_, one), (_, two) in zip(trained.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    assert torch.equal(trained[1].running_mean, other[1].running_mean)  # type: ignore[index]


def test_an_optimizer_goes_back_to_the_time_before_its_first_step() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = Snapshot(0)
    snapshot.manifests = [snapshot.fill({"x": contents.capture(optimizer, "x", {})})]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state
    contents.restore("x", snapshot.parts(["x"])["x"], {"x": optimizer}, {})
    assert not optimizer.state


def test_a_rank_finds_its_own_units_and_the_copies_of_the_rank_before_it_by_their_digests() -> None:
    snapshots = [Snapshot(0), Snapshot(1)]
    values = [[torch.zeros(5), torch.full((3,), 7.0), torch.full((9,), 8.0)], [torch.zeros(5), torch.ones(3)]]
    parts = [one.fill({"x": contents.capture(value, "x", {})}) for one, value in zip(snapshots, values, strict=True)]
    for one in snapshots:
        one.manifests = parts
    for target, piece in zip(snapshots[1].to_receive(), snapshots[0].to_send(), strict=True):
        target.copy_(piece)
    memory = snapshots[1].memory_of_units()
    assert memory.keys() == {unit.digest for part in parts for unit in part.units}
    assert all(digest(piece.numpy()) == wanted for wanted, piece in memory.items())


def test_memory_is_used_again_for_the_next_snapshot() -> None:
    snapshot = Snapshot(0)
    snapshot.fill({"x": contents.capture(torch.ones(1000), "x", {})})
    memory = snapshot.own.data_ptr()
    snapshot.fill({"x": contents.capture(torch.zeros(1000), "x", {})})
    assert snapshot.own.data_ptr() == memory


def test_a_value_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(UsageError, match=r"the state `x` \(a function\) cannot be copied"):
        contents.capture(lambda: None, "x", {})
    with pytest.raises(UsageError, match="`x` cannot be copied: it holds a Linear; give that a name"):
        contents.capture([torch.nn.Linear(1, 1)], "x", {})
    with pytest.raises(UsageError, match=r"without dense memory"):
        contents.capture(torch.eye(3).to_sparse(), "x", {})
