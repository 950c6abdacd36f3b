"""The answer to a call, before it is there: one implementation, three ways to wait.

Settled from the thread that hears other processes; what has arrived is unpacked by whoever asks for it, on that one's
thread. Knows nothing of sockets or actors.
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
from typing import Any, Generic, TypeVar

from meshbook.clock import monotonic
from meshbook.errors import MeshTimeout

log = logging.getLogger("meshbook.actors")

R = TypeVar("R")

_OWN_FOLDER = str(Path(__file__).resolve().parents[2]) + "/"
_IPYTHON_FOLDER = str(Path(sysconfig.get_paths()["purelib"]) / "IPython") + "/"

# Threads that must not wait for an answer, and why: they would wait for ever, or stop everything that runs on them.
NON_BLOCKING_THREADS: dict[int, str] = {}


# What Stop leaves a call to end in by itself, so that short endpoints leave their actors whole; and, when it was
# interrupted then, what is waited for its end.
_FINISH_GRACE_S, _INTERRUPT_GRACE_S = 0.3, 1.0

# Threads that wait for an answer now: what wakes them, and where they find an error if it is not the answer that did.
_waiting_threads: dict[int, tuple[Any, list[BaseException]]] = {}


def raise_in_waiter(thread: int, error: BaseException) -> bool:
    """Have `thread` raise `error` out of the `get()` that it waits in; False: it waits in none."""
    found = _waiting_threads.get(thread)
    if found is None:
        return False
    waiter, errors = found
    errors.append(error)
    with contextlib.suppress(RuntimeError):  # the answer has come at the same moment
        waiter.release()
    return True


class Future(Generic[R]):
    """`get(timeout)` blocks; `await` does not; `result`, `exception`, `done` are as in `concurrent.futures`."""

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
        self.answering_thread = (
            answering_thread  # a thread that has to work for the answer to come; 0: none of this process
        )
        self._lock = allocate_lock()
        self._load_lock = allocate_lock()
        self._load: Callable[[], R] | None = None  # set once settled
        self._value: Any = _NOT_LOADED
        self._error: BaseException | None = None
        self._waiters: list[Any] = []
        self._callbacks: list[Callable[[Future[R]], Any]] = []
        self._interrupt_call: Callable[[], str] | None = None  # ends what it waits for; says what that was

    @classmethod
    def of(cls, value: R, label: str = "the call") -> Future[R]:
        """A future that is done."""
        future = cls(label)
        future.resolve(lambda: value)
        return future

    # ---- for who delivers

    def resolve(self, load: Callable[[], R]) -> None:
        """The answer is here; `take()` gives or raises it, once, for who wants it. Later answers are ignored."""
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
            except BaseException:  # others wait for this answer too, and for those behind it; sys.exit() ends nothing
                log.exception("a callback of %s failed", self.label)

    def fail(self, error: BaseException) -> None:
        def take() -> R:
            raise error

        self.resolve(take)

    # ---- for who waits

    def done(self) -> bool:
        return self._load is not None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the answer, which is not there: in `get()`, by `await`, by a callback."""
        return self._load is None and bool(self._waiters or self._callbacks)

    def get(self, timeout: float | None = None) -> R:
        """Wait for the answer and give it. Blocks; in an async endpoint use `await`.

        Args:
            timeout: seconds; None waits for as long as the ranks live. A timeout does not use the future up.

        Raises:
            ActorError: the endpoint raised; with the remote traceback and the ranks.
            SupervisionError: an actor that was called, or its process, is gone.
            MeshTimeout: the time is over (a TimeoutError); the call goes on.
            RuntimeError: waiting here would wait for ever, as on the event loop of an async actor.
            KeyboardInterrupt: Stop was pressed. If the endpoint does not end by itself in a moment, it is interrupted.
        """
        if self._load is None:
            self._wait(timeout)
        return self._get_loaded()

    result = get

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout={timeout} is negative; give seconds, or None to wait")
        thread = get_ident()
        if thread in NON_BLOCKING_THREADS:
            raise RuntimeError(NON_BLOCKING_THREADS[thread])
        if thread == self.answering_thread:
            raise RuntimeError(
                f"{self.label} is a call of this actor to itself, and its thread is the one that would answer it: "
                "call the method itself (self.name(…)), or do not wait"
            )
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
                    self.interrupt()  # the endpoint that waits here was, and so is what it waits for
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
                    except Exception as error:
                        self._error = error
                    self._load = _already_loaded
        if self._error is not None:
            raise self._error.with_traceback(None)  # of where it was made, or of who asked before
        return self._value  # type: ignore[no-any-return]

    def interrupt(self) -> None:
        """End the call on the actors that have not answered: a `def` endpoint gets a KeyboardInterrupt when it next
        runs Python, an async one is cancelled, one that waits in a mailbox is dropped. Does not wait; `get()` then
        raises an ActorError. What is no call of an endpoint goes on."""
        interrupt = self._interrupt_call
        if interrupt is not None:
            interrupt()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `get()` would raise, or None. Blocks."""
        if self._load is None:
            self._wait(timeout)
        try:
            self._get_loaded()
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Future[R]], Any]) -> None:
        """Call `callback(self)` once done, on the thread that delivers, where it must not wait; at once if done."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        return arrived

    def as_asyncio(self) -> asyncio.Future[R]:
        """The same as an asyncio future of the running loop."""
        return asyncio.ensure_future(_await_future(self))

    def __repr__(self) -> str:
        return f"<Future: {self.label} {'is done' if self.done() else 'is running'}>"


def interrupt_calls(futures: Sequence[Future[Any]]) -> KeyboardInterrupt:
    """Stop was pressed while these were waited for: what they run ends, by itself in a moment or else interrupted.

    A second press does not wait for that. Blocks for some moments.

    Returns:
        What to raise: it says what became of them.
    """
    calls = [future for future in futures if future._interrupt_call is not None]
    with contextlib.suppress(KeyboardInterrupt):
        _wait_all(calls, _FINISH_GRACE_S)
    interrupted = _send_interrupts(calls)
    with contextlib.suppress(KeyboardInterrupt):
        _wait_all(calls if interrupted else [], _INTERRUPT_GRACE_S)
    still_running = _send_interrupts(calls)
    if still_running:
        why = "it sleeps or is in C code, and ends when it next runs Python"
        return _with_short_traceback(KeyboardInterrupt(f"{still_running} was interrupted and goes on: {why}"))
    return _with_short_traceback(KeyboardInterrupt(*([f"{interrupted} was interrupted"] if interrupted else [])))


def _with_short_traceback(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Have IPython show where the user's code waits, and not how this does."""

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
    """Those that are open; says what they were."""
    return "; ".join(dict.fromkeys(interrupt() for call in calls if (interrupt := call._interrupt_call) is not None))


def _wait_all(futures: Sequence[Future[Any]], seconds: float) -> None:
    deadline = monotonic() + seconds
    for future in futures:
        arrived = threading.Event()
        future.add_done_callback(lambda _, arrived=arrived: arrived.set())  # type: ignore[misc]
        if not arrived.wait(max(0.0, deadline - monotonic())):
            return


async def _await_future(future: Future[R]) -> R:
    return await future


def _already_loaded() -> Any:
    raise AssertionError("an answer is unpacked once")


class _NotLoaded:
    __slots__ = ()


_NOT_LOADED = _NotLoaded()


def as_completed(futures: Iterable[Future[R]], timeout: float | None = None) -> Iterator[Future[R]]:
    """The futures, each as soon as it is done. Blocks between them.

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
