"""How users write where their machines are."""

from __future__ import annotations

import pytest

from meshbook.engines.addresses import Address, Machine
from meshbook.errors import UsageError


def test_machines_options_and_ports_are_read() -> None:
    address = Address.parse("ssh://me@gpu1:2222, gpu2?python=/opt/venv/bin/python&versions=any")
    assert address.machines == (Machine("me@gpu1", 2222), Machine("gpu2"))
    assert [str(machine) for machine in address.machines] == ["me@gpu1:2222", "gpu2"]
    assert address.python == "/opt/venv/bin/python"
    assert address.allows_any_versions


def test_a_slurm_cluster_has_a_partition_and_options_of_sbatch() -> None:
    address = Address.parse("slurm://gpu?account=x&time=2:00:00&exclusive=&python=/opt/python&versions=any")
    assert (address.scheme, address.machines, address.partition) == ("slurm", (), "gpu")
    assert address.options == (("account", "x"), ("time", "2:00:00"), ("exclusive", ""))
    assert address.python == "/opt/python"
    assert address.allows_any_versions
    assert Address.parse("slurm://").partition == ""


def test_a_ray_cluster_is_known_by_its_head_and_asked_in_rays_words() -> None:
    address = Address.parse("ray://head?num_gpus=8&num_cpus=64&python=/opt/python&versions=any")
    assert (address.scheme, address.machines, address.head) == ("ray", (), "head:6379")
    assert dict(address.options) == {"num_cpus": "64", "num_gpus": "8"}
    assert (address.gpus_per_node, address.python, address.allows_any_versions) == (8, "/opt/python", True)
    assert [Address.parse(f"ray://{name}").head for name in ("auto", "local", "10.0.0.1:6380")] == [
        "auto", "local", "10.0.0.1:6380",
    ]  # fmt: skip
    assert Address.parse("ray://auto").gpus_per_node is None


def test_a_monarch_job_is_made_by_its_kind_or_is_in_a_file() -> None:
    address = Address.parse("monarch://slurm?partition=gpu&gpus_per_node=8&python=/opt/python")
    assert (address.scheme, address.job, address.python) == ("monarch", "slurm", "/opt/python")
    assert (dict(address.options), address.gpus_per_node) == ({"partition": "gpu", "gpus_per_node": "8"}, 8)
    address = Address.parse("monarch:/home/me/my_cluster.py:job?mesh=trainers&versions=any")
    assert (address.job, address.options) == ("/home/me/my_cluster.py:job", (("mesh", "trainers"),))
    assert address.allows_any_versions


@pytest.mark.parametrize(
    ("query", "gpus"),
    [
        ("", None),
        ("?gpus-per-node=8", 8),
        ("?gpus-per-node=a100:4", 4),
        ("?gres=gpu:2", 2),
        ("?gres=gpu:a100:2", 2),
        ("?gres=shard:2", None),
    ],
)
def test_a_node_of_slurm_has_as_many_gpus_as_are_asked_for(query: str, gpus: int | None) -> None:
    assert Address.parse(f"slurm://gpu{query}").gpus_per_node == gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu1,gpu2", "says no way to its machines"),
        ("tpu://gpu1", "there is no way tpu:// to machines; known: ssh://, slurm://, ray://, monarch://"),
        ("ssh://", "names no machine"),
        ("ssh://gpu1,,gpu2", "'' in"),
        ("ssh://gpu1,gpu1", "names gpu1 twice"),
        ("ssh://-oProxyCommand=x", "is no machine"),
        ("ssh://gpu1:ssh", "'ssh' in"),
        ("ssh://gpu1:0", "'0' in"),
        ("ssh://gpu1?pyhton=3", "it knows python, the interpreter on those machines"),
        ("ssh://gpu1?versions=some", "versions=some is not known"),
        ("ray://", "'' in 'ray://' is no head of a Ray cluster"),
        ("ray://a,b", "is no head of a Ray cluster"),
        ("ray://auto?gpus=8", "which ray:// does not know; it knows num_cpus"),
        ("ray://auto?num_gpus=many", "num_gpus=many in"),
        ("monarch://", "'' in 'monarch://' is no kind of Monarch job; known: process, local, ssh, slurm, kubernetes"),
        ("monarch://lsf", "'lsf' in"),
        ("monarch://slurm?nodes=2", "which monarch:// does not know; it knows partition, the partition"),
        ("monarch://slurm?gpus_per_node=all", "gpus_per_node=all in"),
        ("monarch://ssh", "does not say the machines, with commas: monarch://ssh?hosts=…"),
        ("monarch://kubernetes?image=x", "does not say the namespace"),
        ("monarch:my_cluster.py", "is no Python file and name in it"),
        ("monarch:cluster.yaml:job", "is no Python file and name in it"),
        ("slurm://gpu?versions=some", "versions=some is not known"),
        ("slurm://-p", "'-p' in"),
        ("slurm://gpu?nodes=4", "which is set by --nodes of the mesh"),
        ("slurm://gpu?wrap=rm", "which is set by Meshbook itself"),
        ("slurm://gpu?n=4", "'n' in"),
        ("slurm://gpu?--x=4", "is no long option of sbatch"),
    ],
)
def test_what_is_no_address_is_refused_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        Address.parse(text)
    assert words in str(raised.value)
