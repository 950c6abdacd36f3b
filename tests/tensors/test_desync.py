"""All ranks of a group run the same collectives for remote tensors; where they do not, that is said."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

import meshbook
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, OperationFailed
from meshbook.mesh_axes import MeshAxes
from meshbook.tensors.creation import engine_of
from meshbook.tensors.faults import describe_collective_mismatch

GRID = MeshAxes.of({"dp": 2, "tp": 2})


def test_ranks_of_one_group_have_begun_as_many_collectives() -> None:
    assert describe_collective_mismatch(GRID, {0: [1, 2], 1: [1, 2], 2: [1, 2], 3: [1, 2]}) is None
    assert describe_collective_mismatch(GRID, {0: [], 1: [], 2: [], 3: []}) is None


def test_groups_along_an_axis_need_not_be_alike() -> None:
    assert describe_collective_mismatch(GRID, {0: [1, 5], 1: [3, 5], 2: [1, 0], 3: [3, 0]}) is None


def test_ranks_of_one_group_that_differ_are_named() -> None:
    assert (
        describe_collective_mismatch(GRID, {0: [1, 2], 1: [], 2: [1, 2], 3: []})
        == "of the collectives along tp, rank 0 2, rank 1 0"
    )
    assert (
        describe_collective_mismatch(GRID, {0: [1], 1: [1], 2: [2], 3: [1]})
        == "of the collectives along dp, rank 0 1, rank 2 2"
    )


def test_a_rank_that_is_gone_is_not_compared() -> None:
    assert describe_collective_mismatch(GRID, {0: [1, 1], 1: [1, 1], 2: [1, 1]}) is None


def begun_alone() -> None:
    """On a rank: an operation in which rank 0 begins a collective that no other rank does."""
    import torch.distributed as dist

    from meshbook.rank.tensors import operators

    real = operators.as_local

    def as_local(tensor):  # type: ignore[no-untyped-def]
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1), group=tensor.device_mesh.get_group(0), async_op=True)
        return real(tensor)

    operators.FUNCTIONS["as_local"] = as_local


@pytest.mark.usefixtures("starts_meshes")
def test_an_operation_that_only_some_ranks_take_part_in_is_told_and_nothing_is_computed_after_it() -> None:
    with create_mesh({"dp": 2}) as mesh:
        whole = meshbook.distribute(torch.arange(4.0), mesh, [Shard(0)])
        mesh.execute(begun_alone)

        own = whole.as_local()
        for _ in range(2):  # neither this value nor one of any later operation is to be had
            with pytest.raises(OperationFailed, match="of the collectives along dp, rank 0 1, rank 1 0"):
                (own + 1).local(1)


@pytest.mark.usefixtures("starts_meshes")
def test_a_batch_that_ranks_cannot_read_is_an_error_with_its_reason_and_no_stop() -> None:
    with create_mesh({"dp": 2}) as mesh:
        x = meshbook.distribute(torch.arange(4.0), mesh, [Shard(0)])
        engine_of(mesh).queue.add_template(b"no pickle")
        y = x + 1
        with pytest.raises(CellError, match="UnpicklingError"):
            y.full_tensor()
