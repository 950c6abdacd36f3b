"""Futures of calls: one implementation with `get()`, `await` and callbacks.

The transport's reader thread resolves a future; the first thread that reads the value unpacks it. Independent of
sockets and actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sysconfig
import threading
import traceback
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, NoReturn, Self, TypeVar

from meshbook.clock import monotonic
from meshbook.errors import MeshTimeout

log = logging.getLogger("meshbook.actors")

R = TypeVar("R")

_OWN_FOLDER = str(Path(__file__).resolve().parents[2]) + "/"
_IPYTHON_FOLDER = str(Path(sysconfig.get_paths()["purelib"]) / "IPython") + "/"

# Threads that must not block on a reply, with the reason: they would wait forever, or block everything that runs on
# them.
NON_BLOCKING_THREADS: dict[int, str] = {}


# Seconds after an interrupt in which a call may finish by itself, so that a short endpoint is not cut off halfway; and,
# once it was interrupted, seconds to wait for its end.
_FINISH_GRACE_S, _INTERRUPT_GRACE_S = 0.3, 1.0

# Threads blocked in `get()`: the lock that wakes each, and the list in which it finds an error if no reply woke it.
_waiting_threads: dict[int, tuple[Any, list[BaseException]]] = {}


def raise_in_waiter(thread: int, error: BaseException) -> bool:
    """Raise `error` in `thread` if it is blocked in `get()`; return whether it was."""
    found = _waiting_threads.get(thread)
    if found is None:
        return False
    waiter, errors = found
    errors.append(error)
    with contextlib.suppress(RuntimeError):  # the reply arrived at the same moment
        waiter.release()
    return True


class Future(Generic[R]):
    """The reply to a call, once it arrives: `get(timeout)` blocks, `await` does not.

    `result`, `exception` and `done` behave as in `concurrent.futures`.
    """

    _DEADLOCK = (
        "{label} is a call of this actor to itself, and its thread is the one that would answer it: "
        "call the method itself (self.name(…)), or do not wait"
    )

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_interrupt_call",
        "_load",
        "_load_lock",
        "_lock",
        "_value",
        "_waiters",
        "answering_thread",
        "label",
    )

    def __init__(self, label: str = "the call", *, answering_thread: int = 0) -> None:
        self.label = label
        # the thread of this process that has to run for the reply to arrive; 0: none
        self.answering_thread = answering_thread
        self._lock = allocate_lock()
        self._load_lock = allocate_lock()
        self._load: Callable[[], R] | None = None  # set once resolved
        self._value: Any = _NOT_LOADED
        self._error: BaseException | None = None
        self._waiters: list[Any] = []
        self._callbacks: list[Callable[[Any], Any]] = []
        self._interrupt_call: Callable[[], str] | None = None  # interrupts the call; returns a description of it

    @classmethod
    def of(cls, value: R, label: str = "the call") -> Future[R]:
        """Return a future that is done."""
        future = cls(label)
        future.resolve(lambda: value)
        return future

    # A forgotten `get()`.

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or name in self.__slots__:
            raise AttributeError(name)
        hint = "interrupt() ends the call" if name == "cancel" else "get() waits for its value, which may have it"
        raise AttributeError(f"the Future of {self.label} has no {name!r}; {hint}")

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"the Future of {self.label} is not its value; get() waits for that")

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    __bool__ = __iter__ = __len__ = __getitem__ = __contains__ = __float__ = __int__ = __index__ = __round__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse

    # ---- resolving

    def resolve(self, load: Callable[[], R]) -> None:
        """Resolve the future; `load()` returns or raises the result and runs once, on first access.

        Later calls are ignored.
        """
        with self._lock:
            if self._load is not None:
                return
            self._load = load
            self._interrupt_call = None
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # `raise_in_waiter` did it at the same moment
                waiter.release()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # other callbacks and replies must still be processed, even after sys.exit()
                log.exception("a callback of %s failed", self.label)

    def fail(self, error: BaseException) -> None:
        def take() -> R:
            raise error

        self.resolve(take)

    # ---- waiting

    def done(self) -> bool:
        return self._load is not None

    @property
    def is_awaited(self) -> bool:
        """Whether the reply is pending and has a waiter: in `get()`, by `await`, or by a callback."""
        return self._load is None and bool(self._waiters or self._callbacks)

    def get(self, timeout: float | None = None) -> R:
        """Wait for the reply and return its value. Blocks; in an async endpoint use `await`.

        Args:
            timeout: seconds; None waits as long as the ranks live. After a timeout, `get` can be called again.

        Raises:
            ActorError: the endpoint raised; with the remote traceback and the ranks.
            SupervisionError: an actor that was called, or its process, has exited.
            MeshTimeout: the timeout expired (a TimeoutError); the call continues.
            RuntimeError: waiting on this thread would deadlock, for example on the event loop of an async actor.
            KeyboardInterrupt: the wait was interrupted (Ctrl-C). An endpoint that does not finish shortly is
                interrupted too.
        """
        if self._load is None:
            self._wait(timeout)
        return self._get_loaded()

    result = get

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait on any thread, also where `get` refuses to; return whether the future is done.

        Only for results that are certain to come in a moment without the waiting thread.
        """
        arrived = threading.Event()
        self.add_done_callback(lambda _: arrived.set())
        return arrived.wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout={timeout} is negative; give seconds, or None to wait")
        thread = get_ident()
        if thread in NON_BLOCKING_THREADS:
            raise RuntimeError(NON_BLOCKING_THREADS[thread])
        if thread == self.answering_thread:
            raise RuntimeError(self._DEADLOCK.format(label=self.label))
        waiter = allocate_lock()
        waiter.acquire()
        with self._lock:
            if self._load is not None:
                return
            self._waiters.append(waiter)
        errors: list[BaseException] = []
        _waiting_threads[thread] = (waiter, errors)
        try:
            arrived = waiter.acquire(True, -1 if timeout is None else timeout)
        except KeyboardInterrupt:
            _waiting_threads.pop(thread, None)
            raise interrupt_calls([self]) from None
        finally:
            _waiting_threads.pop(thread, None)
        if self._load is None:
            with self._lock, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            if errors:
                if isinstance(errors[0], KeyboardInterrupt):
                    self.interrupt()  # the waiting endpoint was interrupted, so interrupt its call too
                raise errors[0]
            if not arrived:
                raise MeshTimeout(f"{self.label} was not answered within {timeout:g} s; it goes on: get() waits again")

    def _get_loaded(self) -> R:
        if self._value is _NOT_LOADED and self._error is None:
            with self._load_lock:
                if self._value is _NOT_LOADED and self._error is None:
                    load = self._load
                    assert load is not None
                    try:
                        self._value = load()
                    except BaseException as error:  # also an interrupt: what was unpacked cannot be unpacked again
                        self._error = error
                    self._load = _already_loaded
        if self._error is not None:
            raise self._error.with_traceback(None)  # drop the traceback of its creation or of an earlier `get()`
        return self._value  # type: ignore[no-any-return]

    def interrupt(self) -> None:
        """Interrupt the call on the actors that have not replied. Does not wait.

        A `def` endpoint gets a KeyboardInterrupt when it next runs Python, an async endpoint is cancelled, and a queued
        call is dropped. `get()` then raises an ActorError. Anything but an endpoint call continues.
        """
        interrupt = self._interrupt_call
        if interrupt is not None:
            interrupt()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `get()` would raise, or None. Blocks."""
        if self._load is None:
            self._wait(timeout)
        try:
            self._get_loaded()
        except BaseException as error:
            if error is not self._error:  # this thread was interrupted
                raise
        return self._error

    def add_done_callback(self, callback: Callable[[Self], Any]) -> None:
        """Call `callback(self)` on the resolving thread, where it must not block; at once if already done."""
        with self._lock:
            if self._load is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, R]:
        if self._load is None:
            yield from self._asyncio_event().__await__()
        return self._get_loaded()

    def _asyncio_event(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def tell(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        return arrived

    def as_asyncio(self) -> asyncio.Future[R]:
        """Return an asyncio future of the running loop with the same result."""
        return asyncio.ensure_future(self)

    def __repr__(self) -> str:
        return f"<Future: {self.label} {'is done' if self.done() else 'is running'}>"


def interrupt_calls(futures: Sequence[Future[Any]]) -> KeyboardInterrupt:
    """Interrupt the calls that a KeyboardInterrupt found waiting, unless they finish shortly. Blocks.

    Waits for `_FINISH_GRACE_S` and `_INTERRUPT_GRACE_S` at most; a second Ctrl-C ends the wait.

    Returns:
        The KeyboardInterrupt to raise; its message says what happened to the calls.
    """
    calls = [future for future in futures if future._interrupt_call is not None]
    with contextlib.suppress(KeyboardInterrupt):
        _wait_all(calls, _FINISH_GRACE_S)
    interrupted = _send_interrupts(calls)
    with contextlib.suppress(KeyboardInterrupt):
        _wait_all(calls if interrupted else [], _INTERRUPT_GRACE_S)
    still_running = _send_interrupts(calls)
    if still_running:
        why = "it sleeps or is in C code, and ends when it next runs Python; interrupt(actors) kills its subprocesses"
        return _with_short_traceback(KeyboardInterrupt(f"{still_running} was interrupted and goes on: {why}"))
    return _with_short_traceback(KeyboardInterrupt(*([f"{interrupted} was interrupted"] if interrupted else [])))


def _with_short_traceback(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Have IPython show only user frames for `error`."""

    def render() -> list[str]:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not frame.filename.startswith((_OWN_FOLDER, _IPYTHON_FOLDER))]
        exception_lines = traceback.format_exception_only(error)
        return "".join(
            ["Traceback (most recent call last)\n", *traceback.format_list(user_frames), *exception_lines]
        ).splitlines()

    error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython asks the exception for it
    return error


