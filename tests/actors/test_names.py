"""What a program written for Monarch does with the names alone, before anything is spawned."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch

from meshbook import actor
from meshbook.actor import ValueMesh
from meshbook.actors.shape import Extent, Point
from meshbook.mesh_axes import MeshAxes


class Reader(actor.Actor):
    pass


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Accumulator", ([int], str, float)),
        ("ActorMesh", Reader),
        ("Channel", int),
        ("Endpoint", ([int, str], float)),
        ("Future", int),
        ("Port", int),
        ("PortReceiver", int),
        ("ValueMesh", int),
    ],
)
def test_what_is_generic_in_monarch_can_be_subscripted(name: str, arguments: Any) -> None:
    generic = getattr(actor, name)
    thing = object()
    assert cast(generic[arguments], thing) is thing


def test_a_point_and_an_extent_say_where_as_in_monarch() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    point = Point(5, extent)
    assert str(point) == repr(point) == "{'hosts': 1/2, 'gpus': 1/4}"
    assert str(extent) == repr(extent) == "{hosts: 2, gpus: 4}"
    assert str(Point(0, Extent([], []))) == "{}"


def test_a_forgotten_get_is_named_where_the_future_is_used_as_its_value() -> None:
    future = actor.Future.of([1], "trainers.step")
    with pytest.raises(AttributeError, match=r"the Future of trainers.step has no 'mean'; get\(\) waits for its value"):
        _ = future.mean
    with pytest.raises(AttributeError, match=r"no 'cancel'; interrupt\(\) ends the call"):
        future.cancel()
    with pytest.raises(TypeError, match=r"the Future of trainers.step is no list; get\(\) waits"):
        list(future)
    assert copy.copy(future).get() == [1]
    assert not hasattr(future, "__array__")


def test_values_of_a_mesh_are_an_array_of_its_dims_and_theirs() -> None:
    axes = MeshAxes.of({"hosts": 2, "gpus": 2})
    losses: Any = ValueMesh(axes, [0.1, 0.2, 0.3, 0.4])
    assert np.asarray(losses).tolist() == [[0.1, 0.2], [0.3, 0.4]]
    weights: Any = ValueMesh(axes, [torch.full((3,), float(rank)) for rank in range(4)])
    assert np.asarray(weights, dtype="float32").shape == (2, 2, 3)
