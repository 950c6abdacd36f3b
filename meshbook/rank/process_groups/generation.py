"""The generation of a process's groups: all of them are formed together, and aborted together.

Each generation has its own prefix in the store, `e<number>/<group>`, so keys of a former generation are never read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from meshbook.clock import monotonic
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure, is_transport_error
from meshbook.rank.process_groups.store import MeshStore

Result = TypeVar("Result")

# Interval at which a thread whose peers connect checks for an abort, which promises 0.2 s.
_POLL_S = 0.02
# How many groups may connect at a time: one per thread of user code, and those that were left behind.
_MAX_CONNECTING = 64


class Generation:
    """The current generation.

    Attributes:
        number: None before the first.
        store: None before the first, and once the world group is destroyed.
        abort_failure: what all groups were aborted with since they were formed.
        connect_timeout_s: seconds to wait for other ranks while groups are formed; None at other times.
        lock: held while the number or the failure changes.
    """

    def __init__(self, exits: ExitQuestions | None = None) -> None:
        """exits: asks whether a rank has ended, when a connection has failed; None where nobody can be asked."""
        self._exits = exits
        self.number: int | None = None
        self.store: Store | None = None
        self.abort_failure: GroupFailure | None = None
        self.connect_timeout_s: float | None = None
        self.lock = threading.Lock()
        # the latest generation that an abort named, and its failure: it may be formed only after that
        self._early_number = 0
        self._early_failure: GroupFailure | None = None
        self._num_rendezvous = 0  # threads that wait for the store or for peers to connect
        # Few threads that last: each has a connection to the store.
        self._connect_threads = concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTING, "meshbook-connect")

    def begin(self, number: int, store: Store, connect_timeout_s: float) -> None:
        """Start a generation, which is being formed until `formed`."""
        with self.lock:
            self.number = number
            self.abort_failure = self._early_failure if number <= self._early_number else None
        self.store, self.connect_timeout_s = store, connect_timeout_s

    def formed(self) -> None:
        """Record that forming has ended, well or not."""
        self.connect_timeout_s = None

    def record_abort(self, failure: GroupFailure, number: int | None) -> bool:
        """Record why the groups of a generation, and of those before it, cannot be used. The lock is held.

        Args:
            number: None: the present one.

        Returns:
            Whether there is something to abort: not if newer groups have replaced them, or none were formed yet.
        """
        if number is not None:
            if self.number is not None and number < self.number:
                return False
            self._early_number, self._early_failure = number, failure
        if self.number is None:
            return False
        if self.abort_failure is None:
            self.abort_failure = failure
        self.cancel_rendezvous()
        return True

    def fail(self, failure: GroupFailure) -> GroupFailure:
        """Record why no group can be used, unless that is known; return what is recorded."""
        with self.lock:
            if self.abort_failure is None:
                self.abort_failure = failure
            return self.abort_failure

    def cancel_rendezvous(self) -> None:
        """End the waits for the store. The failure is set before; the lock is held."""
        if self._num_rendezvous > 0 and isinstance(self.store, MeshStore):
            self.store.cancel_waits()

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for other ranks to form a group. Any thread."""
        return self._num_rendezvous > 0

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[None]:
        """Wrap a wait for the store or for peers, so that an abort ends it with the abort error."""
        with _cancel_scope(self.store):
            with self.lock:
                self.check_not_aborted()
                self._num_rendezvous += 1
            try:
                yield
            except RuntimeError as error:
                if is_transport_error(error) and self._exits is not None:
                    self._exits.wait_until_reported(lambda: self.abort_failure is not None)
                abort_error = self.abort_failure.error_to_raise() if self.abort_failure is not None else None
                if abort_error is not None:
                    raise abort_error from None
                raise
            finally:
                with self.lock:
                    self._num_rendezvous -= 1

    def run_abortably(self, connect: Callable[[], Result], timeout_s: float | None = None) -> Result:
        """Return what `connect` returns, which waits for peers in C++. Within `rendezvous`.

        Nothing ends such a wait for a peer that has died before it connected. So it is on a thread of its own, which is
        left behind by an abort, and ends when its time is over. NCCL's wait has no end: its thread may stay.

        Args:
            timeout_s: seconds that it may take; None: `connect` has a timeout of its own.

        Raises:
            RuntimeError: the groups were aborted; or `connect` failed, or took too long.
        """
        number, future = self.number, self._connect_threads.submit(_run_in_scope, self.store, connect)
        deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
        while True:
            concurrent.futures.wait((future,), _POLL_S)
            if future.done():
                return future.result()
            if self.abort_failure is not None or self.number != number:
                raise RuntimeError("the group was given up while its members connected")
            if monotonic() > deadline:
                raise RuntimeError(f"not all members of the group connected within {timeout_s:.0f} s")

    def check_not_aborted(self) -> None:
        """Raise if all groups are aborted.

        Raises:
            BaseException: the abort error, while groups are formed.
            GroupBroken: at other times.
        """
        if self.abort_failure is not None:
            forming = self.connect_timeout_s is not None
            raise (self.abort_failure.error_to_raise() if forming else None) or GroupBroken(
                f"a process group cannot be connected while all are broken ({self.abort_failure.reason}). They are "
                "formed again before the next cell: run the cell again"
            )

    def prefix_store(self, path: str = "") -> PrefixStore:
        """Return the store with this generation's prefix, and `path` in it."""
        assert self.store is not None  # a generation has begun
        return PrefixStore(f"e{self.number}/{path}" if path else f"e{self.number}", self.store)

    def exchange(self, topic: str, data: bytes, rank: int, world_size: int) -> list[bytes]:
        """Return what each rank passes to this, by rank. Blocks until all have called it; `abort` ends the wait."""
        with self.rendezvous():
            store = self.prefix_store(topic)
            store.set(str(rank), data)  # type: ignore[arg-type]  # torch's stubs know strings alone
            return [bytes(found) for found in store.multi_get([str(peer) for peer in range(world_size)])]

    def limit_waits(self, timeout_s: float) -> None:
        """Set the timeout of the store's waits."""
        assert self.store is not None
        self.store.set_timeout(timedelta(seconds=timeout_s))


def _cancel_scope(store: Store | None) -> contextlib.AbstractContextManager[None]:
    return store.cancel_scope() if isinstance(store, MeshStore) else contextlib.nullcontext()


def _run_in_scope(store: Store | None, connect: Callable[[], Result]) -> Result:
    with _cancel_scope(store):
        return connect()
