"""`meshbook doctor --on …`: whether a mesh could start on these machines, and how far away they are."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from meshbook.cli.doctor import CheckResult
from meshbook.cli.doctor_monarch import check_monarch
from meshbook.cli.doctor_ray import check_ray
from meshbook.cli.doctor_slurm import check_slurm
from meshbook.controller.clusters import resolve
from meshbook.controller.config import read_defaults
from meshbook.controller.hosts import FACTS_COLUMNS, facts_cells
from meshbook.engines.addresses import Address
from meshbook.engines.probe import Probe, probe_machines
from meshbook.host.facts import gather_facts
from meshbook.wire.messages import MachineFacts

# A clock that is further off makes logs of several machines hard to read together; nothing else depends on it.
_MAX_CLOCK_DIFFERENCE_S = 2.0
# Below this rate a value of 64 MB takes more than ten seconds.
_MIN_BYTES_PER_S = 6e6


def check_machines(on: str) -> list[CheckResult]:
    """Look at all machines at once. Blocks for a second or two, or for up to 10 s if one cannot be reached.

    Raises:
        UsageError: `on` is no address, and no name of a cluster.
    """
    address = Address.parse(resolve(on, read_defaults()))
    if address.scheme == "slurm":
        return list(check_slurm(address))
    if address.scheme == "ray":
        return list(check_ray(address))
    if address.scheme == "monarch":
        return list(check_monarch(address))
    probes = probe_machines(address, measure=True)
    here = gather_facts()
    return [result for probe in probes for result in _check(probe, here)] + list(_check_pairs(probes))


def _check(probe: Probe, here: MachineFacts) -> Iterator[CheckResult]:
    name, facts = str(probe.machine), probe.facts
    if facts is None:
        what, _, remedy = probe.problem.partition("; ")
        yield CheckResult("missing", name, what.removeprefix(f"{name} "), remedy)
        return
    yield CheckResult("ok", name, f"reached in {probe.connect_s:.1f} s, at {facts.address}, as {facts.executable}")
    cells = zip(FACTS_COLUMNS, facts_cells(facts), strict=True)
    yield CheckResult("ok", name, ", ".join(f"{column} {cell}" for column, cell in cells if cell))
    for what, there, own in (
        ("Meshbook", facts.meshbook, here.meshbook),
        ("Python", facts.python.rpartition(".")[0], platform.python_version().rpartition(".")[0]),
        ("torch", (facts.torch or "none").partition("+")[0], (here.torch or "none").partition("+")[0]),
    ):
        if there != own:
            yield CheckResult(
                "missing",
                name,
                f"{what} is {there} there and {own} here",
                "install the same version, or name an interpreter that has it: ssh://…?python=/path/to/python",
            )
    if abs(probe.clock_ahead_s) > _MAX_CLOCK_DIFFERENCE_S:
        way = "ahead of" if probe.clock_ahead_s > 0 else "behind"
        yield CheckResult(
            "poor", name, f"its clock is {abs(probe.clock_ahead_s):.0f} s {way} this machine's", "run chrony or ntpd"
        )
    if probe.latency_s is not None and probe.bytes_per_s is not None:
        yield CheckResult(
            "ok" if probe.bytes_per_s >= _MIN_BYTES_PER_S else "poor",
            name,
            f"{probe.latency_s * 1000:.1f} ms there and back through ssh, {probe.bytes_per_s / 1e6:.0f} MB/s each way",
            "" if probe.bytes_per_s >= _MIN_BYTES_PER_S else "values that are pushed or pulled take long",
        )


def _check_pairs(probes: list[Probe]) -> Iterator[CheckResult]:
    """Check that machines are different ones, and that each can connect to each other one."""
    ways = [(probe, other, why) for probe in probes for other, why in probe.no_way_to.items()]
    for probe, other, why in ways:
        yield CheckResult(
            "missing",
            str(probe.machine),
            f'cannot connect to {other} ("{why}")',
            "ranks on the two could not form a process group: open all ports between the machines (a firewall?)",
        )
    reached = [probe for probe in probes if probe.facts is not None]
    if len(reached) > 1 and not ways:
        yield CheckResult("ok", ", ".join(str(probe.machine) for probe in reached), "each can connect to the others")
    names: dict[str, str] = {}
    for probe in probes:
        if probe.facts is not None:
            other = names.setdefault(probe.facts.machine, str(probe.machine))
            if other != str(probe.machine):
                yield CheckResult(
                    "missing", f"{other}, {probe.machine}", "they are one machine", "name each machine once"
                )
