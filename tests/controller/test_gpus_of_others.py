"""GPUs that somebody else uses, as the start of a mesh goes round them. There is no GPU here: all are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshbook.controller import clusters, starting
from meshbook.controller.clusters import choose_machines
from meshbook.controller.config import Defaults
from meshbook.controller.hosts import hosts_table
from meshbook.controller.starting import make_spec
from meshbook.engines.addresses import Machine
from meshbook.engines.probe import Probe
from meshbook.errors import StartError
from meshbook.host.gpus import OthersGpus
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import GpuFacts, HostInfo, MachineFacts
from tests.supervisor.test_state import facts_of

FREE, BUSY = GpuFacts("H100", 80 << 30, 79 << 30), GpuFacts("H100", 80 << 30, 9 << 30, "alice")


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # without settings of this project's
    monkeypatch.setattr(starting, "count_gpus", lambda: 4)
    monkeypatch.setattr(starting, "find_others_gpus", lambda: OthersGpus(("GPU-a", "GPU-c"), ("alice", "bob")))


def test_ranks_see_no_gpu_that_somebody_else_uses_unless_the_user_has_chosen() -> None:
    grid = MeshAxes.of(2)
    assert make_spec(grid, device="cuda").env == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}
    assert make_spec(grid, env={"A": "b"}).env == {"A": "b", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}
    assert make_spec(grid, env={"CUDA_VISIBLE_DEVICES": "1"}).env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert make_spec(grid, device="cpu").env == {}
    assert make_spec(grid, torch=False).env == {}


def test_cuda_is_refused_where_others_use_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "find_others_gpus", lambda: OthersGpus((), ("alice", "alice")))
    with pytest.raises(StartError, match=r"others use every GPU here: 2 GPUs busy \(alice\); ask for device cpu"):
        make_spec(MeshAxes.of(2), device="cuda")


def machines(monkeypatch: pytest.MonkeyPatch, *facts: MachineFacts) -> None:
    probes = [Probe(Machine(f"n{number}"), found) for number, found in enumerate(facts, 1)]
    monkeypatch.setattr(clusters, "probe_machines", lambda address: probes)


def test_other_machines_have_as_many_ranks_as_the_fewest_gpus_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machines(monkeypatch, facts_of(gpus=(FREE, FREE, BUSY, FREE)), facts_of(gpus=(BUSY, BUSY, FREE, FREE)))
    cluster = choose_machines("ssh://n1,n2", Defaults(), nodes=None, gpus_per_node=None)
    assert cluster.grid.axes == {"node": 2, "gpu": 2}
    machines(monkeypatch, facts_of(gpus=(FREE,)), facts_of(gpus=(BUSY, BUSY)))
    with pytest.raises(StartError, match=r"n2: others use all of its GPUs, 2 busy \(alice\); leave it out"):
        choose_machines("ssh://n1,n2", Defaults(), nodes=None, gpus_per_node=None)


def test_the_table_of_machines_says_who_is_on_gpus() -> None:
    info = HostInfo(host=0, name="n1", state="ready", ranks=(0,), facts=facts_of(gpus=(FREE, BUSY)))
    assert "2 H100, 1 busy (alice), at least 79.0 GiB free on each" in str(hosts_table("mesh", [info]))


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 4), ("cuda:0", 0)])
def test_gpus_that_ranks_of_other_machines_could_have_had_are_counted_machine_by_machine(
    device: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = (facts_of(gpus=(FREE, FREE, FREE)), facts_of(gpus=(FREE, BUSY, FREE)))
    monkeypatch.setattr(starting, "fetch_hosts", lambda session: [SimpleNamespace(facts=found) for found in facts])
    session = SimpleNamespace(info=SimpleNamespace(ranks=[SimpleNamespace(device=device)]))
    spec = make_spec(MeshAxes.of(2), on="ssh://n1,n2", engine="ssh")
    assert starting._num_free_gpus(session, spec) == num_gpus  # type: ignore[arg-type]