def _send_interrupts(calls: Sequence[Future[Any]]) -> str:
    """Interrupt the pending calls; return a description of them."""
    return "; ".join(dict.fromkeys(interrupt() for call in calls if (interrupt := call._interrupt_call) is not None))


def _wait_all(futures: Sequence[Future[Any]], seconds: float) -> None:
    deadline = monotonic() + seconds
    for future in futures:
        if not future.wait_done(max(0.0, deadline - monotonic())):
            return


def _already_loaded() -> Any:
    raise AssertionError("an answer is unpacked once")


_NOT_LOADED: Any = object()


def resolve_after(parts: Sequence[Future[Any]], future: Future[R], load: Callable[[], R]) -> None:
    """Resolve `future` by `load` when all `parts` are done."""
    num_pending, lock = len(parts), threading.Lock()

    def one_less(_: Future[Any]) -> None:
        nonlocal num_pending
        with lock:  # runs on the resolving threads or, for parts that are done already, on this one
            num_pending -= 1
            is_last = not num_pending
        if is_last:
            future.resolve(load)

    for part in parts:
        part.add_done_callback(one_less)
    if not parts:
        future.resolve(load)


def run_in_thread(function: Callable[[], R], label: str, *, daemon: bool = False) -> Future[R]:
    """Run a function on a thread of its own; return a future of its result.

    Args:
        daemon: False: a normal exit of the program waits for the thread.
    """
    future: Future[R] = Future(label)

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # otherwise the future would never resolve
            future.fail(error)
        else:
            future.resolve(lambda: value)

    threading.Thread(target=run, name=label, daemon=daemon).start()
    return future


def as_completed(futures: Iterable[Future[R]], timeout: float | None = None) -> Iterator[Future[R]]:
    """Yield each future as soon as it is done. Blocks.

    Raises:
        MeshTimeout: not all were done within `timeout` seconds.
    """
    waiting = list(futures)
    arrived: SimpleQueue[Future[R]] = SimpleQueue()
    for future in waiting:
        future.add_done_callback(arrived.put)
    deadline = None if timeout is None else monotonic() + timeout
    thread = get_ident()
    for count in range(len(waiting)):
        if thread in NON_BLOCKING_THREADS and arrived.empty():
            raise RuntimeError(NON_BLOCKING_THREADS[thread])
        try:
            found = arrived.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except KeyboardInterrupt:
            raise interrupt_calls([future for future in waiting if not future.done()]) from None
        except Empty:
            raise MeshTimeout(f"{count} of {len(waiting)} calls were answered within {timeout:g} s") from None
        yield found
