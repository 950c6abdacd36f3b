"""`mesh.feed`: sends batches to the ranks while these still compute.

A thread pulls batches, copies each once into shared memory and notifies the ranks; a rank maps it between two commands
and uses its own rows, without a copy. The loop does not wait for that: its operations on a batch reach the ranks after
the batch. At most `prefetch` batches are ready besides the one in the loop, and at most twice as many are unprocessed
on the ranks: the slowest of loop, ranks and source sets the pace.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from meshbook.controller import remote
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.data import batches
from meshbook.data.async_batches import AsyncBatches
from meshbook.errors import MeshbookError, UsageError
from meshbook.ids import Ranks
from meshbook.rank.previews import expressions
from meshbook.rank.tensors import feeding
from meshbook.tensors.creation import engine_of
from meshbook.tensors.dispatch import wrap_handle
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import TensorHandle

# Seconds between checks of whether the loop has been left, while a thread waits for something else.
_POLL_S = 0.2


@dataclass
class _SentBatch:
    """A batch in flight, or the end of the source."""

    call: str
    ranks: Ranks
    future: Future[Any] | None
    skeleton: Any = None  # the nested structure, with a _LeafMeta for each tensor
    handles: list[TensorHandle] = field(default_factory=list)  # of the tensors; the ranks free them with the handles
    error: BaseException | None = None


@dataclass(frozen=True)
class _LeafMeta:
    """Metadata of a leaf with rows, while its data is on the ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def feed(
    mesh: Mesh,
    source: Any,
    *,
    axis: str | None = None,
    prefetch: int = 2,
    batch_size: int | None = None,
    drop_last: bool = False,
    uneven: bool = False,
    view: str = "global",
) -> Feed:
    """See `Mesh.feed`."""
    if view not in ("global", "local"):
        raise UsageError(f"there is no view {view!r}; known: global (a RemoteTensor), local (each rank's own rows)")
    if prefetch < 0:
        raise UsageError(f"prefetch={prefetch}; 0 fetches each batch when the loop asks for it, 2 keeps two ahead")
    info = mesh.session.info
    if info.spec is not None and not info.spec.torch:
        raise UsageError("the ranks of this mesh have no torch, and feed gives tensors; mesh.scatter takes plain data")
    return Feed(mesh, source, axis or _only_axis(mesh), prefetch, batch_size, drop_last, uneven, view)


class Feed(Iterator[Any]):
    """Iterator of batches. Ends with its source, by `close`, or when it is garbage-collected."""

    def __init__(
        self,
        mesh: Mesh,
        source: Any,
        axis: str,
        prefetch: int,
        batch_size: int | None,
        drop_last: bool,
        uneven: bool,
        view: str,
    ) -> None:
        self._mesh, self._axis, self._view = mesh, axis, view
        self._engine = engine_of(mesh) if view == "global" else None
        pulled = batches.iterate_batches(source, batch_size)
        checked = _iter_checked(pulled, axis, mesh.size(axis), drop_last=drop_last, uneven=uneven)
        cancel = pulled.close if isinstance(pulled, AsyncBatches) else None
        self._prefetcher = _Prefetcher(_BatchSender(mesh, axis, self._engine), checked, prefetch, cancel)
        self._finalizer = weakref.finalize(self, self._prefetcher.stop)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if self._engine is not None:
            self._engine.flush_if_idle()  # the loop may repeat the same operations with each batch
        sent = self._prefetcher.pop()
        try:
            return self._deliver(sent)
        except BaseException:
            self.close()
            raise

    def _deliver(self, sent: _SentBatch | None) -> Any:
        if sent is None:
            raise StopIteration
        if sent.error is not None or sent.future is None:
            raise sent.error or StopIteration
        session = self._mesh.session
        if self._view == "global" and not sent.future.done():
            return _to_global_batch(self._mesh, self._axis, sent)  # ranks receive it before any operation of the loop
        finished = sent.future.result()
        session.raise_for_status(finished, sent.ranks, label="feed")
        if self._view == "local":
            return remote.result_handle(session, sent.call, sent.ranks, session.rank_values(finished.outcomes), "batch")
        return _to_global_batch(self._mesh, self._axis, sent)

    def close(self) -> None:
        """Stop pulling; batches that the loop did not receive are released on the ranks. Harmless after the end."""
        self._finalizer()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _iter_checked(source: Iterator[Any], axis: str, num_shards: int, *, drop_last: bool, uneven: bool) -> Iterator[Any]:
    """Yield the batches, normalized; of those that do not divide evenly, raise, drop the last one, or yield it."""
    dropped: tuple[int, Any] | None = None
    for number, batch in enumerate(source):
        if dropped is not None:  # the dropped batch was not the last one
            raise batches.uneven_error(dropped[1], dropped[0], axis, num_shards, last=False)
        normalized = batches.normalize(batch)
        if not batches.leaves(normalized):
            raise UsageError(f"batch {number} is a {type(batch).__name__} without any tensor, array or table in it")
        if uneven or batches.is_even(normalized, num_shards):
            yield normalized
        elif drop_last:
            dropped = number, normalized
        else:
            raise batches.uneven_error(normalized, number, axis, num_shards, last=True)


