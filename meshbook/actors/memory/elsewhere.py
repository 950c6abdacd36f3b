"""Copies from and to memory of a process on another machine: in parts, which threads of that process read and write."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from meshbook.actors.mesh import ActorMesh, process_mesh
from meshbook.actors.runtime.faults import ActorError, SupervisionError
from meshbook.actors.runtime.futures import Future
from meshbook.errors import MeshTimeout, TransferError
from meshbook.wire.messages import NodeAddress

_PART_BYTES = 4 << 20
_MAX_OPEN_PARTS = 4

# Starts the copy of a part: takes the process, an offset and a number of bytes.
StartPart = Callable[["ActorMesh[Any]", int, int], Future[Any]]


def copy_in_parts(
    owner: NodeAddress, nbytes: int, start: StartPart, on_part: Callable[[int, Any], None], timeout_s: float
) -> None:
    """Copy, some parts at a time. Blocks.

    Args:
        on_part: takes the offset of a part that is done, and what the owner has answered; called in order.
        timeout_s: for each part.

    Raises:
        TransferError: the owner cannot read or write it, has ended, or does not answer.
    """
    process = process_mesh(f"process {owner.pid}", (owner,))
    parts: deque[tuple[int, Future[Any]]] = deque()

    def finish_first() -> None:
        at, future = parts.popleft()
        on_part(at, future.get(timeout_s))

    try:
        for at in range(0, nbytes, _PART_BYTES):
            parts.append((at, start(process, at, min(_PART_BYTES, nbytes - at))))
            if len(parts) == _MAX_OPEN_PARTS:
                finish_first()
        while parts:
            finish_first()
    except SupervisionError as error:
        raise TransferError(f"this buffer of {nbytes:,} bytes cannot be copied: {error}") from None
    except ActorError as error:
        raise (error.exception if isinstance(error.exception, TransferError) else error) from None
    except MeshTimeout:
        raise TransferError(
            f"process {owner.pid} on another machine, whose memory this buffer of {nbytes:,} bytes is, has not "
            f"answered within {timeout_s:.0f} s; read_into(…, timeout=) waits longer"
        ) from None
