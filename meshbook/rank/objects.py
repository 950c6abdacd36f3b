"""The objects of a rank that clients have handles to: resolving the handles, sending and keeping the values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any

from meshbook.errors import TransferError
from meshbook.rank.call_state import CallState
from meshbook.rank.previews import expressions
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.rank.value_store import ValueStore
from meshbook.wire import pickling
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.messages import Payload, Preview, Value

if TYPE_CHECKING:  # it imports torch, which a mesh may not have
    from meshbook.rank.tensors.engine import CurrentOp, RankTensors

# Plain values (numbers, short strings, small tuples of them) up to this size are sent in the report of their cell.
_INLINE_PLAIN_BYTES = 4096


class RankObjects:
    """Resolves the handles of clients on this rank, and keeps the values behind them.

    Attributes:
        pool: shared segments that hold the large buffers of sent values.
        reader: the segments of others that values here were read from.
        values: the values behind handles to results.
        resolvers: kind of reference -> function that resolves its key.
    """

    def __init__(
        self,
        rank: int,
        device: str,
        namespace: MutableMapping[str, Any],
        state: CallState,
        groups: RankGroups,
        *,
        defer_interrupts: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            namespace: in which cells run.
        """
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        self.resolvers: dict[str, Callable[[str], Any]] = {}
        self._rank, self._device, self._namespace, self._state = rank, device, namespace, state
        self._groups, self._defer_interrupts = groups, defer_interrupts
        self.values = ValueStore(self.pool)
        self._tensors: RankTensors | None = None  # set once a client has used it

    # ---- remote tensors

    @property
    def tensors(self) -> RankTensors:
        """The data behind controllers' remote tensors on this rank."""
        if self._tensors is None:
            import torch

            from meshbook.rank.tensors.engine import RankTensors

            self._tensors = RankTensors(
                self._rank,
                torch.device(self._device),
                self._groups.process_groups,
                load=self.unpickle,
                dump=lambda thing: self.values.dump(self._state.running_call_id or "", thing),
                resolve=self.resolve,
                defer_interrupts=self._defer_interrupts,
            )
        return self._tensors

    @property
    def has_tensors(self) -> bool:
        """Whether a client has remote tensors on this rank."""
        return self._tensors is not None

    def drop_tensors(self) -> None:
        """Drop what is behind remote tensors: they are cut for another number of ranks."""
        self._tensors = None

    @property
    def current_operation(self) -> CurrentOp | None:
        """The running operation on remote tensors (`rank.tensors.engine.CurrentOp`); None if none runs."""
        return None if self._tensors is None else self._tensors.current_op()

    # ---- what comes in

    def unpickle(self, payload: Payload) -> Any:
        return pickling.load(payload, reader=self.reader, resolve=self.resolve)

    def resolve(self, reference: str) -> Any:
        """Return this rank's object for a handle in the arguments: `name:x`, `ref:<call>`, `tensor:<engine>#<id>`."""
        kind, _, key = reference.partition(":")
        if kind == "ref":
            if key not in self.values:
                raise TransferError(f"the object behind this handle was released on rank {self._rank}")
            return self.values[key]
        if kind == "tensor":
            return self.tensors.resolve(key)
        if kind in self.resolvers:
            return self.resolvers[kind](key)
        if key not in self._namespace:
            raise NameError(f"name {key!r} is not defined on rank {self._rank}")
        return self._namespace[key]

    def evaluate(self, expression: expressions.Expression) -> Any:
        return expressions.evaluate(expression, self._namespace, self.values, self.resolve)

    def inject_globals(self, function: Any) -> None:
        """Add missing globals to a notebook function that was sent by value.

        It has only the globals that were pickled with it; other names (`rank`, `dist`, what cells have bound) resolve
        as if it had been defined in a cell.
        """
        function_globals = getattr(function, "__globals__", None)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if function_globals is None or function_globals is getattr(module, "__dict__", None):
            return
        for name in _iter_global_names(function.__code__):
            if name not in function_globals and name in self._namespace:
                function_globals[name] = self._namespace[name]

    # ---- what goes out

    def describe(self, call: str, result: Any, preview: Preview, inline_limit: int, *, retain: bool) -> Value:
        """Return a value as it is reported: its preview, plus its pickle if small, else a reference to fetch it later.

        Plain values are always included; others only up to `inline_limit` bytes of pickle.
        """
        if preview.kind in ("plain", "none") and not preview.truncated:
            inline_limit = max(inline_limit, _INLINE_PLAIN_BYTES)
        payload = pickling.dump_small(result, inline_limit) if inline_limit else None
        if payload is not None:
            return Value(preview=preview, payload=payload)
        if not retain:
            return Value(preview=preview, payload=self.values.dump(call, result))
        self.values.store(call, result)
        return Value(preview=preview, ref=call)

    def drop_client(self, client: str) -> None:
        """Release the data held for a client that has disconnected."""
        self.values.drop_client(client)
        if self._tensors is not None:
            self._tensors.drop_client(client)


def _iter_global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_global_names(constant)
