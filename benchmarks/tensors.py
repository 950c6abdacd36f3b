"""What an operation on remote tensors costs the process that issues it, and how fast the ranks get through them.

A GPT's train step (forward, backward, AdamW) issued operation by operation with every line kept, a loop of one tiny
operation, and where Monarch's tensor engine is installed the same loop there. CPU is of the issuing thread.

The step is measured with ranks that wait, as if they had cores of their own, in turns with the same step whose
operations do nothing and give what they gave before. That is torch's own part: autograd, modules, the optimizer, and
torch's way from an operation to Python and back. The difference is ours. Counted is what torch asks for: a `detach`,
say, costs as much, though nothing of it is sent.

    python -m benchmarks.tensors [--quick]
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import gpt, workbench
from benchmarks.contestants import Calls, start_all
from benchmarks.report import Report
from benchmarks.workbench import milliseconds
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.tensors import dispatch, remote
from meshbook.tensors.creation import distribute, engine_of
from meshbook.tensors.modules import module_to_mesh

RANKS = 2
# Microseconds of CPU per operation that we allow ourselves, user lines kept, where torch's own part of them is 9 us. So
# it was when the limit was set; elsewhere, and at other times of the same machine, all of it takes longer or shorter.
LIMIT_US, TORCHS_PART_US = 20.0, 9.0
# How many times Monarch's operations per second ours have to be.
TIMES_MONARCH = 5.0
MONARCHS_OPERATIONS = 1_000


def measure(quick: bool, folder: Path) -> Report:
    report = Report("tensors", f"operations on remote tensors, {RANKS} ranks, metadata cached")
    torch.set_num_threads(1)
    with create_mesh({"dp": RANKS}) as mesh:
        train_step(report, mesh, folder / "waiting", rounds=3 if quick else 40)
        ours = tiny_loop(report, mesh, rounds=3 if quick else 15, operations=2_000 if quick else 10_000)
        number(report, mesh, rounds=20 if quick else 300)
        whole_tensor(report, mesh, mib=16 if quick else 256, rounds=2 if quick else 5)
    with contextlib.ExitStack() as running:
        for theirs in start_all(report, {"Monarch": monarch}, RANKS, folder, running).values():
            cpu, wall = ([theirs.asker(kind)() for _ in range(3)] for kind in ("CPU", "end to end"))
            report.add("a tiny operation, CPU of the controller: Monarch", cpu, "us", against=TINY_CPU)
            median = report.add("a tiny operation, end to end: Monarch", wall, "us", against=END_TO_END)
            report.promise("Monarch's tensor engine, ops/s in ours", ours / median, 1 / TIMES_MONARCH, "x")
    return report


TINY_CPU, END_TO_END = "a tiny operation, CPU of the controller", "a tiny operation, end to end"
CPU_ALONE = "an operation of a GPT step (d=64, L=2), CPU of the controller"
TORCHS_PART = "... torch's own part of an operation"


def train_step(report: Report, mesh: Mesh, gate: Path, rounds: int) -> None:
    model = module_to_mesh(gpt.GPT(64, 2, 32), mesh)
    optimizer = gpt.adamw(model)
    given = gpt.remote_data(mesh, 8, 32)
    engine = engine_of(mesh)

    def step() -> torch.Tensor:
        loss: torch.Tensor = gpt.train_step(model, optimizer, *given)
        return loss

    for _ in range(4):
        step().item()
    num_ops, torchs_part = without_operations(step)
    alone, own = [], []
    for _ in range(rounds):
        with waiting(mesh, gate):
            for _ in range(_STEPS_AT_ONCE):
                gc.collect()
                started = time.thread_time()
                step()
                engine.flush()
                alone.append(1e6 * (time.thread_time() - started) / num_ops)
                own.append(1e6 * torchs_part() / num_ops)
        engine.wait()
    report.add(TORCHS_PART, own, "us")
    report.add(CPU_ALONE, alone, "us", against=TORCHS_PART)
    report.difference("... and Meshbook's, user lines kept", CPU_ALONE, TORCHS_PART)
    text = f"an operation of a GPT step by torch's own part of it ({LIMIT_US:.0f} us by {TORCHS_PART_US:.0f})"
    report.promise(text, report.ratio(CPU_ALONE), LIMIT_US / TORCHS_PART_US, "x")
    report.note(f"{num_ops} operations; the best step, us an operation: {min(alone):.1f}, torch's {min(own):.1f}")


# Steps that are issued while ranks wait: they must fit into what may be on its way, or nobody would go on.
_STEPS_AT_ONCE = 4


@contextlib.contextmanager
def waiting(mesh: Mesh, gate: Path) -> Iterator[None]:
    """The ranks sit in a cell, and what is issued lies before them."""
    gate.touch()
    there = f"os.path.exists({str(gate)!r})"
    cell = mesh.run(f"import os, time\nfor _ in range(6000):\n    if {there}: time.sleep(0.005)", wait=False)
    try:
        yield
    finally:
        gate.unlink()
        cell.result(timeout=60)


def without_operations(step: Callable[[], Any]) -> tuple[int, Callable[[], float]]:
    """How many operations a step has, and what gives the CPU seconds of the step if they do nothing: then each gives
    a tensor like the one that it gave when it was noted here."""
    handles: list[Any] = []
    inside = False

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            nonlocal inside
            if inside:  # an operation made of others
                return function(*args)
            inside = True
            try:
                result = function(*args)
            finally:
                inside = False
            several = isinstance(result, (list, tuple))
            handles.append([one._handle for one in result] if several else getattr(result, "_handle", None))
            return result

        return noted

    def like(handle: Any) -> Any:
        if isinstance(handle, list):
            return tuple(map(like, handle))
        return handle and dispatch.wrap_handle(handle.spec, handle)

    def seconds() -> float:
        ready = [like(handle) for handle in reversed(handles)]
        give = ready.pop  # nothing else may hold them: autograd takes a gradient that is its own, and copies others
        with in_place_of_ours(lambda func, types, args=(), kwargs=None: give(), lambda *_: give()):
            spent = time.thread_time()
            step()
            spent = time.thread_time() - spent
        assert not ready
        return spent

    with in_place_of_ours(noting(dispatch.torch_dispatch), noting(dispatch.execute_template)):
        step()
    return len(handles), seconds


@contextlib.contextmanager
def in_place_of_ours(arrive: Callable[..., Any], perform: Callable[..., Any]) -> Iterator[None]:
    patch = mock.patch.object
    arrived: Any = staticmethod(arrive)
    with patch(remote.RemoteTensor, "__torch_dispatch__", arrived), patch(dispatch, "execute_template", perform):
        yield


def tiny_loop(report: Report, mesh: Mesh, rounds: int, operations: int) -> float:
    a = distribute(torch.ones(4, 4), mesh)
    engine = engine_of(mesh)
    cpu, wall = [], []
    for round_ in range(rounds + 1):
        engine.wait()
        started, spent = time.perf_counter(), time.thread_time()
        for _ in range(operations):
            a + a
        engine.flush()
        spent = time.thread_time() - spent
        engine.wait()
        if round_:
            cpu.append(1e6 * spent / operations)
            wall.append(1e6 * (time.perf_counter() - started) / operations)
    report.add(TINY_CPU, cpu, "us")
    return report.add(END_TO_END, wall, "us")


def number(report: Report, mesh: Mesh, rounds: int) -> None:
    a = distribute(torch.ones(4, 4), mesh)
    contestants = {
        "a.sum().item()": milliseconds(lambda: a.sum().item()),
        "... and mesh.run('pass') beside it": milliseconds(lambda: mesh.run("pass")),
    }
    for name, taken in workbench.take_turns(contestants, rounds).items():
        report.add(name, taken, "ms")


def whole_tensor(report: Report, mesh: Mesh, mib: int, rounds: int) -> None:
    here = torch.ones(mib << 18)
    there = distribute(here, mesh, sharding_spec=["dp"])
    there.sum().item()
    target = torch.ones_like(here)
    copy, name = f"a copy of {mib} MiB here, into warm memory", f"full_tensor() of {mib} MiB"

    def first() -> float:
        mesh.session.transfer._pool.trim(0.0)  # as after half a minute without a read
        return milliseconds(there.full_tensor)()

    contestants = {
        copy: milliseconds(lambda: target.copy_(here)),
        "... into fresh memory": milliseconds(here.clone),
        f"{name}, the first": first,
        name: milliseconds(there.full_tensor),
    }
    for what, taken in workbench.take_turns(contestants, rounds, warm_up=1).items():
        report.add(what, taken, "ms", against=None if what == copy else copy)
    report.promise(f"{name}, in copies", report.ratio(name), 3.0, "x")


@contextlib.contextmanager
def monarch(ranks: int, folder: Path) -> Iterator[Calls]:
    """The tiny loop in Monarch's tensor engine; microseconds of an operation."""
    from monarch import fetch_shard
    from monarch.actor import this_host

    with this_host().spawn_procs({"gpus": ranks}).activate():
        a = torch.ones(4, 4)

        def loop(kind: str) -> float:
            started, spent = time.perf_counter(), time.thread_time()
            for _ in range(MONARCHS_OPERATIONS):
                b = a + a
            spent = time.thread_time() - spent
            fetch_shard(b).result(timeout=60)
            return 1e6 * (spent if kind == "CPU" else time.perf_counter() - started) / MONARCHS_OPERATIONS

        yield {kind: functools.partial(loop, kind) for kind in ("CPU", "end to end")}
        os._exit(0)  # its own end waits longer than the measurement


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
