"""A host on another machine: `python -m meshbook.host.remote MESH HOST`, which whoever starts it speaks to by lines.

It first says what there is on this machine (`RemoteHello` on standard output), while its fork server imports torch. It
then reads how it is to go on (`RemoteStart` on standard input) and connects to the supervisor's sockets, which are
forwarded into its folder or listen on TCP. Standard input stays open: its end means that the starter has ended or
cannot be reached, and then this host ends its ranks. A host that is cut off notices nothing; its lease ends it
(`HostProcess`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from meshbook.errors import MeshbookError, MeshInUse
from meshbook.host.facts import gather_facts, interface_of, launch_address, own_address
from meshbook.host.gpus import find_others_gpus
from meshbook.host.keeper import Keeper, end_like
from meshbook.host.main import HostProcess
from meshbook.host.rlimits import raise_fd_limit
from meshbook.wire import folders, processes
from meshbook.wire.remote_start import (
    HOSTS_SOCKET,
    STORE_SOCKET,
    HostPlace,
    RemoteHello,
    RemoteStart,
    SupervisorAddress,
    TryWays,
    WaysTried,
)

# Seconds that the host of the same number that was here before has to end, with its ranks, after SIGKILL.
_END_TIMEOUT_S = 5.0
_TRY_TIMEOUT_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("host", type=int)
    parser.add_argument("--light", action="store_true")  # ranks without torch
    parser.add_argument("--facts-only", action="store_true")
    parser.add_argument("--launched-from", default="")  # an address; "": ssh or srun says it
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and ranks would inherit that
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of standard input ends this host in order
    raise_fd_limit()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    if options.facts_only:
        _be_looked_at()
        return
    try:
        folders.remove_stale_folders()  # of hosts that were killed, with their copies of a project
        folder = _claim_folder(f"{options.mesh}.h{options.host}")
    except MeshbookError as error:
        _write_line(RemoteHello(problem=str(error)))
        sys.exit(1)
    folders.lock_folder(folder)
    status = 0
    try:
        if processes.has_pidfds():
            keeper = Keeper()
            status = keeper.run(lambda: _serve(folder, options.host, options.launched_from, keeper, options.light))
        else:
            _serve(folder, options.host, options.launched_from, None, options.light)
    finally:
        folders.remove_folder(folder)
    end_like(status)


def _serve(folder: Path, number: int, launcher: str, keeper: Keeper | None, light: bool) -> None:
    facts = gather_facts(launch_address(launcher))
    _write_line(RemoteHello(facts=facts, folder=str(folder)))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads more of it, and a pipe that is full blocks
    line = sys.stdin.buffer.readline()
    if not line:
        return
    start = msgspec.json.decode(line, type=RemoteStart)
    facts = msgspec.structs.replace(facts, address=own_address(start.peers, launcher))
    if (others := find_others_gpus()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(others.free)
    interface = interface_of(facts.address)
    if interface is not None:  # exactly this one; what the machine or the mesh itself says comes before it
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    there = start.supervisor or SupervisorAddress(f"ipc://{folder}/{HOSTS_SOCKET}", f"ipc://{folder}/{STORE_SOCKET}")
    place = HostPlace(facts.address, there.store, there.server_key)
    host = HostProcess(folder, number, start.token, keeper=keeper, place=place, lease_s=start.lease_s)
    host.agent.warm_up(with_torch=not light)
    stdin = sys.stdin.fileno()

    def on_stdin() -> None:
        if not os.read(stdin, 4096):
            host.loop.unwatch(stdin)
            host.stop("its connection to the supervisor's machine has ended")

    host.loop.watch_fd(stdin, on_stdin)
    host.run(start.identity, there.hosts, facts, server_key=there.server_key)


def _claim_folder(name: str) -> Path:
    """Create this host's folder. A host of the same mesh and number that is here still, from before, is ended."""
    folder = folders.runtime_folder() / name
    try:
        return folders.claim_folder(name)
    except MeshInUse:
        owner = folders.read_owner(folder)
        if owner is None or processes.is_on_other_host(owner):
            raise
        with contextlib.suppress(ProcessLookupError):
            if processes.is_running(owner):
                os.kill(owner.pid, signal.SIGKILL)  # its host agent, fork server and ranks end with it
        deadline = time.monotonic() + _END_TIMEOUT_S
        while folder.exists() and not folders.is_stale(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        return folders.claim_folder(name)


def _be_looked_at() -> None:
    """Say what this machine has; then try the ways to others, if that is asked for, and serve a measurement."""
    facts = gather_facts(launch_address())
    listener: socket.socket | None = None
    with contextlib.suppress(OSError):
        listener = socket.create_server((facts.address, 0))  # the system answers who connects
    _write_line(RemoteHello(facts=facts, port=listener.getsockname()[1] if listener is not None else 0))
    line = sys.stdin.buffer.readline()
    if not line:
        return
    with ThreadPoolExecutor() as threads:
        problems = threads.map(_try_way, msgspec.json.decode(line, type=TryWays).places)
        _write_line(WaysTried(tuple(problems)))
    _echo()


def _try_way(place: tuple[str, int]) -> str:
    """Connect to a machine; return why that did not work, "" if it did. Blocks, for some seconds at most."""
    try:
        socket.create_connection(place, timeout=_TRY_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _echo() -> None:
    """Send back what arrives on standard input, for a measurement of the connection."""
    while piece := os.read(sys.stdin.fileno(), 1 << 20):
        view = memoryview(piece)
        while view:
            view = view[os.write(sys.stdout.fileno(), view) :]


def _write_line(message: RemoteHello | WaysTried) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
