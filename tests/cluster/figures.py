"""Figures of a mesh on two machines of the bed: `python -m tests.cluster.figures`, as root."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from meshbook.actor import Actor, ActorMesh, endpoint
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost
from tests.budget import WAIT_S
from tests.cluster.bed import NETWORK, Bed, why_no_bed, why_no_slurm
from tests.cluster.ray_bed import RayOnBed

MB_64 = 64 << 20
_SERVER = (
    "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept()\nwhile c.recv(1 << 20): pass\nc.send(b'x')"
)
_CLIENT = f"""
import socket, time
data = memoryview(bytes({MB_64}))
for _ in range(100):
    try: c = socket.create_connection(('{NETWORK}.2', 7000)); break
    except OSError: time.sleep(0.05)
begun = time.perf_counter(); c.sendall(data); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.perf_counter() - begun)
"""


def best(action: Callable[[], object], times: int) -> float:
    """Return the least of the seconds that an action takes."""

    def once() -> float:
        begun = time.perf_counter()
        action()
        return time.perf_counter() - begun

    return min(once() for _ in range(times))


def plain_tcp(bed: Bed) -> float:
    """Return the seconds that 64 MiB take from one machine to the other, plainly, in a Python program."""
    server = subprocess.Popen(["nsenter", "-t", str(bed.pid("n2")), "-n", sys.executable, "-c", _SERVER])
    seconds = float(bed.run("n1", sys.executable, "-c", _CLIENT))
    server.wait(WAIT_S)
    return seconds


def starts(**options: object) -> tuple[Mesh, float]:
    begun = time.perf_counter()
    mesh = create_mesh(**options)  # type: ignore[arg-type]
    return mesh, time.perf_counter() - begun


def main() -> None:
    if reason := why_no_bed():
        raise SystemExit(reason)
    bed = Bed(2)
    os.environ["PATH"] = f"{bed.ssh}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="mbf", dir="/tmp") as folder:
        Path(folder).chmod(0o700)
        os.environ["MESHBOOK_RUNTIME_DIR"] = folder
        try:
            measure(bed)
        finally:
            bed.close()


def measure(bed: Bed) -> None:
    ways: dict[str, dict[str, object]] = {
        "on this machine": {"num_hosts": 2},
        "by ssh": {"on": "ssh://n1,n2"},
        "in a Slurm job": {"on": "slurm://", "nodes": 2},
        "on Ray": {"on": "ray://auto", "nodes": 2},
    }
    if reason := why_no_slurm():
        print(f"not in a Slurm job: {reason}")
        del ways["in a Slurm job"]
    else:
        bed.start_slurm()
    cluster = RayOnBed(bed)
    for where, options in ways.items():
        with {"in a Slurm job": bed.here, "on Ray": cluster.here}.get(where, nullcontext)():
            mesh, seconds = starts(axes=4, **options)
        with mesh:
            print(f"4 ranks, 2 hosts, {where}: ready after {seconds:.1f} s")
            round_trip = best(lambda mesh=mesh: mesh.run("1", echo=False), 200)  # type: ignore[misc]
            print(f"  cell round trip, best of 200: {round_trip * 1000:.2f} ms")
    cluster.close()
    for way, place in (("through ssh", nullcontext()), ("by a data connection", bed.here())):
        with place, create_mesh(1, on="ssh://n1", torch=False) as mesh:
            measure_values(bed, mesh, way)
    with create_mesh(4, on="ssh://n1,n2", torch=False) as mesh:
        measure_actors(mesh)
    with create_mesh(4, on="ssh://n1,n2", torch=False) as mesh:
        future = mesh.run("import time; time.sleep(1000)", wait=False)
        time.sleep(1)
        bed.power_off("n2")
        begun = time.perf_counter()
        assert isinstance(future.exception(WAIT_S), RankLost)
        print(f"the ranks of a machine without power are lost after {time.perf_counter() - begun:.1f} s")
        begun = time.perf_counter()
        mesh.stop()
        print(f"the mesh with it is stopped after {time.perf_counter() - begun:.1f} s")


def measure_values(bed: Bed, mesh: Mesh, way: str) -> None:
    """Values beside plain TCP, by turns, because a machine is not always as fast."""
    value = np.random.default_rng(0).random(MB_64 // 8)
    rounds = []
    for _ in range(5):
        plain = min(plain_tcp(bed) for _ in range(5))
        rounds.append((plain, best(lambda: mesh.push(value=value), 8), best(lambda: mesh.pull("value")[0], 8)))
    plain, push, pull = (MB_64 / statistics.median(seconds) / 1e6 for seconds in zip(*rounds, strict=True))
    of_push, of_pull = (statistics.median(row[0] / row[way] for row in rounds) for way in (1, 2))
    print(f"64 MiB to one machine {way}, medians of 5 rounds of the best of 8, plain TCP {plain:.0f} MB/s:")
    print(f"  pushed {push:.0f} MB/s, {of_push:.2f} of it; pulled {pull:.0f} MB/s, {of_pull:.2f} of it")


class Caller(Actor):
    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def measure(self, other: ActorMesh[Caller], nbytes: int, times: int) -> float:
        """The least of the seconds in which another actor answers to so many bytes."""
        value = bytes(nbytes)
        return best(lambda: other.take.call_one(value).get(WAIT_S), times)

    @endpoint
    def take(self, value: bytes) -> int:
        return len(value)


def measure_actors(mesh: Mesh) -> None:
    callers = mesh.spawn("callers", Caller)
    callers.echo.call(0).get(WAIT_S)
    first, near, far = (callers.slice(rank=rank) for rank in (0, 1, 3))
    for who, other in (("on the same machine", near), ("on the other one", far)):
        call = first.measure.call_one(other, 0, 200).get(WAIT_S)
        large = first.measure.call_one(other, MB_64, 5).get(WAIT_S)
        print(f"an actor calls one {who}, best of 200: {call * 1000:.2f} ms")
        print(f"  with 64 MiB, best of 5: {large:.3f} s, {MB_64 / large / 1e6:.0f} MB/s")
    value = bytes(MB_64)
    call = best(lambda: far.take.call_one(b"").get(WAIT_S), 200)
    large = best(lambda: far.take.call_one(value).get(WAIT_S), 5)
    print(f"the notebook calls one on a machine by ssh, best of 200: {call * 1000:.2f} ms")
    print(f"  with 64 MiB, best of 5: {large:.3f} s, {MB_64 / large / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
