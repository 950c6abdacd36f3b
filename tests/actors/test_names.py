"""What a program written for Monarch does with the names alone, before anything is spawned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from meshbook import actor
from meshbook.actor import ValueMesh
from meshbook.actors.shape import Extent, Point
from meshbook.errors import ValuesDiffer
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
    future: Any = actor.Future.of([1], "trainers.step")
    with pytest.raises(AttributeError, match=r"the Future of trainers.step has no 'mean'; get\(\) waits for its value"):
        _ = future.mean
    with pytest.raises(AttributeError, match=r"no 'cancel'; interrupt\(\) ends the call"):
        future.cancel()
    uses: list[Callable[[Any], object]] = [list, bool, float, round, abs, "{:.2f}".format]
    uses += [lambda it: it + 1, lambda it: 1 - it, lambda it: it < 0.5, lambda it: it[0], lambda it: 1 in it]
    for use in uses:
        with pytest.raises(TypeError, match=r"the Future of trainers.step is not its value; get\(\) waits"):
            use(future)
    assert f"{future}" == "<Future: trainers.step is done>"
    assert future != [1]
    assert copy.copy(future).get() == [1]
    assert not hasattr(future, "__array__")


def test_values_of_a_mesh_are_an_array_of_its_dims_and_theirs() -> None:
    axes = MeshAxes.of({"hosts": 2, "gpus": 2})
    losses: Any = ValueMesh(axes, [0.1, 0.2, 0.3, 0.4])
    assert np.asarray(losses).tolist() == [[0.1, 0.2], [0.3, 0.4]]
    weights: Any = ValueMesh(axes, [torch.full((3,), float(rank)) for rank in range(4)])
    assert np.asarray(weights, dtype="float32").shape == (2, 2, 3)


def test_operators_on_values_of_a_mesh_take_what_all_agree_on_and_else_show_what_each_has() -> None:
    axes = MeshAxes.of({"gpus": 2})
    same: Any = ValueMesh(axes, [3, 3])
    assert (same + 1, 10 - same, -same, same == 3, same != 3, float(same), f"{same:.1f}") == (
        4,
        7,
        -3,
        True,
        False,
        3,
        "3.0",
    )
    assert not ValueMesh(axes, [False, False])
    differing: Any = ValueMesh(axes, [0.1, 0.4])
    assert differing < 0.5
    assert round(ValueMesh(axes, [0.126, 0.126]), 2) == 0.13  # type: ignore[call-overload]
    for use in (float, lambda values: values + 1, lambda values: values > 0.2, "{:.2f}".format):
        with pytest.raises(ValuesDiffer, match=r"(?s)gpus.*: 0\.4\ntake one, values\[0\] or values\.item\(gpus=0\)"):
            use(differing)
    with pytest.raises(AttributeError, match=r"no attribute 'mean'; values\[0\] is the first"):
        _ = differing.mean


def test_a_point_and_its_value_used_as_the_value_alone_say_what_to_write() -> None:
    losses: Any = ValueMesh(MeshAxes.of({"gpus": 2}), [0.1, 0.4])
    assert sum(losses.values()) == 0.5
    assert [value for _, value in losses] == [0.1, 0.4]
    for use in (
        sum,
        max,
        lambda values: [f"{value:.2f}" for value in values],
        lambda values: [value / 2 for value in values],
    ):
        with pytest.raises(TypeError, match=r"yields \(point, value\).*values\.values\(\)"):
            use(losses)
    with pytest.raises(TypeError, match=r"`in values\.values\(\)` asks for a value"):
        assert 0.1 in losses
