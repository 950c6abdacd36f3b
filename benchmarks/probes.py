"""What it costs that ranks always watch themselves: DDP training steps on 4 ranks, with the probes and without.

The same ranks train by turns with everything that is always on (what each collective notes: its line, its shapes, the
rank's last words; what each beat measures and tells) and with all of it switched off, as MESHBOOK_PROBES=0 starts them.
Turns are blocks of a few steps, a fraction of a second, each followed or preceded by one of the other kind, in one
cell: the two of a pair have the same machine, whatever else that does. What is told is the median of the pairs' ratios,
with the interval in which it lies with 95 % certainty. CPU is what the four processes spent, all threads; wall is the
slowest rank's. Where there are fewer cores than ranks, wall says when the system lets whom run, and only CPU is held to
the limit.

The parts are measured by themselves too, in thread time, the best of many: what is noted at one collective, at one
`meshbook.log`, and by one beat; and what share of a step they add up to.

Then the dashboard: the same steps with somebody who watches, and without. It costs the ranks nothing that can be
measured: what they tell with their beats they tell anyhow. What it costs is in the supervisor and in this process.

    python -m benchmarks.probes [--quick]
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.dashboard.hub import DashboardClient, DashboardHub

RANKS = 4
LIMIT, DASHBOARD_LIMIT = 1.01, 1.02
LOG_LIMIT_US = 2.0

SETUP = """
import threading, time
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(128, 512)

groups = dist.group.WORLD._owner
service = next(thread for thread in threading.enumerate() if thread.name == "meshbook-service")._target.__self__
noting, probes = list(groups.observers), service._probes
assert noting and probes

def block(steps, watched):
    "CPU and wall seconds of so many steps."
    groups.ring._detailed, groups.observers[:] = watched, noting if watched else []
    service._probes = probes if watched else None
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()  # who looks at a loss takes it out of its tensor either way
        if watched:
            meshbook.log(loss=value)
    return time.process_time() - cpu, time.perf_counter() - wall

def pairs(count, steps):
    "Of each pair: CPU and wall without probes, CPU and wall with them."
    found = []
    for number in range(count):
        first = bool(number % 2)
        spent = {watched: block(steps, watched) for watched in (first, not first)}
        found.append((*spent[False], *spent[True]))
    return found

def best(act, times=200):
    "Microseconds of this thread's time for one call: the least of 30 blocks."
    def once():
        started = time.thread_time()
        for _ in range(times):
            act()
        return (time.thread_time() - started) / times * 1e6
    return min(once() for _ in range(30))

def parts():
    ring, label = groups.ring, groups.ring.last.label
    tensor = torch.ones(10)
    def note():
        ring.finish(ring.begin("all_reduce", label, [tensor]))
    def note_and_tell():
        collective = ring.begin("all_reduce", label, [tensor])
        noting[0].begun(collective, ())
        ring.finish(collective)
    def beat():
        for _ in range(64):
            note()
            meshbook.log(loss=1.0)
        probes.measure("cpu")
    ring._detailed = False
    plain = best(note)
    ring._detailed = True
    collective = best(note_and_tell) - plain
    logged = best(lambda: meshbook.log(loss=1.0))
    return collective, logged, best(beat, 5) - 64 * (best(note) + logged)

