"""`mesh.feed`: batches on their way to the ranks while these still compute.

A thread pulls batches, copies each once into shared memory and tells the ranks; a rank maps it between two commands and
takes its own rows, without a copy. The loop does not wait until they have it: what it does with a batch comes to the
ranks after the batch. At most `prefetch` batches are ready besides the one in the loop, and twice as many with ranks
that are not done with them: whoever is slowest, loop, ranks or source, is waited for.
"""

from __future__ import annotations

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

from meshbook.controller import batches, remote
from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.errors import MeshbookError, UsageError
from meshbook.ids import Ranks
from meshbook.rank import paths
from meshbook.rank.tensors import feeding
from meshbook.tensors.creation import engine_of
from meshbook.tensors.engine import Engine, Handle
from meshbook.tensors.plan import contiguous
from meshbook.tensors.remote import wrap

# Seconds between two looks at whether the loop has been left, where a thread waits for something else.
_LOOK_S = 0.2


@dataclass
class _Sent:
    """A batch on its way, or how the source ended."""

    call: str
    ranks: Ranks
    future: Future[Any] | None
    skeleton: Any = None  # the nest, with a _Rows for each tensor
    handles: list[Handle] = field(default_factory=list)  # of the tensors; when they die, ranks let go of them
    error: BaseException | None = None


@dataclass(frozen=True)
class _Rows:
    """A leaf with rows, as it is known here while the ranks hold it."""

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
    """As `Mesh.feed` says."""
    if view not in ("global", "local"):
        raise UsageError(f"there is no view {view!r}; known: global (a RemoteTensor), local (each rank's own rows)")
    if prefetch < 0:
        raise UsageError(f"prefetch={prefetch}; 0 fetches each batch when the loop asks for it, 2 keeps two ahead")
    info = mesh.session.info
    if info.spec is not None and not info.spec.torch:
        raise UsageError("the ranks of this mesh have no torch, and feed gives tensors; mesh.scatter takes plain data")
    return Feed(mesh, source, axis or _one_axis(mesh), prefetch, batch_size, drop_last, uneven, view)


class Feed(Iterator[Any]):
    """The batches, one after the other. Ends with its source, or by `close`, or when it is dropped."""

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
        even = _Even(axis, mesh.size(axis), drop_last=drop_last, uneven=uneven)
        self._pump = _Pump(
            _Sender(mesh, axis, self._engine),
            even.checked(batches.batches_of(source, batch_size)),
            prefetch,
        )
        self._end = weakref.finalize(self, self._pump.stop)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if self._engine is not None:
            self._engine.pause()  # with each batch the same may be done again
        sent = self._pump.take()
        try:
            return self._arrived(sent)
        except BaseException:
            self.close()
            raise

    def _arrived(self, sent: _Sent | None) -> Any:
        if sent is None:
            raise StopIteration
        if sent.error is not None or sent.future is None:
            raise sent.error or StopIteration
        session = self._mesh.session
        if self._view == "global" and not sent.future.done():
            return _globally(self._mesh, self._axis, sent)  # ranks have it before whatever the loop does with it
        finished = sent.future.result()
        session.conclude(finished, sent.ranks, label="feed")
        if self._view == "local":
            return remote.kept(session, sent.call, sent.ranks, session.values_of(finished.parts), "batch")
        return _globally(self._mesh, self._axis, sent)

    def close(self) -> None:
        """Stop pulling; batches that were not asked for are let go on the ranks. Harmless when it has ended."""
        self._end()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Even:
    """The rule for batches that do not divide: an error, left out (the last one), or cut unevenly."""

    def __init__(self, axis: str, num_places: int, *, drop_last: bool, uneven: bool) -> None:
        self._axis, self._num_places = axis, num_places
        self._drop_last, self._uneven = drop_last, uneven

    def checked(self, source: Iterator[Any]) -> Iterator[Any]:
        short: tuple[int, Any] | None = None
        for number, batch in enumerate(source):
            if short is not None:  # it was not the last one
                raise batches.refuse_uneven(short[1], short[0], self._axis, self._num_places, last=False)
            found = batches.normal(batch)
            if not batches.leaves(found):
                raise UsageError(f"batch {number} is a {type(batch).__name__} without any tensor, array or table in it")
            if self._uneven or batches.is_even(found, self._num_places):
                yield found
            elif self._drop_last:
                short = number, found
            else:
                raise batches.refuse_uneven(found, number, self._axis, self._num_places, last=True)


