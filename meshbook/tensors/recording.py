"""`@meshbook.record`: a repeated step becomes one message, and on the ranks one straight-line function.

The step's Python runs every time: its optimizers count, its schedules advance, its `if`s decide. The engine holds its
operations until the function ends, and they are compared with those of earlier calls. If the operations, the pattern of
tensors and the lines are the same, one operation replaces them, with the tensors and numbers of this call. Otherwise
they are sent unchanged. A recording thus never gives another result than the step; it saves the ranks' work (DTensor's
5 to 20 us per operation, and a collective per gradient), not that of Python, which runs ahead.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from meshbook.tensors import engine as engines
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.op_queue import HeldOps, PendingOp
from meshbook.tensors.traces import TraceCache

P = ParamSpec("P")
T = TypeVar("T")

# Consecutive calls whose hold ended early, after which the function's operations are no longer held.
_MAX_BREAKS = 3
# How often one sequence of operations is recorded again, because other tensors outlive it or their pattern differs.
_MAX_RECORDINGS = 3


@overload
def record(function: Callable[P, T], /) -> Recorded[P, T]: ...


@overload
def record(function: None = None, /, *, enabled: bool = True) -> Callable[[Callable[P, T]], Recorded[P, T]]: ...


def record(function: Any = None, /, *, enabled: bool = True) -> Any:
    """Decorator: sends a step on remote tensors as one message from its second call on.

    The function always runs in Python, values that it computes there included; its operations are compared one by one
    with the recorded ones before anything is sent. Where they differ (another shape, another branch, a new tensor),
    they run one by one and are recorded again.

    Does not wait: results are RemoteTensors in flight. Values equal those without recording except for the order in
    which merged all-reduces sum, a rounding of the last bits; with up to two ranks, without collectives, or under
    torch.use_deterministic_algorithms, they are equal bit for bit.

    Args:
        enabled: False leaves the function unchanged.

    Returns:
        The function, with `.stats()` (how its calls were carried out) and `.forget()`.
    """
    if function is None:
        return lambda found: Recorded(found, enabled)
    return Recorded(function, enabled)


@dataclass
class RecordingStats:
    """How the calls of a recorded function were carried out."""

    one_by_one: int = 0
    recorded: int = 0  # calls that made a recording
    replayed: int = 0
    broken: int = 0  # read a value before the end
    num_ops: int = 0  # of the last call


class Recorded(Generic[P, T]):
    """A function whose repeated calls are sent as one message each."""

    def __init__(self, function: Callable[P, T], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._caches: dict[str, TraceCache] = {}  # by engine: a restarted mesh has other templates
        self._stats = RecordingStats()
        self._consecutive_breaks = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = self._engine_of(args, kwargs) if self._enabled else None
        if engine is None or self._consecutive_breaks >= _MAX_BREAKS:
            return self._function(*args, **kwargs)
        held = HeldOps()
        try:
            if not engine.hold(held):  # called inside another recorded function
                return self._function(*args, **kwargs)
            result = self._function(*args, **kwargs)
            self._finish_call(engine, held)
        except BaseException:
            engine.release(held, None)
            raise
        return result

    def stats(self) -> RecordingStats:
        return self._stats

    def forget(self) -> None:
        """Drop the recordings; the next calls record again."""
        for cache in self._caches.values():
            cache.clear()
        self._caches.clear()
        self._consecutive_breaks = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        stats = self._stats
        return f"<recorded {self.__name__}: {stats.replayed} of its calls in one message, {stats.num_ops} operations>"  # type: ignore[attr-defined]

    # ----

    def _engine_of(self, args: Any, kwargs: Any) -> TensorEngine | None:
        """Return the engine of its tensors; None: several, or unknown, so that nothing is held."""
        open_engines = [engine for engine in list(engines.ENGINES) if engine.is_open]
        if len(open_engines) < 2:
            return open_engines[0] if open_engines else None
        return _engine_among((args, kwargs), open_engines) or _engine_among(
            _referenced_by(self._function), open_engines
        )

    def _finish_call(self, engine: TensorEngine, held: HeldOps) -> None:
        """Send one message, or all operations, at the end of the function."""
        engine.release(held, functools.partial(self._rewrite_ops, engine))
        if not held.break_reason:
            self._consecutive_breaks = 0
            return
        self._stats.broken += 1
        self._consecutive_breaks += 1
        if self._consecutive_breaks == _MAX_BREAKS:
            warnings.warn(
                f"{self.__name__}() asks for a value before it ends ({held.break_reason}), so it is not held to its "  # type: ignore[attr-defined]
                "end any more; return the tensor and read it outside, and it can be recorded as one",
                stacklevel=3,
            )

    def _rewrite_ops(
        self, engine: TensorEngine, ops: list[PendingOp], freed_ids: list[int]
    ) -> tuple[PendingOp, set[int]] | None:
        """See `op_queue.OpRewriter`."""
        stats = self._stats
        stats.num_ops = len(ops)
        if not ops:
            return None
        cache = self._cache_of(engine)
        stream, call_sites = [number for numbers, _ in ops for number in numbers], [call_site for _, call_site in ops]
        trace = cache.find(stream, call_sites)
        if trace is None:
            cache.add(stream, call_sites)
            stats.one_by_one += 1
            return None
        ids = trace.ids_of(stream)
        created = set(trace.created_ids(ids))
        alive = created.difference(freed_ids)
        if trace.recording is not None and alive.issubset(trace.result_ids(ids)):
            stats.replayed += 1
        elif trace.num_recordings < _MAX_RECORDINGS and trace.make_recording({ids.index(id) for id in alive}):
            stats.recorded += 1
        else:
            stats.one_by_one += 1
            return None
        return (trace.replay_op(ids, stream), call_sites[-1]), created.difference(trace.result_ids(ids))

    def _cache_of(self, engine: TensorEngine) -> TraceCache:
        cache = self._caches.get(engine.name)
        if cache is None:
            self._caches = {name: cached for name, cached in self._caches.items() if cached.engine.is_open}
            cache = self._caches[engine.name] = TraceCache(engine)
        return cache


# ---------------------------------------------------------------------------------------------------------------------
# The engine of a step


def _engine_among(things: Any, engines_open: list[TensorEngine]) -> TensorEngine | None:
    """Return the only engine whose tensors are among these: directly, as parameters, or as attributes."""
    engine_ids = {id(tensor._spec.engine) for tensor in _iter_candidates(things) if hasattr(tensor, "_spec")}
    matching = [engine for engine in engines_open if id(engine) in engine_ids]
    return matching[0] if len(matching) == 1 else None


def _iter_candidates(things: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(things):
        is_plain = isinstance(leaf, (torch.Tensor, ModuleType, type)) or not hasattr(leaf, "__dict__")
        for thing in (leaf, *(() if is_plain else vars(leaf).values())):
            yield from thing.parameters() if isinstance(thing, torch.nn.Module) else (thing,)


def _referenced_by(function: Callable[..., Any]) -> list[Any]:
    """Return the objects that the function's own code names, in its closure and module."""
    try:
        names = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a Python function, or a name without a value yet
        return []
    return [*names.nonlocals.values(), *names.globals.values()]