import meshbook
block(20, True)
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("probes", f"DDP training steps on {RANKS} ranks, with and without what ranks measure of themselves")
    steps, count = (3, 8) if quick else (4, 150)
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(SETUP)
        before = groups_collectives(mesh)
        mesh.run(f"block({steps}, True)")
        per_step = (groups_collectives(mesh) - before) / steps
        found = list(dict(mesh.run(f"pairs({count}, {steps})").values).values())
        parts = [min(values) for values in zip(*dict(mesh.run("parts()").values).values(), strict=True)]
        watched = watching(mesh, 2 if quick else 10, 5 if quick else 30)
    for what, place, together in (("CPU of all ranks", 0, sum), ("wall", 1, max)):
        without, with_them = (
            [together(rank[pair][place + kind] for rank in found) / steps for pair in range(count)] for kind in (0, 2)
        )
        plain = f"a step without probes, {what}"
        report.add(plain, [1e3 * seconds for seconds in without], "ms")
        report.add(f"a step with probes, {what}", [1e3 * seconds for seconds in with_them], "ms", against=plain)
        ratio = say(report, f"{what}, with probes as a multiple of without", with_them, without)
        if what != "wall" or (os.cpu_count() or 1) > RANKS:
            report.promise(f"{what} of DDP steps with probes, median of {count} pairs", ratio, LIMIT, "x")
    collective = report.add("noting a collective", parts[0], "us")
    logged = report.add("meshbook.log", parts[1], "us")
    report.promise("meshbook.log", logged, LOG_LIMIT_US, "us")
    beat = report.add("measuring for a beat", parts[2], "us")
    step_us = 1e3 * report.row("a step without probes, CPU of all ranks").median / RANKS
    wall_us = 1e3 * report.row("a step without probes, wall").median
    share = (per_step * collective + logged) / step_us + beat / 1e6 * wall_us / step_us
    report.note(f"a step has {per_step:.1f} collectives; the parts are {100 * share:.2f} % of it")
    report.promise("the parts added up, as a multiple of a rank's step without them", 1 + share, LIMIT, "x")
    told(report, watched)
    return report


def watching(mesh: Mesh, pairs: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of a step, by pairs, while nobody watches and while a dashboard is told: of the ranks, and of the
    supervisor and this process, which also makes JSON of what the dashboard is told, as its front end's server does."""
    supervisor, size = mesh.status().supervisor_pid, 0
    found: dict[str, list[float]] = {name: [] for name in ("ranks", "ranks watched", "others", "others watched")}

    def send(message: object) -> None:
        nonlocal size
        size += len(json.dumps(message))

    for number in range(2 * pairs):
        watched = (number % 2) ^ (number // 2 % 2)  # ABBA
        audience = DashboardClient(mesh, send)
        if watched:
            DashboardHub.of(mesh.session).add_client(audience)
        others = workbench.cpu_s(supervisor) + time.process_time()
        spent = [cpu for cpu, _ in dict(mesh.run(f"block({steps}, True)").values).values()]
        others = workbench.cpu_s(supervisor) + time.process_time() - others
        if watched:
            DashboardHub.of(mesh.session).remove_client(audience)
        name = " watched" if watched else ""
        found[f"ranks{name}"].append(sum(spent) / steps)
        found[f"others{name}"].append(others / steps)
    assert size, "the dashboard was told nothing"
    return found


def told(report: Report, watched: dict[str, list[float]]) -> None:
    names = {
        "ranks": "a step, CPU of all ranks",
        "others": "a step, CPU of supervisor and controller",
    }
    for kind, name in names.items():
        report.add(name, [1e3 * seconds for seconds in watched[kind]], "ms")
        on = [1e3 * seconds for seconds in watched[f"{kind} watched"]]
        report.add(f"{name}, dashboard on", on, "ms", against=name)
    say(report, "CPU of all ranks, dashboard on as a multiple of off", watched["ranks watched"], watched["ranks"])
    more = statistics.median(
        on - off for on, off in zip(watched["others watched"], watched["others"], strict=True)
    ) / statistics.median(watched["ranks"])
    report.promise("what the dashboard costs beside the ranks, on top of their own CPU", 1 + more, DASHBOARD_LIMIT, "x")


def say(report: Report, what: str, more: Sequence[float], less: Sequence[float]) -> float:
    """The median of pairs' ratios, noted with the interval in which it lies with 95 % certainty: that of its order
    statistics, which asks nothing of how they are distributed."""
    ratios = sorted(first / second for first, second in zip(more, less, strict=True))
    ratio = statistics.median(ratios)
    aside = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
    report.note(f"{what}: {ratio:.4f}, 95 % between {ratios[aside]:.4f} and {ratios[-1 - aside]:.4f}")
    return ratio


def groups_collectives(mesh: Mesh) -> int:
    """Collectives that rank 0 has begun so far."""
    return int(dict(mesh.run("groups.ring.last.seq").values)[0])


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
