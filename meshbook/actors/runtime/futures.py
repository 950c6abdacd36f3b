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
MUST_NOT_WAIT: dict[int, str] = {}


# What Stop leaves a call to end in by itself, so that short endpoints leave their actors whole; and, when it was
# interrupted then, what is waited for its end.
_FINISH_S, _END_S = 0.3, 1.0

# Threads that wait for an answer now: what wakes them, and where they find an error if it is not the answer that did.
_waiting: dict[int, tuple[Any, list[BaseException]]] = {}


def stop_waiting(thread: int, error: BaseException) -> bool:
    """Have `thread` raise `error` out of the `get()` that it waits in; False: it waits in none."""
    found = _waiting.get(thread)
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
        "_interrupt",
        "_lock",
        "_take",
        "_unpacking",
        "_value",
        "_waiters",
        "label",
        "waits_for",
    )

    def __init__(self, label: str = "the call", *, waits_for: int = 0) -> None:
        self.label = label
        self.waits_for = waits_for  # a thread that has to work for the answer to come; 0: none of this process
        self._lock = allocate_lock()
        self._unpacking = allocate_lock()
        self._take: Callable[[], R] | None = None  # set once settled
        self._value: Any = _UNSEEN
        self._error: BaseException | None = None
        self._waiters: list[Any] = []
        self._callbacks: list[Callable[[Future[R]], Any]] = []
        self._interrupt: Callable[[], str] | None = None  # ends what it waits for; says what that was

    @classmethod
    def of(cls, value: R, label: str = "the call") -> Future[R]:
        """A future that is done."""
        future = cls(label)
        future.settle(lambda: value)
        return future

    # ---- for who delivers

    def settle(self, take: Callable[[], R]) -> None:
        """The answer is here; `take()` gives or raises it, once, for who wants it. Later answers are ignored."""
        with self._lock:
            if self._take is not None:
                return
            self._take = take
            self._interrupt = None
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # `stop_waiting` did it at the same moment
                waiter.release()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # others wait for this answer too, and for those behind it; sys.exit() ends nothing
                log.exception("a callback of %s failed", self.label)

    def fail(self, error: BaseException) -> None:
        def take() -> R:
            raise error

        self.settle(take)

    # ---- for who waits

    def done(self) -> bool:
        return self._take is not None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the answer, which is not there: in `get()`, by `await`, by a callback."""
        return self._take is None and bool(self._waiters or self._callbacks)

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
        if self._take is None:
            self._wait(timeout)
        return self._unpack()

    result = get

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout={timeout} is negative; give seconds, or None to wait")
        me = get_ident()
        if me in MUST_NOT_WAIT:
            raise RuntimeError(MUST_NOT_WAIT[me])
        if me == self.waits_for:
            raise RuntimeError(
                f"{self.label} is a call of this actor to itself, and its thread is the one that would answer it: "
                "call the method itself (self.name(…)), or do not wait"
            )
        waiter = allocate_lock()
        waiter.acquire()
        with self._lock:
            if self._take is not None:
                return
            self._waiters.append(waiter)
        errors: list[BaseException] = []
        _waiting[me] = (waiter, errors)
        try:
            arrived = waiter.acquire(True, -1 if timeout is None else timeout)
        except KeyboardInterrupt:
            _waiting.pop(me, None)
            raise stopped([self]) from None
        finally:
            _waiting.pop(me, None)
        if self._take is None:
            with self._lock, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            if errors:
                if isinstance(errors[0], KeyboardInterrupt):
                    self.interrupt()  # the endpoint that waits here was, and so is what it waits for
                raise errors[0]
            if not arrived:
                raise MeshTimeout(f"{self.label} was not answered within {timeout:g} s; it goes on: get() waits again")

    def _unpack(self) -> R:
        if self._value is _UNSEEN and self._error is None:
            with self._unpacking:
                if self._value is _UNSEEN and self._error is None:
                    take = self._take
                    assert take is not None
                    try:
                        self._value = take()
                    except Exception as error:
                        self._error = error
                    self._take = _taken
        if self._error is not None:
            raise self._error.with_traceback(None)  # of where it was made, or of who asked before
        return self._value  # type: ignore[no-any-return]

    def interrupt(self) -> None:
        """End the call on the actors that have not answered: a `def` endpoint gets a KeyboardInterrupt when it next
        runs Python, an async one is cancelled, one that waits in a mailbox is dropped. Does not wait; `get()` then
        raises an ActorError. What is no call of an endpoint goes on."""
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `get()` would raise, or None. Blocks."""
        if self._take is None:
            self._wait(timeout)
        try:
            self._unpack()
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Future[R]], Any]) -> None:
        """Call `callback(self)` once done, on the thread that delivers, where it must not wait; at once if done."""
        with self._lock:
            if self._take is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, R]:
        if self._take is None:
            yield from self._arrival().__await__()
        return self._unpack()

    def _arrival(self) -> asyncio.Future[None]:
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
        return asyncio.ensure_future(_awaiting(self))

    def __repr__(self) -> str:
        return f"<Future: {self.label} {'is done' if self.done() else 'is running'}>"


def stopped(futures: Sequence[Future[Any]]) -> KeyboardInterrupt:
    """Stop was pressed while these were waited for: what they run ends, by itself in a moment or else interrupted.

    A second press does not wait for that. Blocks for some moments.

    Returns:
        What to raise: it says what became of them.
    """
    calls = [future for future in futures if future._interrupt is not None]
    with contextlib.suppress(KeyboardInterrupt):
        _wait_for_end(calls, _FINISH_S)
    said = _interrupt(calls)
    with contextlib.suppress(KeyboardInterrupt):
        _wait_for_end(calls if said else [], _END_S)
    left = _interrupt(calls)
    if left:
        why = "it sleeps or is in C code, and ends when it next runs Python"
        return _shown_briefly(KeyboardInterrupt(f"{left} was interrupted and goes on: {why}"))
    return _shown_briefly(KeyboardInterrupt(*([f"{said} was interrupted"] if said else [])))


def _shown_briefly(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Have IPython show where the user's code waits, and not how this does."""

    def render() -> list[str]:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith((_OWN_FOLDER, _IPYTHON_FOLDER))]
        said = traceback.format_exception_only(error)
        return "".join(["Traceback (most recent call last)\n", *traceback.format_list(theirs), *said]).splitlines()

    error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython asks the exception for it
    return error


def _interrupt(calls: Sequence[Future[Any]]) -> str:
    """Those that are open; says what they were."""
    return "; ".join(dict.fromkeys(end() for call in calls if (end := call._interrupt) is not None))


def _wait_for_end(futures: Sequence[Future[Any]], seconds: float) -> None:
    due = monotonic() + seconds
    for future in futures:
        arrived = threading.Event()
        future.add_done_callback(lambda _, arrived=arrived: arrived.set())  # type: ignore[misc]
        if not arrived.wait(max(0.0, due - monotonic())):
            return


async def _awaiting(future: Future[R]) -> R:
    return await future


def _taken() -> Any:
    raise AssertionError("an answer is unpacked once")


class _Unseen:
    __slots__ = ()


_UNSEEN = _Unseen()


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
    me = get_ident()
    for count in range(len(waiting)):
        if me in MUST_NOT_WAIT and arrived.empty():
            raise RuntimeError(MUST_NOT_WAIT[me])
        try:
            found = arrived.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except KeyboardInterrupt:
            raise stopped([future for future in waiting if not future.done()]) from None
        except Empty:
            raise MeshTimeout(f"{count} of {len(waiting)} calls were answered within {timeout:g} s") from None
        yield found
