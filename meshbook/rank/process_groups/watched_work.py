"""Operations in flight of a watched group, and their futures."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import Work

from meshbook.rank.process_groups.cuda import finish_on_stream
from meshbook.rank.process_groups.failures import GroupBroken
from meshbook.rank.process_groups.group_health import NO_TIMEOUT, GroupHealth, failure_of
from meshbook.rank.process_groups.ring import Collective


class WatchedWork(Work):
    """An operation in flight, as returned for `async_op=True`, `isend` and callers in C++."""

    def __init__(
        self,
        health: GroupHealth,
        record: Collective,
        work: Any,
        in_slices: bool | None,
        observed_arguments: tuple[Any, ...] | None,
    ) -> None:
        """
        Args:
            in_slices: None for NCCL, whose waits do not block; False for sends and receives on gloo.
            observed_arguments: None without observers.
        """
        super().__init__()
        self._health = health
        self._record = record
        self._work = work
        self._connection_version = health.connection_version
        self._in_slices = in_slices
        self._observed_arguments = observed_arguments
        self._future: Any = None
        this = weakref.ref(self)  # a strong reference from the ring would keep the tensors alive

        def is_finished() -> bool:
            watched = this()
            if watched is None:
                return True  # dropped without a wait: its state can no longer be queried, and does not matter
            if in_slices is False:
                return False  # gloo completes a send or receive in its `wait`, which records the end
            if not watched._work.is_completed():
                return False
            # Recorded as a success, a failure would count as taking part, and other members would wait forever. The
            # thread that waits for it may record it only when its reason is known.
            if in_slices and (error := failure_of(watched._work)) is not None:
                health.ring.finish(record, error)
            return True

        self.is_finished = is_finished
        health.ring.set_completion_check(record, is_finished, on_device=in_slices is None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        health, record, work = self._health, self._record, self._work
        try:
            if self._in_slices:
                health.wait_in_slices(work, timeout)
            elif self._in_slices is False:
                health.wait_for_peer(record, work, timeout)
            else:
                # On NCCL this only orders streams, unless there is a timeout; then it blocks until the device is done.
                work.wait(timeout) if timeout else work.wait()
                finish_on_stream(health.ring, record)
                health.raise_if_aborted(record)
        except BaseException as error:
            if timeout and isinstance(error, RuntimeError) and health.failure is None and not work.is_completed():
                raise  # the caller's own timeout: the operation continues, and may be waited for again
            try:
                raised = health.finish_failed(record, error, self._connection_version, work, launched=True)
            except BaseException as signal_error:
                raised = health.finish_failed(record, signal_error, self._connection_version, work, launched=True)
            if raised is error:
                raise
            raise raised from None
        if self._in_slices is not None:
            health.ring.finish(record)
        if self._observed_arguments is not None:
            arguments, self._observed_arguments = self._observed_arguments, None
            if record.op == "recv" and record.peer is None:
                arguments = (*arguments, work._source_rank())
            health.notify_finished(record, arguments)
        return True

    def get_future(self) -> Any:
        """Return a future of the operation's tensors. On gloo it raises the abort error of the group, also in C++."""
        if self._in_slices is None:
            # Its value belongs to streams, which a new future would not track. This one runs callbacks at once, on a
            # stream that waits for the operation.
            future = self._work.get_future()
            future.add_done_callback(lambda _: finish_on_stream(self._health.ring, self._record))
            return future
        if self._future is None:
            # the future may outlive this object
            self._health.ring.set_completion_check(self._record, None)
            arguments, self._observed_arguments = self._observed_arguments, None
            self._future = _AbortableFuture(self._health, self._record, self._work, arguments).future
        return self._future


def delegate(Class: type, attribute: str, names: Iterable[str]) -> None:
    """Give a subclass of one of torch's classes these methods, as far as torch has them: they call the real object's.

    Args:
        attribute: that holds the real object.
    """
    for name in names:
        if hasattr(Class.__base__, name):
            setattr(Class, name, _delegated(Class, attribute, name))


def _delegated(Class: type, attribute: str, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"{Class.__name__}.{name}"
    return method


_DELEGATED = (
    "_get_duration",
    "_get_op_type",
    "_source_rank",
    "block_current_stream",
    "exception",
    "get_future_result",
    "is_completed",
    "is_success",
    "result",
    "source_rank",
    "synchronize",
)
delegate(WatchedWork, "_work", _DELEGATED)


class _AbortableFuture:
    """A future of a gloo operation that `abort` can complete as well.

    DDP's reducer waits for such futures in C++, where a future cannot carry a Python exception: it takes the value and
    searches it for tensors. So a failed future holds an object that raises when it is accessed.
    """

    def __init__(
        self, health: GroupHealth, record: Collective, work: Any, observed_arguments: tuple[Any, ...] | None
    ) -> None:
        self._observed_arguments = observed_arguments
        self._health, self._record, self._connection_version = health, record, health.connection_version
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future._set_unwrap_func(_unwrap)
        self._inner: Any = None
        self._results: list[tuple[Any, BaseException | None]] = []  # the first one counts
        self._is_passing_on = False  # on another thread than the main one
        failure = health.add_future(record, self)
        if failure is not None:
            self.fail(failure.error_to_raise() or GroupBroken(failure.reason))
        self._inner = work.get_future()
        self._inner.add_done_callback(self._on_inner_done)

    def poll(self) -> None:
        """Complete it if gloo's future is done and its callback was lost. Does not block.

        torch drops a KeyboardInterrupt in a callback, wherever in it that comes.
        """
        if self._inner is not None and self._inner.done() and not self._is_passing_on:
            # An error is passed on when its reason is known, which the service thread, on which this is, brings.
            passing_on = threading.Thread(
                target=self._on_inner_done, args=(self._inner,), name="meshbook-future", daemon=True
            )
            passing_on.start()

    def fail(self, error: BaseException) -> None:
        """Complete it with an error, unless it is complete."""
        self._complete(_RaiseOnAccess(error), error)

    def _on_inner_done(self, future: Any) -> None:
        """Pass on gloo's result. Called on gloo's own thread. Blocks until the reason of an error is known."""
        if threading.get_ident() == threading.main_thread().ident:  # gloo was done already
            self._pass_on(future)
            return
        self._is_passing_on = True
        try:
            self._pass_on(future)
        finally:
            self._is_passing_on = False

    def _pass_on(self, future: Any) -> None:
        try:
            value = future.value()
        except Exception as error:
            self.fail(self._health.finish_failed(self._record, error, self._connection_version, None, launched=True))
        else:
            self._complete(value)

    def _complete(self, value: Any, error: BaseException | None = None) -> None:
        """Complete it with the first result that comes. May be called again, if an interrupt has ended a call."""
        self._results.append((value, error))  # atomic: an abort may come at once
        value, error = self._results[0]
        self._health.ring.finish(self._record, error)
        arguments, self._observed_arguments = self._observed_arguments, None
        if arguments is not None and error is None:
            self._health.notify_finished(self._record, arguments)
        with contextlib.suppress(RuntimeError):  # it is complete
            self.future.set_result(value)
        self._health.forget_future(self._record)


def _unwrap(value: Any) -> Any:
    if isinstance(value, _RaiseOnAccess):
        value.raise_error()
    return value


class _RaiseOnAccess:
    """Raises on access: in Python when the future unwraps it, in C++ in the pickler that searches for tensors."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_error(self) -> NoReturn:
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error
