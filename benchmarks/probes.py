"""What it costs that ranks always watch themselves: DDP training steps on 4 ranks, with the probes and without.

The same ranks train by turns with everything that is always on (what each collective notes: its line, its shapes, the
rank's last words; what each beat measures and tells) and with all of it switched off, as MESHBOOK_PROBES=0 starts them.
CPU is what the four processes spent, all threads; wall is the slowest rank's. Blocks of both kinds take turns, ABBA;
each kind's best tenth counts, since the machine's other work can only add.

On a busy machine that ratio is mostly noise. So the parts are measured by themselves too, in thread time, the best of
many: what is noted at one collective, at one `meshbook.log`, and by one beat; and what share of a step they add up to.

    python -m benchmarks.probes [--quick]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh, create_mesh

RANKS = 4
LIMIT = 1.01

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
    groups.ring._detailed, groups.observers[:] = watched, noting if watched else []
    service._probes = probes if watched else None
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if watched:
            meshbook.log(loss=loss)
    return time.process_time() - cpu, time.perf_counter() - wall

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
    steps, rounds = (10, 4) if quick else (15, 40)
    spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(SETUP)
        before = groups_collectives(mesh)
        mesh.run(f"block({steps}, True)")
        per_step = (groups_collectives(mesh) - before) / steps
        for round_ in range(rounds):
            for watched in (True, False) if round_ % 2 else (False, True):
                spent[watched].append(block(mesh, steps, watched))
        parts = [min(values) for values in zip(*dict(mesh.run("parts()").values).values(), strict=True)]
    for what, place in (("CPU of all ranks", 0), ("wall", 1)):
        plain, watching = f"a step without probes, {what}", f"a step with probes, {what}"
        report.add(plain, [1e3 * pair[place] / steps for pair in spent[False]], "ms")
        report.add(watching, [1e3 * pair[place] / steps for pair in spent[True]], "ms", against=plain)
        ratio = report.row(watching).percentile(10) / report.row(plain).percentile(10)
        report.promise(f"{what} of DDP steps with probes, best tenth, as a multiple of without", ratio, LIMIT, "x")
    collective = report.add("noting a collective", parts[0], "us")
    logged = report.add("meshbook.log", parts[1], "us")
    beat = report.add("measuring for a beat", parts[2], "us")
    step_us = 1e3 * report.row("a step without probes, CPU of all ranks").percentile(10) / RANKS
    wall_us = 1e3 * report.row("a step without probes, wall").percentile(10)
    share = (per_step * collective + logged) / step_us + beat / 1e6 * wall_us / step_us
    report.note(f"a step has {per_step:.1f} collectives; the parts are {100 * share:.2f} % of it")
    report.promise("the parts added up, as a multiple of a rank's step without them", 1 + share, LIMIT, "x")
    return report


def groups_collectives(mesh: Mesh) -> int:
    """Collectives that rank 0 has begun so far."""
    return int(dict(mesh.run("groups.ring.last.seq").values)[0])


def block(mesh: Mesh, steps: int, watched: bool) -> tuple[float, float]:
    """CPU seconds of all ranks together, and wall seconds of the slowest, for so many steps."""
    times: list[tuple[float, float]] = list(dict(mesh.run(f"block({steps}, {watched})").values).values())
    return sum(cpu for cpu, _ in times), max(wall for _, wall in times)


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
