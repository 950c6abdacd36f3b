"""Whether machines fit each other, before ranks start on them. Pure."""

from __future__ import annotations

from typing import Any

from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire.messages import GpuFacts, MeshSpec
from tests.supervisor.test_state import facts_of

GPU = GpuFacts("H100", 80 << 30, 79 << 30)


def problem(first: dict[str, Any], second: dict[str, Any], *, on: str = "ssh://n1,n2", **spec: Any) -> str | None:
    ranks = RankTable()
    ranks.assign(4, 2)
    table = MachineTable(ranks, facts_of)
    requested = MeshSpec(axes={"rank": 4}, engine="ssh", on=on, num_hosts=2, **spec)
    table.begin(requested)
    for host, facts in enumerate((first, second)):
        found = facts_of(**{"machine": f"m{host}", **facts})
        table.ready(host, found.hostname, found)
    return table.problem(requested)


def test_equal_machines_fit_and_builds_of_one_version_count_as_equal() -> None:
    assert problem({}, {"torch": "2.13.0+cu130", "python": "3.11.2", "driver": "580.1"}) is None


def test_gpus_that_others_use_are_not_counted() -> None:
    busy = GpuFacts("H100", 80 << 30, 9 << 30, "alice")
    assert problem({"gpus": (GPU, GPU, busy)}, {"gpus": (GPU, GPU)}, device="cuda") is None
    text = problem({"gpus": (GPU, GPU)}, {"gpus": (busy, GPU)}, device="cuda")
    assert text is not None
    assert text.startswith("n2 has 2 GPUs, of which others use 1 (alice), and 2 ranks are to run there, each on one;")


def test_different_versions_are_shown_as_a_table() -> None:
    text = problem({"python": "3.12.1"}, {"torch": "2.11.0"})
    assert text is not None
    assert text.splitlines()[1:4] == [
        "          here    n1      n2",
        "  Python  3.11    3.12    3.11",
        "  torch   2.13.0  2.13.0  2.11.0",
    ]
    assert "versions=any starts all the same" in text


def test_versions_may_differ_on_request_and_torch_where_no_rank_imports_it() -> None:
    assert problem({"python": "3.12.1"}, {}, on="ssh://n1,n2?versions=any") is None
    assert problem({}, {"torch": None}, torch=False) is None
    assert "none" in (problem({}, {"torch": None}) or "")


def test_one_machine_under_two_names_is_refused() -> None:
    text = problem({"machine": "same"}, {"machine": "same"})
    assert text is not None
    assert text.startswith("n1 and n2 are one machine")


def test_a_monarch_job_may_have_its_hosts_on_one_machine_unless_they_would_share_gpus() -> None:
    assert problem({"machine": "same"}, {"machine": "same"}, on="monarch://process") is None
    shared: dict[str, Any] = {"machine": "same", "gpus": (GPU, GPU)}
    assert problem(shared, shared, on="monarch://process", device="cpu") is None
    assert "are one machine" in (problem(shared, shared, on="monarch://process") or "")


def test_more_ranks_than_gpus_are_refused_with_the_machine() -> None:
    text = problem({"gpus": (GPU, GPU)}, {"gpus": (GPU,)}, device="cuda")
    assert text == (
        "n2 has 1 GPUs, and 2 ranks are to run there, each on one; ask for fewer per machine, or for device cpu"
    )


def test_a_lost_machine_is_named_and_its_ranks_are_lost_with_it() -> None:
    ranks = RankTable()
    ranks.assign(2, 2)
    table = MachineTable(ranks, facts_of)
    table.begin(MeshSpec(axes={"rank": 2}, engine="ssh", on="ssh://n1,n2", num_hosts=2))
    for host in (0, 1):
        table.ready(host, f"box{host}", facts_of(f"m{host}"))
    assert table.lose(1, "has not answered for 4 s") == "is lost: machine n2 has not answered for 4 s"
    assert [table.find(name) for name in ("n2", "box1", "1", "n3")] == [1, 1, 1, None]
    assert (table.heals_when(0), table.heals_when(1)) == ("", "machine n2 can be reached")
    assert [(info.name, info.state, info.ranks) for info in table.infos()] == [
        ("n1", "ready", (0,)),
        ("n2", "lost", (1,)),
    ]
