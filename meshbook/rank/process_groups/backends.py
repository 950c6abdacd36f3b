"""Real gloo and NCCL backends: creating one, and aborting operations that are stuck in it.

Neither library lets another thread cancel a wait. A gloo wait ends when its connections are shut down, so the addresses
of a backend's connections are recorded when it is created. An NCCL kernel ends when its communicator is aborted; its
results are then garbage, and nothing raises.

Does not depend on process groups, generations or users.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import ProcessGroupGloo, is_nccl_available

# Seconds that an NCCL abort may take before its rank counts as lost. Others report 0.15 s (NeMo-RL) when it works.
_ABORT_TIMEOUT_S = 20.0

# gloo's timeout, because it knows no "never": `timeouts` ends what takes too long.
A_YEAR = timedelta(days=365)

# Address of one end of a connection, "127.0.0.1:43211". Only compared.
Address = str


@dataclass(frozen=True)
class BackendHandle:
    """One real backend and what is needed to abort its operations."""

    kind: str  # "gloo" or "nccl"
    backend: Any
    addresses: frozenset[Address] = field(default_factory=frozenset)  # of gloo's listeners, on this rank and its peers


def connect_gloo(
    store: Store, rank: int, size: int, *, hostname: str | None, connect_timeout_s: float
) -> BackendHandle:
    """Create a gloo backend, connected to all its peers. Blocks until all have connected.

    Its collectives wait as long as they are let; see `timeouts`.

    Args:
        store: with this group's own prefix, the same on all its members.
        rank, size: in the group.
        hostname: the interface to listen on; None leaves the choice to torch, as `init_process_group` does.
        connect_timeout_s: seconds to wait for the peers.

    Raises:
        RuntimeError: the peers did not connect in time, or the connection to the store was lost.
    """
    gloo: Any = ProcessGroupGloo
    addresses_before = set(_iter_listener_addresses())
    device = gloo.create_device(hostname=hostname) if hostname else gloo.create_default_device()
    own_addresses = [address for address in _iter_listener_addresses() if address not in addresses_before]
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=connect_timeout_s)
    backend = gloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend._set_default_timeout(A_YEAR)
    # One end of every connection is a listener of a member. So the listeners identify the connections exactly,
    # including those made later, and never match a connection of the user's own.
    store.set(f"listeners/{rank}", " ".join(own_addresses))
    all_addresses = store.multi_get([f"listeners/{peer}" for peer in range(size)])
    return BackendHandle(
        "gloo", backend, frozenset(address for text in all_addresses for address in text.decode().split())
    )


def connect_nccl(
    store: Store, rank: int, size: int, *, device: torch.device, timeout: timedelta, options: Any = None
) -> BackendHandle:
    """Create an NCCL backend and its communicator. Blocks until all members have connected, without a timeout.

    NCCL would otherwise connect in the first collective, inside the user's cell, where nothing ends the wait for a
    member that does not come.

    Args:
        device: this rank's GPU; becomes the calling thread's current device.
        options: the `ProcessGroupNCCL.Options` that the user passed to `new_group`; None for torch's own.
    """
    if not is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL; install a CUDA build, or use CPU ranks (gloo)")
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    nccl: Any = ProcessGroupNCCL
    # torch's watchdog would end the process when a collective fails or times out, and the monitor when the watchdog
    # itself is late. In a mesh the supervisor decides, and the user's tensors must survive.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    if options is None:
        options = nccl.Options()
    options._timeout = timeout
    torch.cuda.set_device(device)
    backend = nccl(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return BackendHandle("nccl", backend)


def abort(handles: Collection[BackendHandle]) -> None:
    """Abort whatever runs in these NCCL backends, and make every later use of them fail. May block; any thread."""
    nccl = [handle.backend for handle in handles]
    # As one group: when aborted one by one, two ranks with different orders can wait for each other (pytorch#119797).
    nccl[0]._group_start()
    try:
        for backend in nccl:
            backend.abort()
    finally:
        nccl[0]._group_end()


class BackendAborts:
    """Ends the operations that are stuck in backends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, handles: Iterable[BackendHandle]) -> None:
        """End what is stuck in these backends. Any thread; does not block."""
        handles = list(handles)
        shutdown_connections({address for handle in handles for address in handle.addresses})
        nccl, previous = [handle for handle in handles if handle.kind == "nccl"], self._thread
        if nccl:

            def run() -> None:
                if previous is not None:
                    previous.join()
                abort(nccl)

            # On a thread of its own: NCCL's abort sometimes takes long or hangs, and must not block the caller.
            self._thread = threading.Thread(target=run, name="abort NCCL", daemon=True)
            self._thread.start()

    def dispose(self, detached: list[Any]) -> None:
        """Drop backends that nobody uses any more, without waiting for what they still do.

        The destructor of a gloo backend joins its threads. One that connects to a process that has died may take its
        time, although its connections are shut down.
        """
        with contextlib.suppress(RuntimeError):  # the process cannot start more threads: they are dropped here
            threading.Thread(target=detached.clear, name="drop backends", daemon=True).start()

    def join(self) -> None:
        """Wait until NCCL has given up its communicators.

        Raises:
            RuntimeError: it did not in time.
        """
        if self._thread is None:
            return
        self._thread.join(_ABORT_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(
                f"NCCL did not give up its communicators within {_ABORT_TIMEOUT_S:.0f} s: this rank is lost. That "
                "takes a new mesh: %mesh stop, then %mesh start"
            )
        self._thread = None


def shutdown_connections(addresses: Collection[Address]) -> int:
    """Shut down every TCP connection of this process that has one of these addresses at either end.

    gloo operations that wait for them fail. Any thread; does not block. Returns the number of connections.

    Listeners are left alone: gloo ends the process when one of its listeners fails.
    """
    if not addresses:
        return 0
    count = 0
    for connection in _iter_tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or no longer
            if _is_listening(connection):
                continue
            ends = {_format_address(connection.getsockname()), _format_address(connection.getpeername())}
            if not ends.isdisjoint(addresses):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _iter_listener_addresses() -> Iterator[Address]:
    for listener in _iter_tcp_sockets():
        with contextlib.suppress(OSError):
            if _is_listening(listener):
                yield _format_address(listener.getsockname())


def _iter_tcp_sockets() -> Iterable[socket.socket]:
    """Yield a duplicate of every open TCP socket of this process; each is closed before the next is created."""
    for name in os.listdir("/dev/fd"):
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError):  # closed since the listing
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Query the duplicate, because the listed number may belong to another socket by now.
            duplicate = socket.socket(fileno=os.dup(int(name)))
            closing.enter_context(duplicate)
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate


def _is_listening(candidate: socket.socket) -> bool:
    return bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _format_address(sockname: tuple[Any, ...]) -> Address:
    # A dual-stack socket reports an IPv4 peer as ::ffff:127.0.0.1.
    return f"{str(sockname[0]).removeprefix('::ffff:')}:{sockname[1]}"
