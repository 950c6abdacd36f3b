"""A process group that behaves as NCCL's does, over gloo, for ranks of tests.

Its collectives return when they are enqueued, and run one after the other on a stream. What is aborted there, or fails,
ends without an error and leaves garbage; only the group's owner knows of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from meshbook.rank.process_groups import watched_group, watched_work
from meshbook.rank.process_groups.backends import BackendHandle, shutdown_connections
from meshbook.rank.process_groups.collectives import COLLECTIVES
from meshbook.rank.process_groups.ring import Collective, CollectiveRing
from meshbook.rank.process_groups.watched_group import WatchedGroup
from tests.budget import WAIT_S


class Stream:
    """Runs what is enqueued, in order, on a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def enqueue(self, work: Callable[[], None] = lambda: None) -> threading.Event:
        """Return the event that is set when the work, and all before it, is done."""
        done = threading.Event()
        self._queue.put((work, done))
        return done

    def synchronize(self) -> None:
        assert self.enqueue().wait(WAIT_S)

    def _run(self) -> None:
        while True:
            work, done = self._queue.get()
            work()
            done.set()


class DeviceWork:
    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        """Order streams: nothing to do here, where there is one."""
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class DeviceGroup:
    """The group on the device, around the one of gloo."""

    def __init__(self, real: Any, stream: Stream) -> None:
        self._real, self._stream = real, stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        return self._launched(method) if name in COLLECTIVES else method

    def _launched(self, method: Callable[..., Any]) -> Callable[..., DeviceWork]:
        def launch(*args: Any, **kwargs: Any) -> DeviceWork:
            def run() -> None:
                try:
                    method(*args, **kwargs).wait()
                except RuntimeError:
                    for tensor in args[0] if args and isinstance(args[0], list) else ():
                        tensor.fill_(float("nan"))

            return DeviceWork(self._stream.enqueue(run))

        return launch


class DeviceBackend:
    def __init__(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    def abort(self) -> None:
        shutdown_connections(self._addresses)


def install() -> Stream:
    """Have all groups that this process connects from now on behave so; return the stream."""
    stream, attach_backends = Stream(), WatchedGroup.attach_backends

    def attach(group: Any, handles: Any, store: Any) -> None:
        group._has_nccl = False
        attach_backends(group, handles, store)
        group._has_nccl = True
        group.backend_handles = (BackendHandle("nccl", DeviceBackend(handles[0].addresses)),)
        group.replace_inner(DeviceGroup(group.inner, stream))

    def finish_on_stream(ring: CollectiveRing, record: Collective) -> None:
        ring.set_completion_check(record, stream.enqueue().is_set, on_device=True)

    patched: Any = WatchedGroup
    patched.attach_backends, patched._uses_nccl = attach, lambda *_: True
    for module in (watched_group, watched_work):
        module.finish_on_stream = finish_on_stream
    torch.set_num_threads(1)
    return stream
