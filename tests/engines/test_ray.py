"""What is asked of Ray, and a Ray that is started for a mesh. Meshes on a cluster are in tests/cluster/test_ray.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshbook.controller.starting import create_mesh
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import AllocateNodes
from meshbook.engines.ray import nodes_to_allocate
from meshbook.engines.ray_driver import RayDriver
from meshbook.wire.messages import MeshSpec

pytestmark = pytest.mark.usefixtures("starts_meshes")


def asked_for(on: str, device: str = "auto") -> AllocateNodes:
    return nodes_to_allocate(Address.parse(on), MeshSpec(axes={"node": 2, "gpu": 4}, num_hosts=2, device=device, on=on))


def test_ray_is_asked_for_a_core_for_each_rank_and_a_gpu_where_there_are_any() -> None:
    assert asked_for("ray://auto") == AllocateNodes("auto", 2, num_cpus=4, num_gpus=None, gpus_if_any=4)


def test_a_mesh_on_gpus_waits_for_them_and_one_on_cpus_takes_none() -> None:
    assert asked_for("ray://head", device="cuda").num_gpus == 4
    assert asked_for("ray://head", device="cpu").num_gpus == 0


def test_what_the_user_asks_for_comes_before_our_own() -> None:
    nodes = asked_for("ray://head:6380?num_cpus=16&num_gpus=8", device="cpu")
    assert (nodes.cluster, nodes.num_cpus, nodes.num_gpus) == ("head:6380", 16, 8)


def test_other_versions_are_said_in_rays_words_with_what_to_do() -> None:
    words = (
        "RuntimeError: Version mismatch: The cluster was started with: Ray: 2.59.0 Python: 3.11.4 This process on "
        "10.0.0.7 was started with: Ray: 2.60.0 Python: 3.11.9"
    )
    text = RayDriver.explain(words)
    assert text is not None
    assert words in text
    assert "start the notebook from an environment with the cluster's versions" in text
    assert RayDriver.explain("something else") is None


def test_a_missing_token_and_a_machine_that_is_no_node_are_said_with_what_to_do() -> None:
    failed = "ConnectionError: Failed to connect to Ray cluster at 10.0.0.1:6379; "
    text = RayDriver.explain(failed + "AuthenticationError: Authentication token is missing")
    assert text is not None
    assert "give the notebook RAY_AUTH_MODE=token" in text
    text = RayDriver.explain(
        failed + "RuntimeError: No node info found matching attributes: '' when trying to resolve node"
    )
    assert text is not None
    assert "this machine is no node of that cluster" in text


@pytest.mark.ray
def test_a_ray_that_is_started_for_a_mesh_ends_with_it() -> None:
    before = set(Path("/tmp").glob("mbray*"))
    with create_mesh(1, on="ray://local", torch=False) as mesh:
        assert mesh.run("rank").values.same() == 0
        (temp,) = set(Path("/tmp").glob("mbray*")) - before
        assert any(temp.glob("session_*"))
    assert not temp.exists()  # and its processes: the run's own look round
