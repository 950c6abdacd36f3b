"""What this process knows of a tensor on the ranks: its id, its spec, and the template of an operation on it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for


class TensorSpec:
    """Everything about a tensor but its data. Interned: equal specs of an engine are one object.

    Attributes:
        shape, stride: of the global tensor; of each rank's own where `placements` is None.
        placements: torch's, one per axis of the mesh; None: the per-rank view.
        is_copied_view: a view that shares no storage, because DTensor had to copy.
        engine: the engine that the tensor belongs to.
        wrapper_args: arguments that create a tensor of this spec in torch; None until the first one.
    """

    __slots__ = ("__weakref__", "dtype", "engine", "is_copied_view", "placements", "shape", "stride", "wrapper_args")

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...] | None
    is_copied_view: bool
    engine: Any
    wrapper_args: tuple[Any, ...] | None

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {format_placements(self.placements)}"

    @property
    def has_partial(self) -> bool:
        """Whether the ranks along some axis hold terms of a reduction."""
        return any(placement.is_partial() for placement in self.placements or ())

    @property
    def is_inexact(self) -> bool:
        """Whether its dtype is floating-point or complex."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class SpecTable:
    """Interns the specs of an engine's tensors."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._specs: weakref.WeakValueDictionary[Any, TensorSpec] = weakref.WeakValueDictionary()

    def intern(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Any,
        stride: Sequence[int] | None = None,
        is_copied_view: bool = False,
    ) -> TensorSpec:
        """Return the one spec of these values.

        Args:
            stride: None: contiguous.
        """
        shape = tuple(shape)
        stride = contiguous_strides(shape) if stride is None else tuple(stride)
        key = (shape, stride, dtype, placements, is_copied_view)
        found = self._specs.get(key)
        if found is None:
            found = TensorSpec()
            found.shape, found.stride, found.dtype, found.placements, found.is_copied_view = key
            found.engine, found.wrapper_args = self._engine, None
            self._specs[key] = found
        return found

    def as_copied_view(self, spec: TensorSpec) -> TensorSpec:
        """Return the same spec for a view that is a copy."""
        return self.intern(spec.shape, spec.dtype, spec.placements, spec.stride, True)


class TensorHandle:
    """A reference to a tensor on the ranks: its id is freed there when the handle is garbage-collected.

    A separate object, because torch may resurrect a tensor's Python object after `__del__`. It has no `__init__`,
    because one is created per operation. The finalizer is C code, in a slot: Python drops a KeyboardInterrupt that is
    raised in a finalizer written in Python, and the user's interrupt would be lost.
    """

    __slots__ = ("__del__", "id", "spec", "version_counter")

    __del__: Callable[[], None]
    id: int
    spec: TensorSpec
    version_counter: list[int] | None  # shared by a tensor and its views
    is_functional_view = False  # a view that DTensor had to copy (`functional_views`)

    def get_version_counter(self) -> list[int]:
        """Return the count of in-place changes, shared by the tensor and all its views."""
        if self.version_counter is None:
            self.version_counter = [0]
        return self.version_counter


@dataclass(slots=True)
class Template:
    """The plan of a kind of operation.

    Attributes:
        number: its number on the ranks.
        outputs: for each result a TensorSpec (new), the index of an input (changed in place), or None.
        returns: "none", "one", "list", "tuple".
        redistributions: placements that inputs must be brought to first, by index; empty if none.
        mutates: indices of inputs that are changed.
        functional_op: the out-of-place operation whose result is copied into the first input, where DTensor would
            change only a part of it.
        seeded: draws random numbers; its last float is the seed.
        is_view: results are views of the first input.
        shares_storage: ... and share its storage.
        overwrites: replaces the complete contents of what it changes.
        body: the pickled message to the ranks.
        needs_slow_path: creates more than one new tensor that is the complete result.
        fast_path_output: that tensor's spec; None: the slow path is needed.
    """

    number: int
    outputs: tuple[TensorSpec | int | None, ...] = ()
    returns: str = "none"
    redistributions: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    mutates: tuple[int, ...] = ()
    functional_op: Any = None
    seeded: bool = False
    is_view: bool = False
    shares_storage: bool = False
    overwrites: bool = False
    body: bytes = b""
    name: str = ""
    needs_slow_path: bool = field(init=False)
    fast_path_output: TensorSpec | None = field(init=False)

    def __post_init__(self) -> None:
        copies_view = self.is_view and any(
            isinstance(spec, TensorSpec) and spec.is_copied_view for spec in self.outputs
        )
        self.needs_slow_path = bool(
            self.redistributions or self.functional_op or self.mutates or self.seeded or copies_view
        )
        single = self.outputs[0] if self.returns == "one" else None
        self.fast_path_output = single if isinstance(single, TensorSpec) and not self.needs_slow_path else None


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape. Cached: torch's takes 17 us, a tenth of an upload."""
    return tuple(make_contiguous_strides_for(shape))


def format_placements(placements: Sequence[Any] | None) -> str:
    """Format placements for people to read."""
    if placements is None:
        return "per rank"
    return f"({', '.join(str(placement) for placement in placements)})"
