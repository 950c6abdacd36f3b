"""The API for programs written for `monarch.rdma`: the same names, imported from `meshbook.rdma`.

    from meshbook.rdma import RDMABuffer

`meshbook.actors.buffer` implements them: shared memory on one machine, CUDA IPC for its GPUs.
"""

from __future__ import annotations

from typing import Any, Self

from meshbook.actors.buffer import Buffer, RDMABuffer
from meshbook.actors.runtime.futures import Future, resolve_after

__all__ = ["Buffer", "RDMAAction", "RDMABuffer", "get_rdma_backend", "is_ibverbs_available", "is_rdma_available"]


class RDMAAction:
    """Several copies that start together: `RDMAAction().read_remote(dst, buffer).submit().get()`."""

    def __init__(self) -> None:
        self._copy_calls: list[tuple[Any, Any]] = []  # method, argument

    def read_remote(self, dst: Any, src: Buffer) -> Self:
        """Add `src.read_into(dst)`."""
        self._copy_calls.append((src.read_into, dst))
        return self

    def write_remote(self, dst: Buffer, src: Any) -> Self:
        """Add `dst.write_from(src)`."""
        self._copy_calls.append((dst.write_from, src))
        return self

    def submit(self, *, timeout: float = 60) -> Future[None]:
        """Start all copies and return a future that is done when all of them are.

        The future raises the error of the first copy that failed. An action may be submitted any number of times.

        Raises:
            TransferError: a copy does not fit; those before it are in flight.
        """
        copies = [method(argument, timeout=timeout) for method, argument in self._copy_calls]
        done: Future[None] = Future(f"{len(copies)} copies")

        def take() -> None:
            for copy in copies:
                copy.get()

        resolve_after(copies, done, take)
        return done


def get_rdma_backend() -> str:
    """Return how buffers of CPU tensors are read: "shared memory"."""
    return "shared memory"


def is_ibverbs_available() -> bool:
    """Return False: buffers are read within one machine."""
    return False


def is_rdma_available() -> bool:
    """Whether `RDMABuffer` works: always True; for programs that check before they create one."""
    return True