class _BatchSender:
    """Sends complete batches to the ranks; each uses its own rows."""

    def __init__(self, mesh: Mesh, axis: str, engine: TensorEngine | None) -> None:
        self._mesh, self._axis, self._engine = mesh, axis, engine

    def send(self, batch: Any) -> _SentBatch:
        self._mesh.session.check_attached()
        batch = batches.map_leaves(batch, _as_tensor)
        return self._send_local(batch) if self._engine is None else self._send_global(batch, self._engine)

    def _send_global(self, batch: Any, engine: TensorEngine) -> _SentBatch:
        tensors: list[torch.Tensor] = []

        def record_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _LeafMeta(tuple(leaf.shape), leaf.dtype)

        skeleton = batches.map_leaves(batch, record_leaf)
        placements = [_batch_placements(engine, self._axis, tensor.shape) for tensor in tensors]
        handles, future = engine.feed(tensors, placements)
        return _SentBatch("", engine.ranks, future, skeleton, handles)

    def _send_local(self, batch: Any) -> _SentBatch:
        mesh, session = self._mesh, self._mesh.session
        ranks = mesh.resolve_ranks(None)
        shard_indices = {rank: mesh.grid.point(rank)[self._axis] for rank in ranks}
        rank_handle = RemoteValue(session, expressions.Expression(expressions.NameRef("rank")), ranks)
        device_handle = RemoteValue(session, expressions.Expression(expressions.NameRef("device")), ranks)
        command = session.call_command(
            _select_own_rows, (batch, shard_indices, mesh.size(self._axis), rank_handle, device_handle), {}, ranks,
            always_retain=True, label="feed", inline_limit=0,
        )  # fmt: skip
        return _SentBatch(command.call, ranks, session.connection.request(command))

    @property
    def is_closed(self) -> bool:
        session = self._mesh.session
        return session.ended is not None or session.connection.closed or bool(session.lost)

    def discard(self, sent: _SentBatch) -> None:
        """Release a batch that the loop will not receive."""
        session = self._mesh.session
        if self._engine is None and sent.future is not None and not session.connection.closed and session.ended is None:
            sent.future.add_done_callback(
                lambda done: None if done.exception() else _release_values(session, done.result())
            )


def _select_own_rows(batch: Any, shard_indices: dict[int, int], num_shards: int, rank: int, device: Any) -> Any:
    return feeding.select_own_rows(batch, shard_indices[rank], num_shards, device)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().contiguous()
    if type(leaf).__module__.partition(".")[0] == "numpy" and hasattr(leaf, "dtype") and hasattr(leaf, "__array__"):
        return torch.as_tensor(leaf if leaf.flags.writeable else leaf.copy(), device="cpu").contiguous()
    return leaf


