"""What planning and running operations leave alone in this process, and what they do not take for granted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import name_tensor_meta
from meshbook.errors import OperationFailed
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import dtensor_patches
from meshbook.tensors import meta_run
from meshbook.tensors.creation import adopt


def test_torchs_own_functions_stay_in_their_places_while_an_operation_is_planned(
    mesh2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> Any:
        return dist.get_rank, dist.get_world_size, device_mesh.get_rank

    own, seen = now(), []
    watch = meta_run._OpObserver.__torch_dispatch__

    def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(now())
        return watch(self, *args, **kwargs)

    monkeypatch.setattr(meta_run._OpObserver, "__torch_dispatch__", looked)
    x = meshbook.distribute(torch.ones(2, 6, 5, 7), mesh2, [Shard(0)])
    weight = meshbook.distribute(torch.ones(6, 6, 3, 3), mesh2)
    assert x.redistribute([Shard(1)]).sum().item() == 420
    assert torch.nn.functional.conv2d(x, weight).sum().item() == 2 * 6 * 3 * 5 * 54
    assert seen
    assert all(one == own for one in seen)


@pytest.mark.parametrize("name", ["_collective_utils", "_redistribute"])
def test_torch_warns_of_dtensors_that_are_not_ours(name: str, caplog: pytest.LogCaptureFixture) -> None:
    dtensor_patches.install()
    logger = logging.getLogger(f"torch.distributed.tensor.{name}")
    assert logger.isEnabledFor(logging.WARNING)
    with dtensor_patches.in_remote_op():
        logger.warning("of ours")
    logger.warning("of a user's")
    assert [record.getMessage() for record in caplog.records] == ["of a user's"]


def test_what_an_operation_makes_is_found_once_for_all_placements_and_anew_for_other_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtensor_patches.install()
    metas = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached
    monkeypatch.setattr(metas, "_found", {})
    propagate = metas._propagate
    found = []
    monkeypatch.setattr(metas, "_propagate", lambda schema: found.append(schema) or propagate(schema))
    mesh = meta_run.MetaRunner(MeshAxes.of({"dp": 2})).mesh

    def made(function: Any, shape: tuple[int, ...], *others: Any, dim: int | None = None) -> Any:
        placement = Replicate() if dim is None else Shard(dim)
        meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
        return metas(OpSchema(function, (DTensorSpec(mesh, (placement,), tensor_meta=meta), *others), {}))

    aten = torch.ops.aten
    first = made(aten.sum.dim_IntList, (4, 6), [0])
    assert first.shape == (6,)
    assert made(aten.sum.dim_IntList, (4, 6), [0], dim=1) is first
    assert len(found) == 1
    assert made(aten.sum.dim_IntList, (4, 6), [1]).shape == (4,)
    assert made(aten.sum.dim_IntList, (6, 4), [0]).shape == (4,)
    assert made(aten.sum.dim_IntList, (4, 6), [0], True).shape == (1, 6)
    assert made(aten.add.Scalar, (3,), 1).dtype == made(aten.add.Scalar, (3,), 1.0).dtype == torch.float32
    assert len(found) == 6


def _bind(placements: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    import __main__

    __main__.bound = distribute_tensor(torch.arange(4.0), __main__.mesh, placements)


def test_a_name_that_a_cell_has_placed_otherwise_since_is_not_taken_for_what_it_was(mesh2: Mesh) -> None:
    mesh2.execute(_bind, [Shard(0)])
    before = name_tensor_meta(mesh2.session, "bound", mesh2.ranks)
    assert before is not None
    mesh2.execute(_bind, [Replicate()])
    taken = adopt(mesh2, "name:bound", before)
    assert taken is not None
    with pytest.raises(OperationFailed, match=r"placed \(S\(0\)\), and is .* placed \(R\); look it up again"):
        taken.full_tensor()
    assert mesh2["bound"].full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
