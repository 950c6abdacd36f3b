"""Where a mesh's machines are, and how its axes lie on them. No machine is asked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.controller.clusters import choose_machines, resolve
from meshbook.controller.config import Defaults, read_defaults
from meshbook.controller.session import _request_start
from meshbook.controller.starting import make_spec
from meshbook.engines.addresses import Address
from meshbook.errors import MeshShapeError, StartError, UsageError
from meshbook.ids import CallId
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages

pytestmark = pytest.mark.usefixtures("starts_meshes")

LAB = Defaults(clusters={"lab": {"on": "ssh://n1,n2"}})


def test_nodes_and_gpus_are_axes() -> None:
    cluster = choose_machines("lab", LAB, nodes=None, gpus_per_node=3)
    assert (cluster.on, cluster.engine, cluster.num_hosts) == ("ssh://n1,n2", "ssh", 2)
    assert cluster.grid.axes == {"node": 2, "gpu": 3}


def test_fewer_nodes_than_machines_are_the_first() -> None:
    assert choose_machines("lab", LAB, nodes=1, gpus_per_node=2).grid.axes == {"node": 1, "gpu": 2}


def test_axes_of_ones_own_lie_on_all_machines() -> None:
    cluster = choose_machines("lab", LAB, nodes=None, gpus_per_node=None, axes={"dp": 4, "tp": 2})
    assert cluster.num_hosts == 2
    assert choose_machines("lab", LAB, nodes=None, gpus_per_node=None, axes=4).grid.axes == {"rank": 4}


def test_more_nodes_than_machines_are_refused() -> None:
    with pytest.raises(StartError, match=r"3 nodes are asked for, and ssh://n1,n2 names 2 \(n1, n2\); name 1 more"):
        choose_machines("lab", LAB, nodes=3, gpus_per_node=1)


def test_a_layout_that_would_split_the_last_axis_is_refused_with_the_sum() -> None:
    with pytest.raises(MeshShapeError, match=r"dp=3 \* tp=2 on 2 machines are 6 / 2 = 3 ranks on each"):
        choose_machines("lab", LAB, nodes=None, gpus_per_node=None, axes={"dp": 3, "tp": 2})
    with pytest.raises(MeshShapeError, match=r"rank=3 are 3 ranks, which 2 machines cannot share equally"):
        choose_machines("lab", LAB, nodes=None, gpus_per_node=None, axes=3)


def test_what_a_cluster_says_beside_its_machines_is_added_to_their_address() -> None:
    table = {"on": "ssh://n1,n2?versions=any", "python": "/opt/venv/bin/python", "before": "module load cuda && true"}
    on = resolve("lab", Defaults(clusters={"lab": table}))
    address = Address.parse(on)
    assert (address.python, address.before) == ("/opt/venv/bin/python", "module load cuda && true")
    assert address.allows_any_versions
    with pytest.raises(UsageError, match="which srun takes along"):
        Address.parse(resolve("lab", Defaults(clusters={"lab": {"on": "slurm://gpu", "before": "module load cuda"}})))


def test_a_time_in_which_no_machine_could_be_named_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 60")
    assert make_spec(MeshAxes.of(2), on="ssh://n1", engine="ssh").lost_after_s == 60
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 2")
    with pytest.raises(UsageError, match=r"lost_after_s = 2: a machine is named when .* after 5 s at the earliest"):
        make_spec(MeshAxes.of(2), on="ssh://n1", engine="ssh")


def test_ranks_of_a_machine_that_is_cut_off_end_soon_after_they_count_as_lost_and_never_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshbook.controller.config._has_battery", lambda: False)

    def lease_s(settings: str) -> float:
        (tmp_path / "meshbook.toml").write_text(settings)
        return make_spec(MeshAxes.of(2), on="ssh://n1", engine="ssh").lease_s

    assert (lease_s(""), lease_s("lost_after_s = 60"), lease_s("lost_after_s = 5")) == (30.0, 120.0, 10.0)
    assert lease_s("cut_off_ttl_s = 1800") == 1800.0
    with pytest.raises(UsageError, match=r"cut_off_ttl_s = 10: .* after 15 s .*, and must not end before; write 20"):
        lease_s("cut_off_ttl_s = 10")
    monkeypatch.setattr("meshbook.controller.config._has_battery", lambda: True)
    assert (lease_s(""), lease_s("lost_after_s = 2000")) == (900.0, 2005.0), "a notebook's machine may sleep"


def test_an_unknown_cluster_is_refused_with_how_one_is_written() -> None:
    with pytest.raises(UsageError, match=r"(?s)known: lab.*\[clusters.labb\]"):
        choose_machines("labb", LAB, nodes=None, gpus_per_node=1)


def test_clusters_are_read_from_meshbook_toml(tmp_path: Path) -> None:
    file = tmp_path / "meshbook.toml"
    file.write_text('[clusters.lab]\non = "ssh://gpu1,gpu2"\n')
    assert read_defaults(tmp_path, {}).clusters == {"lab": {"on": "ssh://gpu1,gpu2"}}
    file.write_text('[clusters.lab]\nhosts = "gpu1"\n')
    with pytest.raises(UsageError, match="has a cluster 'lab' that is not written like"):
        read_defaults(tmp_path, {})


def test_ray_chooses_the_machines_and_each_gpu_that_it_is_asked_for_gets_a_rank() -> None:
    cluster = choose_machines("ray://auto?num_gpus=8", LAB, nodes=2, gpus_per_node=None)
    assert (cluster.engine, cluster.num_hosts, cluster.grid.axes) == ("ray", 2, {"node": 2, "gpu": 8})
    with pytest.raises(UsageError, match=r"ask Ray for GPUs, each of which gets a rank: ray://…\?num_gpus=8"):
        choose_machines("ray://auto", LAB, nodes=2, gpus_per_node=None)
    with pytest.raises(StartError, match="is one node, this machine"):
        choose_machines("ray://local", LAB, nodes=2, gpus_per_node=1)


def test_slurm_chooses_the_machines_and_each_gpu_that_it_is_asked_for_gets_a_rank() -> None:
    cluster = choose_machines("slurm://gpu?gpus-per-node=8", LAB, nodes=2, gpus_per_node=None)
    assert (cluster.engine, cluster.num_hosts, cluster.grid.axes) == ("slurm", 2, {"node": 2, "gpu": 8})
    assert choose_machines("slurm://", LAB, nodes=None, gpus_per_node=None, axes=4).num_hosts == 1
    with pytest.raises(UsageError, match="how many ranks are to run on each node"):
        choose_machines("slurm://gpu", LAB, nodes=2, gpus_per_node=None)


START = messages.StartMesh(call=CallId("1"), spec=messages.MeshSpec(axes={"rank": 1}))


def start_of(queue: Queue, timeout_s: float, on_waiting: Callable[[messages.MeshStarting], None]) -> Any:
    return _request_start(queue, START, timeout_s, on_waiting)  # type: ignore[arg-type]


def test_the_time_in_a_queue_is_not_that_of_the_start() -> None:
    seen: list[messages.MeshStarting] = []
    with pytest.raises(TimeoutError):
        start_of(Queue(["it is PENDING", ""]), 0.01, seen.append)
    with pytest.raises(TimeoutError):
        start_of(Queue([]), 0.01, seen.append)
    assert [(report.state, report.is_queued) for report in seen] == [("it is PENDING", True), ("", False)]
    queue = Queue(["it is PENDING (Priority)"])  # it would wait for ever, and does not give up before
    assert start_of(queue, 0.01, lambda _: queue.start()) == "ready"


def test_ranks_that_become_ready_do_not_lengthen_the_time_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    queue = Queue([""])
    monkeypatch.setattr("meshbook.controller.session.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def a_second_has_passed(report: messages.MeshStarting) -> None:
        clock[0] += 1.0
        queue.report(report.state) if clock[0] < 20.0 else queue.start()

    with pytest.raises(TimeoutError):
        start_of(queue, 10.0, a_second_has_passed)
    assert clock[0] == 10.0


class Queue:
    """A connection to a supervisor that reports these states of a queue at once."""

    def __init__(self, states: list[str]) -> None:
        self._states, self._future = states, Future[str]()

    def request(self, command: messages.StartMesh, on_report: Callable[[messages.MeshStarting], None]) -> Future[str]:
        self._on_report = on_report
        for state in self._states:
            self.report(state)
        return self._future

    def report(self, state: str) -> None:
        self._on_report(messages.MeshStarting(call=START.call, state=state, is_queued=bool(state)))

    def start(self) -> None:
        self._future.set_result("ready")