class _Sender:
    """Sends a batch to the ranks, whole; each takes its own rows."""

    def __init__(self, mesh: Mesh, axis: str, engine: Engine | None) -> None:
        self._mesh, self._axis, self._engine = mesh, axis, engine

    def send(self, batch: Any) -> _Sent:
        self._mesh.session.check()
        batch = batches.map_leaves(batch, _as_tensor)
        return self._send_rows(batch) if self._engine is None else self._send_whole(batch, self._engine)

    def _send_whole(self, batch: Any, engine: Engine) -> _Sent:
        tensors: list[torch.Tensor] = []

        def note(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _Rows(tuple(leaf.shape), leaf.dtype)

        skeleton = batches.map_leaves(batch, note)
        placements = [_placements(engine, self._axis, tensor.shape) for tensor in tensors]
        handles, future = engine.feed(tensors, placements)
        return _Sent("", engine.ranks, future, skeleton, handles)

    def _send_rows(self, batch: Any) -> _Sent:
        mesh, session = self._mesh, self._mesh.session
        ranks = mesh.choose(None)
        places = {rank: mesh.grid.point(rank)[self._axis] for rank in ranks}
        here = RemoteValue(session, paths.Path(paths.Name("rank")), ranks)
        device = RemoteValue(session, paths.Path(paths.Name("device")), ranks)
        command = session.call_command(
            _take, (batch, places, mesh.size(self._axis), here, device), {}, ranks,
            keep_always=True, label="feed", inline_limit=0,
        )  # fmt: skip
        return _Sent(command.call, ranks, session.connection.request(command))

    @property
    def ended(self) -> bool:
        session = self._mesh.session
        return session.ended is not None or session.connection.closed or bool(session.lost)

    def let_go(self, sent: _Sent) -> None:
        """Nobody will ask for this batch."""
        session = self._mesh.session
        if self._engine is None and sent.future is not None and not session.connection.closed and session.ended is None:
            sent.future.add_done_callback(lambda done: None if done.exception() else _drop(session, done.result()))


def _take(batch: Any, places: dict[int, int], num_places: int, rank: int, device: Any) -> Any:
    return feeding.own_rows(batch, places[rank], num_places, device)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().contiguous()
    if type(leaf).__module__.partition(".")[0] == "numpy" and hasattr(leaf, "dtype") and hasattr(leaf, "__array__"):
        return torch.as_tensor(leaf if leaf.flags.writeable else leaf.copy(), device="cpu").contiguous()
    return leaf


class _Pump:
    """What the thread shares with the loop. Knows nothing of the Feed, so that one nobody holds can end."""

    def __init__(self, sender: _Sender, source: Iterator[Any], prefetch: int) -> None:
        self._sender, self._source, self._prefetch = sender, source, prefetch
        self._ready: deque[_Sent] = deque()
        self._change = threading.Condition()
        self._stopped = False
        self._done = False
        self._thread: threading.Thread | None = None

    def take(self) -> _Sent | None:
        """The next batch that is sent; None: there is no more. Waits for it."""
        if self._prefetch == 0:
            return self._pull()
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="meshbook-feed", daemon=True)
            self._thread.start()
        with self._change:
            self._change.wait_for(lambda: self._ready or self._stopped or self._done)
            sent = self._ready.popleft() if self._ready else None
            self._change.notify_all()
            return sent

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            left = list(self._ready)
            self._ready.clear()
            self._change.notify_all()
        for sent in left:
            self._sender.let_go(sent)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)  # a source that is stuck is left to itself: the thread is a daemon and ends after it
        if thread is None or not thread.is_alive():
            _close(self._source)

    def _run(self) -> None:
        try:
            self._send_ahead()
        except BaseException as error:  # who waits for a batch would wait for ever
            with self._change:
                self._ready.append(_Sent("", (), None, error=error))
                self._done = True
                self._change.notify_all()

    def _send_ahead(self) -> None:
        under_way: deque[_Sent] = deque()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopped or len(self._ready) < self._prefetch)
                if self._stopped:
                    return
            sent = self._pull()
            with self._change:
                if sent is not None and not self._stopped:
                    self._ready.append(sent)
                    sent = sent if sent.error is None else None
                    late = None
                else:
                    late, sent = sent, None
                self._done = sent is None
                self._change.notify_all()
            if late is not None:
                self._sender.let_go(late)
            if sent is None:
                return
            under_way.append(sent)
            if len(under_way) > 2 * self._prefetch and not self._arrived(under_way.popleft()):
                return

    def _arrived(self, sent: _Sent) -> bool:
        """Wait until the ranks have a batch, or it is known that they will not; False: the loop was left.

        The loop may run ahead of the ranks, and what it takes must not pile up in front of them.
        """
        while sent.future is not None and not self._stopped:
            try:
                sent.future.result(_LOOK_S)
            except FutureTimeout:
                if self._sender.ended:  # nobody sends it any more
                    return True
                continue
            except MeshbookError:
                pass  # the loop meets it at this batch
            return True
        return not self._stopped

    def _pull(self) -> _Sent | None:
        try:
            return self._sender.send(next(self._source))
        except StopIteration:
            return None
        except BaseException as error:  # the source's own, or no memory to share: raised where the loop asks
            return _Sent("", (), None, error=error)


def _drop(session: Any, finished: Any) -> None:
    session.values_of(finished.parts)  # whose end releases what they stand for


def _close(source: Iterator[Any]) -> None:
    close: Callable[[], None] | None = getattr(source, "close", None)
    if close is not None:
        close()


def _one_axis(mesh: Mesh) -> str:
    if len(mesh.axes) != 1:
        raise UsageError(f"this mesh has the axes {', '.join(mesh.axes)}; say over which to shard with axis=…")
    return next(iter(mesh.axes))


def _globally(mesh: Mesh, axis: str, sent: _Sent) -> Any:
    """The batch with a RemoteTensor for each of its tensors. Does not wait."""
    engine, handles = engine_of(mesh), iter(sent.handles)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, _Rows):
            return leaf
        places = _placements(engine, axis, leaf.shape)
        return wrap(engine.planner.spec(leaf.shape, contiguous(leaf.shape), 0, leaf.dtype, places), next(handles))

    return batches.map_leaves(sent.skeleton, made)


def _placements(engine: Engine, axis: str, shape: Sequence[int]) -> tuple[Replicate | Shard, ...]:
    """Cut over the axis along dim 0; what has no rows is everybody's."""
    return tuple(Shard(0) if name == axis and len(shape) else Replicate() for name in engine.axes.names)