class _Prefetcher:
    """State shared by the thread and the loop. Does not refer to the Feed, so that an unused Feed can be collected."""

    def __init__(
        self, sender: _BatchSender, source: Iterator[Any], prefetch: int, cancel: Callable[[], None] | None
    ) -> None:
        self._sender, self._source, self._prefetch = sender, source, prefetch
        self._cancel = cancel  # ends the wait for a batch of an async source
        self._ready: deque[_SentBatch] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._is_exhausted = False
        self._thread: threading.Thread | None = None
        self._has_thread_ended = False
        self._is_abandoned = False  # the source hangs: the thread closes it when it comes back

    def pop(self) -> _SentBatch | None:
        """Return the next batch that has been sent; None: the source has ended. Blocks."""
        if self._prefetch == 0:
            return self._send_next()
        if self._thread is None and not self._is_stopped:
            self._thread = threading.Thread(target=self._run, name="meshbook-feed", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_stopped or self._is_exhausted)
            sent = self._ready.popleft() if self._ready else None
            self._changed.notify_all()
            return sent

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            remaining = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        for sent in remaining:
            self._sender.discard(sent)
        if self._cancel is not None:
            self._cancel()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)  # a source that hangs is abandoned: the thread is a daemon and ends after it
        with self._changed:
            self._is_abandoned = thread is not None and not self._has_thread_ended
        if not self._is_abandoned:
            _close_source(self._source)

    def _run(self) -> None:
        try:
            self._prefetch_loop()
        except BaseException as error:  # otherwise a loop that waits for a batch would hang
            with self._changed:
                self._ready.append(_SentBatch("", (), None, error=error))
                self._is_exhausted = True
                self._changed.notify_all()
        with self._changed:
            self._has_thread_ended = True
            is_abandoned = self._is_abandoned
        if is_abandoned:
            with contextlib.suppress(Exception):  # nobody waits for it any more
                _close_source(self._source)

    def _prefetch_loop(self) -> None:
        in_flight: deque[_SentBatch] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or len(self._ready) < self._prefetch)
                if self._is_stopped:
                    return
            sent = self._send_next()
            with self._changed:
                if sent is not None and not self._is_stopped:
                    self._ready.append(sent)
                    sent = sent if sent.error is None else None
                    unwanted = None
                else:
                    unwanted, sent = sent, None
                self._is_exhausted = sent is None
                self._changed.notify_all()
            if unwanted is not None:
                self._sender.discard(unwanted)
            if sent is None:
                return
            in_flight.append(sent)
            if len(in_flight) > 2 * self._prefetch and not self._wait_until_received(in_flight.popleft()):
                return

    def _wait_until_received(self, sent: _SentBatch) -> bool:
        """Wait until the ranks have a batch, or cannot receive it any more; False: the loop was left.

        The loop may run ahead of the ranks, and its batches must not pile up in front of them.
        """
        while sent.future is not None and not self._is_stopped:
            try:
                sent.future.result(_POLL_S)
            except FutureTimeout:
                if self._sender.is_closed:  # the batch can no longer be sent
                    return True
                continue
            except MeshbookError:
                pass  # raised in the loop, at this batch
            return True
        return not self._is_stopped

    def _send_next(self) -> _SentBatch | None:
        try:
            return self._sender.send(next(self._source))
        except StopIteration:
            return None
        except BaseException as error:  # of the source, or no shared memory: raised in the loop
            return _SentBatch("", (), None, error=error)


def _release_values(session: Any, finished: Any) -> None:
    session.rank_values(finished.outcomes)  # the values are released when these objects are collected


def _close_source(source: Iterator[Any]) -> None:
    close: Callable[[], None] | None = getattr(source, "close", None)
    if close is not None:
        close()


def _only_axis(mesh: Mesh) -> str:
    if len(mesh.axes) != 1:
        raise UsageError(f"this mesh has the axes {', '.join(mesh.axes)}; say over which to shard with axis=…")
    return next(iter(mesh.axes))


def _to_global_batch(mesh: Mesh, axis: str, sent: _SentBatch) -> Any:
    """Return the batch with a RemoteTensor for each of its tensors. Does not wait."""
    engine, handles = engine_of(mesh), iter(sent.handles)

    def to_remote_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, _LeafMeta):
            return leaf
        placements = _batch_placements(engine, axis, leaf.shape)
        return wrap_handle(engine.specs.intern(leaf.shape, leaf.dtype, placements), next(handles))

    return batches.map_leaves(sent.skeleton, to_remote_tensor)


def _batch_placements(engine: TensorEngine, axis: str, shape: Sequence[int]) -> tuple[Replicate | Shard, ...]:
    """Shard dim 0 over the axis; replicate what has no rows."""
    return tuple(Shard(0) if name == axis and len(shape) else Replicate() for name in engine.axes.names)
